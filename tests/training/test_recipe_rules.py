"""Rules of a recipe: each rule finds its violation, and no rule of the table is untested."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from cases import GIVEN, recipe

from plateaux.config import schema
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.training.recipe_rules import RULES, Rule, check

PATIENCE = {"train": {"early_stopping_patience": 2}, "data": {"validation_split": 3}}


def partitioned(**sections: Any) -> Recipe:
    method = {"name": "sharpbalance", "rho": 0.2, "partition_epoch": 1, **sections.pop("method", {})}
    return recipe("deep_ensemble", method=method, **sections)


def mixed_models() -> Recipe:
    return Recipe.from_dict({**recipe("snapshot").to_dict(), "model": {"name": ["mlp", "mlp", "cases:bent"]}})


VIOLATIONS = [
    (mixed_models, "set the same model for all"),
    (lambda: recipe("snapshot", model={"sparsity": 0.5}), "model.sparsity"),
    (lambda: recipe("snapshot", **PATIENCE), "start where the previous member ended"),
    (lambda: recipe("snapshot", lr_scheduler=()), "add [[lr_scheduler]]"),
    (lambda: recipe("apart", method={"rho": [0.1, 0.0, 0.1]}), "the same number of gradients"),
    (lambda: recipe("apart", loss={"label_smoothing": [0.0, 0.1, 0.0]}), "its options cannot differ"),
    (lambda: recipe("apart", method={"strength": [0.1, 0.2, 0.3]}), "one loss, so only rho may differ"),
    (lambda: recipe("deep_ensemble", data={"unlabeled": "spirals@5"}), "data.unlabeled is ignored"),
    (lambda: partitioned(method={"top_k": [0.1, 0.2, 0.3]}), "by one rule, so only rho may differ"),
    (lambda: partitioned(**PATIENCE), "all members at the data partition"),
    (lambda: partitioned(members=1), "with a single member"),
    (lambda: recipe("apart", **PATIENCE), "none can stop early"),
    (lambda: recipe("a2d, sequential", precision="fp16"), "'bf16' or 'fp32'"),
    (lambda: recipe("apart", data={"shuffle": "per_member"}), "must be 'shared'"),
    (lambda: recipe("apart", data={"bootstrap": 1.0}), "Leave out data.bootstrap"),
    (lambda: recipe(train={"select": "best:nll"}), "train.select = "),
    (lambda: recipe(train={"early_stopping_patience": 2}), "train.early_stopping_patience needs"),
]


@pytest.mark.parametrize(
    ("rule", "violation"), list(zip(RULES, VIOLATIONS, strict=True)), ids=[v[1] for v in VIOLATIONS]
)
def test_a_violation_is_an_error_or_a_warning(rule: Rule, violation: tuple[Callable[[], Recipe], str]) -> None:
    build_recipe, message = violation
    assert message in rule.message
    experiment = Experiment(build_recipe(), GIVEN)
    assert rule.is_violated(experiment)
    if rule.level == "error":
        with pytest.raises(RecipeError, match=re.escape(message)):
            check(experiment)
    else:
        with pytest.warns(UserWarning, match=re.escape(message)):
            check(experiment)


@pytest.mark.parametrize("method", ["deep_ensemble", "snapshot", "a2d", "sharpbalance", "apart"])
def test_valid_recipes_violate_no_rule(method: str) -> None:
    experiment = Experiment(recipe(method), GIVEN)
    assert [rule.message for rule in RULES if rule.is_violated(experiment)] == []


def test_an_unknown_metric_or_probe_is_an_error() -> None:
    for sections in (
        {"train": {"select": "best:acuracy"}, "data": {"validation_split": 3}},
        {"probe": {"probes": ["sharpnes"]}},
    ):
        with pytest.raises(RecipeError, match="did you mean"):
            check(Experiment(recipe(**sections), GIVEN))


def test_checking_many_members_builds_every_schema_once() -> None:
    schema._build_schema.cache_clear()
    check(Experiment(recipe("sam", members=100), GIVEN))
    assert schema._build_schema.cache_info().misses == len(("data", "model", "loss", "method"))
