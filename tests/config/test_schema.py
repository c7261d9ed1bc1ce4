"""Options of plugins: the signature of a factory is the schema of its section."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import pytest
import torch

from plateaux.config.schema import ConfigKeyError, accepts, check, fields, member_options
from plateaux.core.errors import RecipeError


def factory(
    loss: Any, *, rho: float = 0.05, hidden: tuple[int, ...] = (8,), kind: Literal["a", "b"] = "a", m: int | None = None
) -> dict[str, Any]:
    return {}


class Thing:
    def __init__(self, size: int, *, fast: bool = False) -> None:
        self.size = size


def test_options_are_the_keyword_arguments_that_the_engine_does_not_provide() -> None:
    assert set(fields(factory)) == {"rho", "hidden", "kind", "m"}
    assert set(fields(Thing)) == {"size", "fast"}
    assert set(fields(partial(Thing, 3))) == {"fast"}


def test_valid_options_are_converted_and_no_default_is_added() -> None:
    assert check("method", factory, {"rho": 1, "hidden": [3, 4], "m": None}) == {
        "rho": 1.0,
        "hidden": (3, 4),
        "m": None,
    }
    assert check("method", factory, {}) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roh": 0.1}, "[method] has no key 'roh'; did you mean 'rho'?"),
        ({"nam": "x"}, "[method] has no key 'nam'; did you mean 'name'?"),
        ({"loss": 1}, "[method] has no key 'loss'; allowed: hidden, kind, m, name, rho"),
        ({"rho": "big"}, "[method] rho = 'big': Input should be a valid number"),
        ({"kind": "c"}, "[method] kind = 'c': Input should be 'a' or 'b'"),
        ({"hidden": 3}, "[method] hidden = 3: Input should be a valid tuple"),
    ],
)
def test_the_error_for_an_invalid_option_names_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigKeyError) as error:
        check("method", factory, options, also=["name"])
    assert str(error.value).startswith(message)
    assert (error.value.section, error.value.name) == ("method", next(iter(options)))


def test_a_missing_required_option_is_reported() -> None:
    with pytest.raises(ConfigKeyError, match="Field required"):
        check("data", Thing, {})


def test_a_list_has_one_value_per_member_unless_the_option_accepts_lists() -> None:
    options = {"rho": [0.1, 0.2], "hidden": [8, 4], "m": 3}
    assert [member_options(factory, options, n, 2) for n in range(2)] == [
        {"rho": 0.1, "hidden": [8, 4], "m": 3},
        {"rho": 0.2, "hidden": [8, 4], "m": 3},
    ]
    assert member_options(factory, {"hidden": [[8, 8], [4]]}, 1, 2) == {"hidden": [4]}
    assert member_options(factory, {"kind": ["a", "b"]}, 1, 2) == {"kind": "b"}
    with pytest.raises(RecipeError, match="rho lists 3 values, but the ensemble has 2 members"):
        member_options(factory, {"rho": [1, 2, 3]}, 0, 2)


def test_a_factory_without_annotations_receives_one_value_per_member() -> None:
    def bare(*, width=8, blocks=(1, 2), depth=None):  # type: ignore[no-untyped-def]
        return {}

    options = {"width": [8, 16], "blocks": [3, 4], "depth": [1, 2]}
    assert member_options(bare, options, 1, 2) == {"width": 16, "blocks": [3, 4], "depth": 2}
    assert check("model", bare, {"width": 16, "blocks": [3, 4]}) == {"width": 16, "blocks": [3, 4]}
    with pytest.raises(RecipeError, match=r"width lists 3 values.*annotate it in the signature"):
        member_options(bare, {"width": [1, 2, 3]}, 0, 2)


def test_an_option_annotated_with_any_receives_a_list_as_it_is() -> None:
    def anything(*, value: Any = None) -> dict[str, Any]:
        return {}

    assert member_options(anything, {"value": [1, 2]}, 0, 2) == {"value": [1, 2]}


def test_unknown_options_are_returned_unchanged() -> None:
    assert member_options(factory, {"what": [1, 2, 3]}, 0, 2) == {"what": [1, 2, 3]}


@pytest.mark.parametrize(
    "name", [n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]
)
def test_the_options_of_every_torch_optimizer_can_be_read(name: str) -> None:
    if name == "Optimizer":
        return
    known = fields(getattr(torch.optim, name))
    assert "lr" in known
    assert member_options(getattr(torch.optim, name), {"lr": [0.1, 0.2]}, 1, 2) == {"lr": 0.2}


def test_momentum_can_differ_between_members_and_betas_are_one_value() -> None:
    assert member_options(torch.optim.SGD, {"momentum": [0.5, 0.9]}, 1, 2) == {"momentum": 0.9}
    assert member_options(torch.optim.Adam, {"betas": [0.5, 0.9]}, 1, 2) == {"betas": [0.5, 0.9]}


def test_accepts_returns_whether_a_factory_has_an_argument() -> None:
    assert accepts(factory, "loss")
    assert not accepts(factory, "shape")
