"""Rules of a recipe: each rule finds its violation, and no rule of the table is untested."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import GIVEN, recipe

from plateaux.config import schema
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.training import recipe_rules
from plateaux.training.recipe_rules import RULES, PlannedTraining, check

PATIENCE = {"train": {"early_stopping_patience": 2}, "data": {"validation_split": 3}}


def partitioned(**sections: Any) -> Recipe:
    method = {"name": "sharpbalance", "rho": 0.2, "partition_epoch": 1, **sections.pop("method", {})}
    return recipe("deep_ensemble", method=method, **sections)


def mixed_models() -> Recipe:
    return Recipe.from_dict({**recipe("snapshot").to_dict(), "model": {"name": ["mlp", "mlp", "cases:bent"]}})


VIOLATIONS = {
    "chained_members_share_an_architecture": (mixed_models, "set the same model for all"),
    "chained_members_are_not_pruned": (lambda: recipe("snapshot", model={"sparsity": 0.5}), "model.sparsity"),
    "chained_members_do_not_stop_early": (lambda: recipe("snapshot", **PATIENCE), "early_stopping_patience"),
    "chained_members_have_a_schedule": (lambda: recipe("snapshot", lr_scheduler=()), "add [[lr_scheduler]]"),
    "joint_members_request_equally_many_gradients": (
        lambda: recipe("apart", method={"rho": [0.1, 0.0, 0.1]}),
        "the same number of gradients",
    ),
    "joint_members_share_loss_options": (
        lambda: recipe("apart", loss={"label_smoothing": [0.0, 0.1, 0.0]}),
        "its options cannot differ",
    ),
    "joint_members_share_method_options": (
        lambda: recipe("apart", method={"strength": [0.1, 0.2, 0.3]}),
        "only rho may differ",
    ),
    "unlabeled_samples_are_used": (
        lambda: recipe("deep_ensemble", data={"unlabeled": "spirals@5"}),
        "data.unlabeled is ignored",
    ),
    "partition_is_the_same_for_all_members": (
        lambda: partitioned(method={"top_k": [0.1, 0.2, 0.3]}),
        "only rho may differ",
    ),
    "partitioned_members_do_not_stop_early": (lambda: partitioned(**PATIENCE), "early_stopping_patience"),
    "partition_has_several_members": (lambda: partitioned(members=1), "with a single member"),
    "joint_members_do_not_stop_early": (lambda: recipe("apart", **PATIENCE), "none can stop early"),
    "shared_losses_are_not_fp16": (lambda: recipe("a2d, sequential", precision="fp16"), "'bf16' or 'fp32'"),
    "joint_members_share_batches": (lambda: recipe("apart", data={"shuffle": "per_member"}), "must be 'shared'"),
    "bootstrap_needs_own_batches": (lambda: recipe("apart", data={"bootstrap": 1.0}), "Leave out data.bootstrap"),
    "selection_needs_validation_samples": (lambda: recipe(train={"select": "best:nll"}), "set data.validation_split"),
    "early_stopping_needs_validation_samples": (
        lambda: recipe(train={"early_stopping_patience": 2}),
        "set data.validation_split",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_rule_finds_its_violation(name: str) -> None:
    build_recipe, message = VIOLATIONS[name]
    violation = getattr(recipe_rules, name)(PlannedTraining(Experiment(build_recipe(), GIVEN)))
    assert violation is not None
    assert message in violation


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.find_violation.__name__)
@pytest.mark.parametrize("method", ["deep_ensemble", "snapshot", "a2d", "sharpbalance", "apart"])
def test_valid_recipes_violate_no_rule(rule: recipe_rules.Rule, method: str) -> None:
    assert rule.find_violation(PlannedTraining(Experiment(recipe(method), GIVEN))) is None


def test_an_unknown_metric_or_probe_is_an_error() -> None:
    for sections in ({"train": {"select": "best:acuracy"}}, {"probe": {"probes": ["sharpnes"]}}):
        with pytest.raises(RecipeError, match="did you mean"):
            recipe_rules.metrics_and_probes_exist(PlannedTraining(Experiment(recipe(**sections), GIVEN)))


def test_every_rule_is_tested() -> None:
    assert {rule.find_violation.__name__ for rule in RULES} == {*VIOLATIONS, "metrics_and_probes_exist"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.find_violation.__name__)
def test_check_raises_errors_and_shows_warnings(rule: recipe_rules.Rule) -> None:
    name = rule.find_violation.__name__
    if name not in VIOLATIONS:
        return
    build_recipe, message = VIOLATIONS[name]
    if rule.level == "error":
        with pytest.raises(RecipeError, match=re.escape(message)):
            check(Experiment(build_recipe(), GIVEN))
    else:
        with pytest.warns(UserWarning, match=re.escape(message)):
            check(Experiment(build_recipe(), GIVEN))


def test_checking_many_members_builds_every_schema_once() -> None:
    schema._build_schema.cache_clear()
    check(Experiment(recipe("sam", members=100), GIVEN))
    assert schema._build_schema.cache_info().misses == len(("data", "model", "loss", "method"))
