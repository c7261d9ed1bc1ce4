"""Options of plug-ins: the signature of a factory is the schema of its section."""

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


def test_options_are_the_keywords_without_what_the_engine_gives() -> None:
    assert set(fields(factory)) == {"rho", "hidden", "kind", "m"}
    assert set(fields(Thing)) == {"size", "fast"}
    assert set(fields(partial(Thing, 3))) == {"fast"}


def test_good_options_come_back_with_their_types_and_nothing_is_added() -> None:
    assert check("method", factory, {"rho": 1, "hidden": [3, 4], "m": None}) == {
        "rho": 1.0,
        "hidden": (3, 4),
        "m": None,
    }
    assert check("method", factory, {}) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"roh": 0.1}, "[method] has no key 'roh'; did you mean 'rho'?"),
        ({"nam": "x"}, "[method] has no key 'nam'; did you mean 'name'?"),
        ({"loss": 1}, "[method] has no key 'loss'; allowed: hidden, kind, m, name, rho"),
        ({"rho": "big"}, "[method] rho = 'big': Input should be a valid number"),
        ({"kind": "c"}, "[method] kind = 'c': Input should be 'a' or 'b'"),
        ({"hidden": 3}, "[method] hidden = 3: Input should be a valid tuple"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigKeyError) as told:
        check("method", factory, given, also=["name"])
    assert str(told.value).startswith(words)
    assert (told.value.section, told.value.name) == ("method", next(iter(given)))


def test_an_option_that_must_be_given_is_asked_for() -> None:
    with pytest.raises(ConfigKeyError, match="Field required"):
        check("data", Thing, {})


def test_a_list_is_one_value_each_unless_the_option_is_a_list_itself() -> None:
    given = {"rho": [0.1, 0.2], "hidden": [8, 4], "m": 3}
    assert [member_options(factory, given, n, 2) for n in range(2)] == [
        {"rho": 0.1, "hidden": [8, 4], "m": 3},
        {"rho": 0.2, "hidden": [8, 4], "m": 3},
    ]
    assert member_options(factory, {"hidden": [[8, 8], [4]]}, 1, 2) == {"hidden": [4]}
    assert member_options(factory, {"kind": ["a", "b"]}, 1, 2) == {"kind": "b"}
    with pytest.raises(RecipeError, match="rho lists 3 values, but the ensemble has 2 members"):
        member_options(factory, {"rho": [1, 2, 3]}, 0, 2)


def test_what_is_unknown_is_left_for_the_check() -> None:
    assert member_options(factory, {"what": [1, 2, 3]}, 0, 2) == {"what": [1, 2, 3]}


@pytest.mark.parametrize(
    "name", [n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]
)
def test_every_optimiser_of_torch_has_options_that_can_be_read(name: str) -> None:
    if name == "Optimizer":
        return
    known = fields(getattr(torch.optim, name))
    assert "lr" in known
    assert member_options(getattr(torch.optim, name), {"lr": [0.1, 0.2]}, 1, 2) == {"lr": 0.2}


def test_momentum_may_differ_and_betas_are_a_pair() -> None:
    assert member_options(torch.optim.SGD, {"momentum": [0.5, 0.9]}, 1, 2) == {"momentum": 0.9}
    assert member_options(torch.optim.Adam, {"betas": [0.5, 0.9]}, 1, 2) == {"betas": [0.5, 0.9]}


def test_accepts_says_whether_a_name_is_taken() -> None:
    assert accepts(factory, "loss")
    assert not accepts(factory, "shape")
