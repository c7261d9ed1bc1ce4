"""A study is data: its grid, its paired seeds, and which of its runs are one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from cases import GIVEN

from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.core.types import derive_seed
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.loss_landscape.probe import get_probes
from plateaux.studies.grid import apply_changes, condition_label, grid_factors
from plateaux.studies.study import Study
from plateaux.studies.trials import RunSpec, plan_runs, plan_trials
from plateaux.training.recipe_rules import check

BASE = {
    "members": 2,
    "data": {"name": "blobs", "samples": 30, "test_samples": 12, "batch_size": 10},
    "model": {"name": "mlp", "hidden_sizes": [4]},
    "method": {"name": "sam", "rho": 0.1},
    "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
    "train": {"epochs": 4},
}
BALANCED = {"method": {"name": "sharpbalance", "rho": 0.1, "partition_epoch": 2}}


def study(**parts: Any) -> Study:
    return Study.from_dict({"base": BASE, **parts})


def made(**parts: Any) -> list[RunSpec]:
    return plan_runs(plan_trials(study(**parts), GIVEN), GIVEN)


def test_a_study_without_a_grid_is_one_run() -> None:
    (only,) = plan_trials(study())
    assert (only.condition, only.repetition, str(only)) == ({}, 0, "#0")
    assert only.recipe.method.options["rho"] == 0.1


def test_factors_are_crossed_in_the_order_they_are_written() -> None:
    found = study(grid={"method.rho": [0.0, 0.2], "model.hidden_sizes": [[4], [8]]}).conditions()
    assert [condition_label(condition) for condition, _ in found] == [
        "rho=0.0, hidden_sizes=[4]", "rho=0.0, hidden_sizes=[8]",
        "rho=0.2, hidden_sizes=[4]", "rho=0.2, hidden_sizes=[8]",
    ]  # fmt: skip
    assert found[3][1].model.options["hidden_sizes"] == [8]


def test_a_key_may_be_written_without_quotes(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "quickstart"\n[grid]\nmethod.rho = [0.1, 0.2]\nmembers = [1, 2]\n')
    found = Study.load(file)
    assert found.name == "mine"
    assert [condition for condition, _ in found.conditions()][:2] == [
        {"rho": 0.1, "members": 1},
        {"rho": 0.1, "members": 2},
    ]
    assert found.base["data"]["name"] == "digits"


def test_nested_changes_of_one_condition_do_not_affect_others() -> None:
    base = {**BASE, "model": {**BASE["model"], "lora": {"rank": 4, "target_modules": ["*"]}}}
    grid = {"rank": {"rank 4": {}, "rank 16": {"model": {"lora": {"rank": 16}}}}}
    found = study(base=base, grid=grid)
    for _ in range(2):
        assert [recipe.to_dict()["model"]["lora"]["rank"] for _, recipe in found.conditions()] == [4, 16]
    assert found.base["model"]["lora"]["rank"] == 4


def test_a_key_of_a_value_that_is_not_a_section_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"lr_scheduler\.epochs: lr_scheduler = .* is not a section"):
        study(base={**BASE, "lr_scheduler": [{"name": "cosine"}]}, grid={"lr_scheduler.epochs": [1, 2]})


def test_named_conditions_may_have_their_own_factors() -> None:
    grid = {
        "method": {"flat": {"each": {"method.rho": [0.0, 0.3]}}, "plain": {"method": {"name": "deep_ensemble"}}},
        "data.batch_size": [5],
    }
    found = study(grid=grid).conditions()
    assert [condition for condition, _ in found] == [
        {"method": "flat", "rho": 0.0, "batch_size": 5},
        {"method": "flat", "rho": 0.3, "batch_size": 5},
        {"method": "plain", "batch_size": 5},
    ]
    assert [recipe.method.name for _, recipe in found] == ["sam", "sam", "deep_ensemble"]


def test_a_section_with_a_new_name_loses_its_options_and_keeps_its_own_keys() -> None:
    tree = apply_changes(BASE, {("optimizer", "name"): "Adam", ("optimizer", "eps"): 1e-6})
    assert tree["optimizer"] == {"name": "Adam", "lr": 0.1, "eps": 1e-6}
    assert apply_changes(BASE, {("method", "name"): "sam"})["method"] == BASE["method"]
    assert BASE["optimizer"] == {"name": "SGD", "lr": 0.1, "momentum": 0.9}


def test_values_of_a_factor_that_names_plugins_are_called_by_their_section() -> None:
    assert [choice[0] for choice in grid_factors({"method.name": ["sam", "asam"]})[0]] == [
        {"method": "sam"},
        {"method": "asam"},
    ]


def test_repetitions_are_paired() -> None:
    found = plan_trials(study(seed=3, repetitions=2, grid={"method.rho": [0.0, 0.1]}))
    assert [each.repetition for each in found] == [0, 0, 1, 1]
    assert [each.recipe.seed for each in found] == [derive_seed(3, 0)] * 2 + [derive_seed(3, 1)] * 2
    assert len({each.folder for each in found}) == 4


def test_conditions_with_the_same_members_share_one_run() -> None:
    grid = {"way": {"spelt out": {"method": {"rho": 0.05}}, "by default": {"method": {"name": "sam"}}}}
    tree = {**BASE, "method": {"name": "sam"}}
    (one,) = plan_runs(plan_trials(Study.from_dict({"base": tree, "grid": grid})))
    assert [str(each) for each in one.trials] == ["way=spelt out #0", "way=by default #0"]
    (one,) = made(grid={"executor.mode": ["loop", "vmap"]})
    assert len(one.trials) == 2


def test_a_smaller_ensemble_is_the_first_members_of_a_larger_one() -> None:
    (one,) = made(grid={"members": [1, 3, 2]})
    assert one.recipe.members == 3
    assert len({each.run for each in one.trials}) == 3


@pytest.mark.parametrize("method", [{"name": "cases:apart"}, BALANCED["method"]])
def test_joint_and_partitioned_ensembles_have_their_own_run(method: dict[str, Any]) -> None:
    tree = {**BASE, "method": method}
    assert len(plan_runs(plan_trials(Study.from_dict({"base": tree, "grid": {"members": [2, 3]}}), GIVEN), GIVEN)) == 2


def test_a_shared_training_prefix_is_trained_once_and_first() -> None:
    released = {"method": {**BALANCED["method"], "rule": "released", "partition_epoch": 3}}
    grid = {"way": {"sam": {}, "released": released, "other": {"method": {"rho": 0.5}}, "paper": BALANCED}}
    found = made(grid=grid, repetitions=2)
    by = {str(task.trials[0]): task for task in found}
    paper = by["way=paper #0"]
    assert paper.is_parent
    assert paper.prefix is None
    assert by["way=sam #0"].prefix == by["way=released #0"].prefix == paper.folder
    assert by["way=other #0"].prefix is None
    assert by["way=sam #1"].prefix == by["way=paper #1"].folder != paper.folder
    places = [str(task.trials[0]) for task in found]
    assert places.index("way=paper #0") < places.index("way=sam #0") < places.index("way=other #1")


def test_a_prefix_is_not_shared_with_best_epoch_selection_or_early_stopping() -> None:
    base = {**BASE, "train": {"epochs": 4, "select": "best:accuracy"}, "data": {**BASE["data"], "validation_split": 6}}
    found = plan_runs(plan_trials(Study.from_dict({"base": base, "grid": {"way": {"sam": {}, "paper": BALANCED}}})))
    assert [task.prefix for task in found] == [None, None]


def test_a_base_may_be_a_file_next_to_the_study_with_changes(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(Recipe.from_dict(BASE).to_toml())
    (tmp_path / "study.toml").write_text('[base]\nrecipe = "own.toml"\nmembers = 5\nmethod.rho = 0.7\n')
    found = Study.load(tmp_path / "study.toml").conditions()[0][1]
    assert (found.members, found.method.options["rho"], found.data.batch_size) == (5, 0.7, 10)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"grid": {"method.rho": 0.1}}, "give a list of values"),
        ({"grid": {"method.rho": []}}, "give a list of values"),
        ({"grid": {"seed": [1, 2]}}, "must not set the seed"),
        ({"grid": {"model.wdith": [1], "train.epoch": [3]}}, "wdith=1, epoch=3: .*did you mean 'epochs'"),
        (
            {"grid": {"method.rho": [0.1], "way": {"a": {"each": {"loss.rho": [1]}}}}},
            "two factors .* 'rho'",
        ),
        ({"repetitons": 3}, "no key 'repetitons'; did you mean 'repetitions'"),
        ({"evaluate": {"metric": ["nll"]}}, "no key 'evaluate.metric'; did you mean 'metrics'"),
        ({"repetitions": 0}, "repetitions = 0"),
        ({"base": None}, "has no 'base'"),
        ({"base": "quickstrat"}, "quickstart"),
        ({"base": 3}, "base = 3"),
    ],
)
def test_errors_name_what_is_wrong_and_what_is_allowed(parts: dict[str, Any], words: str) -> None:
    tree = {"base": BASE, **parts}
    with pytest.raises(RecipeError, match=words):
        Study.from_dict({name: part for name, part in tree.items() if part is not None})


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Cannot read the study"):
        Study.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = \n")
    with pytest.raises(RecipeError, match=r"bad\.toml"):
        Study.load(tmp_path / "bad.toml")


def test_the_evaluation_hash_depends_on_everything_that_is_measured() -> None:
    assert (
        study().evaluation_hash()
        == study(grid={"members": [1]}).evaluation_hash()
        != study(evaluate={"splits": ["train"]}).evaluation_hash()
    )


STUDIES = Path(__file__).parents[2] / "studies"


@pytest.mark.parametrize("file", sorted(STUDIES.glob("*.toml")), ids=lambda file: file.stem)
def test_the_studies_of_the_repository_are_valid(file: Path) -> None:
    found = Study.load(file)
    get_metrics([*found.evaluate.metrics, *found.evaluate.corruption_metrics])
    get_probes(found.landscape.probes)
    for task in plan_runs(plan_trials(found)):
        check(Experiment(task.recipe))


def test_the_study_in_the_documentation_is_valid() -> None:
    page = (STUDIES.parent / "docs" / "guides" / "compare.md").read_text(encoding="utf-8")
    text = page.partition('title="study.toml"\n')[2].partition("```")[0]
    found = Study.from_dict(tomlkit.parse(text).unwrap())
    assert len(found.conditions()) == 2 * 4
    documented = set(re.findall(r"^\| (?:`\[{0,2}(\w+)\]{0,2}`)(?:, `(\w+)`)? \|", page, re.MULTILINE))
    assert {name for pair in documented for name in pair if name} == {*Study.model_fields, "extends"} - {
        "name",
        "question",
    }
