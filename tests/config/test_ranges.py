"""Every number of a recipe has a range, and a value that torch would refuse is refused with a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import GIVEN, recipe

from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.config.schema import ConfigSection, _build_schema, _is_dataset
from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.runtime import get_device
from plateaux.optim.losses import LOSSES
from plateaux.studies.study import Study
from plateaux.training.recipe_rules import check

REGISTRIES = (registry.method, registry.metric, registry.probe, registry.dataset, registry.model)
BUILTIN = "plateaux."


def factories() -> Iterator[tuple[str, Any]]:
    """Yield all plug-ins of Plateaux that take options."""
    yield from ((f"loss {name}", factory) for name, factory in LOSSES.items())
    for kind in REGISTRIES:
        plain = {name: kind.get(name) for name in kind.names() if not name.endswith("<name>")}
        for name, factory in {**plain, **kind.prefixes}.items():
            if factory.__module__.startswith(BUILTIN):
                yield f"{kind.kind} {name}", factory


def unbounded(schema: Any, path: str = "") -> Iterator[str]:
    """Yield the places of a JSON schema where a number has no smallest or no largest value."""
    if isinstance(schema, dict):
        bounds = {name.removeprefix("exclusive").lower() for name in schema}
        if schema.get("type") in ("integer", "number") and not {"minimum", "maximum"} <= bounds:
            yield path
        for name, value in schema.items():
            if name != "default":
                yield from unbounded(value, f"{path}/{name}")
    elif isinstance(schema, list):
        for position, value in enumerate(schema):
            yield from unbounded(value, f"{path}/{position}")


@pytest.mark.parametrize("section", [Recipe, Study])
def test_every_number_of_the_schema_has_a_range(section: type[ConfigSection]) -> None:
    assert list(unbounded(section.model_json_schema())) == []


def test_the_search_finds_a_number_without_a_range() -> None:
    schema = {"a": {"type": "number", "minimum": 0}, "b": [{"type": "integer", "exclusiveMinimum": 0, "maximum": 9}]}
    assert list(unbounded(schema)) == ["/a"]


def test_every_number_among_the_options_of_the_plug_ins_has_a_range() -> None:
    found = {}
    for name, factory in factories():
        schema = _build_schema(factory, _is_dataset(factory)).model_json_schema()
        found[name] = list(unbounded(schema))
    assert {name: places for name, places in found.items() if places} == {}
    assert len(found) > 90


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"method": {"name": "sam", "rho": -1}}, r"\[method\] rho = -1: Input should be greater than or equal to 0"),
        ({"method": {"name": "sam", "rho": float("nan")}}, r"\[method\] rho = nan: "),
        ({"method": {"name": "sam", "rho": [0.1, 0.1, -2.0]}}, r"\[method\] rho = -2.0: "),
        ({"loss": {"label_smoothing": 2}}, r"\[loss\] label_smoothing = 2: Input should be less than or equal to 1"),
        ({"model": {"hidden_sizes": [0]}}, r"\[model\] hidden_sizes = \[0\]: "),
        ({"data": {"samples": 10**30}}, r"\[data\] samples = 10+: Input should be less than or equal to"),
        ({"optimizer": {"lr": -1}}, r"\[optimizer\] lr = -1: Input should be greater than or equal to 0"),
        ({"optimizer": {"lr": [0.1, -1, 0.1]}}, r"\[optimizer\] lr = -1: Input should be greater than or equal to 0"),
        ({"optimizer": {"max_grad_norm": 0}}, r"\[optimizer\] max_grad_norm = 0: "),
        ({"optimizer": {"momentum": "x"}}, r"\[optimizer\] momentum = 'x': must be a number"),
        ({"optimizer": {"momentum": -1}}, r"\[optimizer\] SGD refuses .*'momentum': -1.*: Invalid momentum"),
        ({"optimizer": {"momentum": float("inf")}}, r"\[optimizer\] momentum = inf: must be a number"),
        ({"optimizer": {"nesterov": "yes"}}, r"\[optimizer\] nesterov = 'yes': must be true or false"),
        ({"optimizer": {"nesterov": True, "momentum": 0}}, r"\[optimizer\] SGD refuses .*: Nesterov momentum"),
        ({"optimizer": {"name": "Adam", "momentum": 0.9}}, r"\[optimizer\] has no key 'momentum'"),
        (
            {"lr_scheduler": [{"name": "multistep"}]},
            r"\[lr_scheduler\] 'multistep' needs 'milestones', such as milestones = \[30, 60\]",
        ),
        (
            {"lr_scheduler": [{"name": "multistep", "milestones": "x"}]},
            r"\[lr_scheduler\] milestones = 'x': must be an increasing list of epochs, such as \[30, 60\]",
        ),
        ({"lr_scheduler": [{"name": "multistep", "milestones": 3}]}, r"milestones = 3: must be an increasing list"),
        ({"lr_scheduler": [{"name": "multistep", "milestones": [2, 1]}]}, r"milestones = \[2, 1\]: must be an incr"),
        ({"lr_scheduler": [{"name": "multistep", "milestones": ["a"]}]}, r"milestones = \['a'\]: must be an incr"),
        ({"lr_scheduler": [{"name": "step"}]}, r"\[lr_scheduler\] 'step' needs 'step_size', such as step_size = 30"),
        ({"lr_scheduler": [{"name": "step", "step_size": 0}]}, r"step_size = 0: must be a number of epochs above 0"),
        ({"lr_scheduler": [{"name": "exponential", "gamma": "x"}]}, r"\[lr_scheduler\] gamma = 'x': must be a number"),
        ({"lr_scheduler": [{"name": "cosine", "eta_min": "x"}]}, r"\[lr_scheduler\] eta_min = 'x': must be a number"),
        (
            {"lr_scheduler": [{"name": "cosine", "epochs": -1}]},
            r"\[lr_scheduler\] epochs = -1: Input should be greater",
        ),
    ],
)
def test_a_number_outside_its_range_is_refused_before_training(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check(Experiment(recipe(**sections), GIVEN))


@pytest.mark.parametrize("name", ["junk", "", "cuda:x", "cuda:-1", "999", "meta", "9" * 30])
def test_a_device_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=f"There is no device '{name}': this machine has .* CUDA devices. Use cpu"):
        get_device(name)
