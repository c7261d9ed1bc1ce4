"""Every number of a run is one finding, and a study's file carries them alone."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import recipe, rewrite, weights_path

from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RunError
from plateaux.evaluation.evaluate import evaluate
from plateaux.optim.sam import plain_gradient, sam
from plateaux.storage.member_writer import write_member
from plateaux.storage.run import Run
from plateaux.studies.result_rows import COSTS, ResultRow, cost_rows, read_results, results_from_run, results_from_study
from plateaux.training import partition
from plateaux.training.cost import count_passes, measured_cost, passes_per_step
from plateaux.training.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("findings") / "run"
    train(recipe("sam", "mlp", data={"test_samples": 60}), root)
    evaluate(root, metrics=["accuracy", "nll", "der"])
    return Run.open(root)


def pick(found: list[ResultRow], measure: str, row: str, on: str = "test") -> ResultRow:
    (one,) = [each for each in found if (each.metric, each.row, each.split) == (measure, row, on)]
    return one


def test_a_result_row_has_run_condition_metric_split_and_row(run: Run) -> None:
    found = pick(results_from_run(run, {"rho": 0.1}, 3), "accuracy", "member 1")
    truth = {each.metric: each for each in evaluate(run.store.root, metrics=["accuracy"])}["accuracy"]
    assert (found.value, found.stderr) == (truth.rows["member 1"].value, truth.rows["member 1"].stderr)
    assert (found.condition, found.repetition, found.run) == ({"rho": 0.1}, 3, str(run.store.root))
    assert (found.higher_is_better, found.percent, found.mc_stderr) == (True, True, None)
    assert not pick(results_from_run(run), "nll", "member 1").percent


def test_every_row_of_every_stored_result_is_returned_once(run: Run) -> None:
    found = [(each.metric, each.split, each.row) for each in results_from_run(run)]
    rows = sum(len(run.store.get_json(name)["rows"]) for name in run.store.names("metrics"))
    assert len(found) == len(set(found)) == rows + 4 * len(COSTS)


def test_of_two_results_the_one_with_more_members_and_samples_counts(run: Run, tmp_path: Path) -> None:
    root = Path(shutil.copytree(run.store.root, tmp_path / "run"))
    before = results_from_run(Run.open(root))
    evaluate(root, metrics=["accuracy"], members=[0, 2])
    evaluate(root, metrics=["accuracy"], limit=20)
    assert len(Run.open(root).store.names("metrics")) == len(run.store.names("metrics")) + 2
    assert [(e.metric, e.row, e.value) for e in results_from_run(Run.open(root))] == [
        (e.metric, e.row, e.value) for e in before
    ]


def test_results_of_other_weights_are_left_out(run: Run, tmp_path: Path) -> None:
    root = Path(shutil.copytree(run.store.root, tmp_path / "run"))
    other = Run.open(root)
    with write_member(other, 0) as writer:
        changed = {name: tensor + 1 for name, tensor in other.weights(0).items()}
        writer.commit(replace(writer.progress, weights=writer.put_weights(changed, epoch=2)))
    assert {each.split for each in results_from_run(other)} == {"training"}
    weights_path(root, 0).unlink()  # dropped: then what was measured is all there is
    assert pick(results_from_run(other), "accuracy", "member 1").value >= 0


def test_null_is_read_as_nan(run: Run, tmp_path: Path) -> None:
    root = Path(shutil.copytree(run.store.root, tmp_path / "run"))
    name = next(each for each in run.store.names("metrics") if "accuracy" in each)
    tree = run.store.get_json(name)
    tree["rows"]["member 0"]["value"] = None
    run_there = Run.open(root)
    run_there.store.put_json(name, {**tree, "metric": "of_mine"})
    run_there.store.delete("nothing")
    assert math.isnan(pick(results_from_run(run_there), "of_mine", "member 0").value)


def test_accuracy_under_corruption_is_averaged(tmp_path: Path) -> None:
    root = tmp_path / "run"
    tree = recipe("deep_ensemble", "mlp", members=1).to_dict()
    chance = np.random.default_rng(0)
    x, y = chance.integers(0, 256, (60, 3, 32, 32), dtype=np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "images.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:])
    train(Recipe.from_dict({**tree, "data": {"name": "arrays", "path": "images.npz", "root": str(tmp_path)}}), root)
    evaluate(root, split=["corrupted:brightness:1@40", "corrupted:contrast:1@40"], metrics=["accuracy"])
    found = results_from_run(Run.open(root))
    parts = [pick(found, "accuracy", "member 0", on).value for on in ("brightness 1", "contrast 1")]
    summed = pick(found, "accuracy under corruption", "member 0 · cACC", "corrupted")
    assert summed.value == pytest.approx(sum(parts) / 2)
    assert summed.percent


def test_costs_are_part_of_the_results(run: Run) -> None:
    found = results_from_run(run)
    assert pick(found, "epochs", "member 0", "training").value == 2
    assert pick(found, "passes", "mean of members", "training").value == 4
    assert pick(found, "seconds", "member 2", "training").value > 0


@pytest.mark.parametrize(
    ("method", "passes"),
    [
        ({"name": "deep_ensemble"}, 4),
        ({"name": "sam", "rho": 0.1}, 8),
        ({"name": "sam", "rho": 0.0}, 4),
        ({"name": "sharpbalance", "partition_epoch": 1}, 2 + 1 + 3 * 1.5),
        ({"name": "sharpbalance", "partition_epoch": 1, "warmup": "plain"}, 1 + 1 + 3 * 1.5),
        ({"name": "sharpbalance", "partition_epoch": 2, "repartition_every": 1}, 4 + 2 * (1 + 1.5)),
    ],
)
def test_passes_follow_from_the_method(method: dict[str, object], passes: float) -> None:
    tree = recipe("deep_ensemble", "mlp", batch=8, train={"epochs": 4}).to_dict()
    changed = Recipe.from_dict({**tree, "method": method})
    assert count_passes(Experiment(changed)) == pytest.approx(passes)


def test_a_step_in_groups_costs_as_much_as_a_full_step() -> None:
    assert passes_per_step(plain_gradient, 8) == 1
    assert passes_per_step(sam(0.1, m=3), 8) == pytest.approx(2)
    assert passes_per_step(sam(0.1, perturbation="per_worker"), 8) == 2
    assert passes_per_step(sam(0.1), 8, torch.ones(8, dtype=torch.bool)) == 2


def test_fractions_of_sam_samples_are_read_from_the_sam_sets(tmp_path: Path) -> None:
    run = train(recipe("sharpbalance", "mlp", batch=10, method={"partition_epoch": 1}), tmp_path / "run")
    share = run.store.get_json("sam_sets/1/summary.json")["share"][0]
    assert measured_cost(run, 0).passes == pytest.approx(2 + 1 + 1 + round(10 * share) / 10)


def test_the_seconds_of_scoring_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = partition.SharpnessScorer.score

    def slowly(self: partition.SharpnessScorer, *args: Any) -> None:
        time.sleep(3)
        score(self, *args)

    monkeypatch.setattr(partition.SharpnessScorer, "score", slowly)
    run = train(recipe("sharpbalance", "mlp", batch=10, method={"partition_epoch": 1}), tmp_path / "run")
    assert all(
        measured_cost(run, number).seconds > 1 for number in range(3)
    )  # of those that are scored together, a share
    assert measured_cost(run, 0).seconds == run.progress(0).seconds


def test_costs_of_an_untrusted_method_are_unknown(run: Run, tmp_path: Path) -> None:
    root = Path(shutil.copytree(run.store.root, tmp_path / "run"))
    recipe = run.recipe.to_dict()
    untrusted = Recipe.from_dict({**recipe, "method": {**recipe["method"], "name": "os:remove"}})
    rewrite(replace(Run.open(root), experiment=Experiment(untrusted)))
    assert cost_rows(Run.open(root)) == {}


def test_a_folder_without_results_is_not_a_study(tmp_path: Path) -> None:
    assert read_results(tmp_path) == {}
    with pytest.raises(RunError, match="not a study folder"):
        results_from_study(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(RunError, match="format 99"):
        results_from_study(tmp_path)
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(RunError, match="format None"):
        read_results(tmp_path)


def test_a_study_is_read_from_its_file_alone(run: Run, tmp_path: Path) -> None:
    rows = {"member 0": {"value": 0.5, "stderr": None}, "member 1": {"value": None, "stderr": 0.1, "mc_stderr": 0.2}}
    tree = {"metric": "accuracy", "split": "test", "higher_is_better": True, "percent": True, "rows": rows}
    costs = {"member 0": {"epochs": 2, "passes": 4, "seconds": 1.5}}
    results = {
        "format": 2,
        "conditions": [
            {"condition": {"rho": 0.1}, "repetition": 1, "run": "a"},
            {"condition": {"rho": 0.2}, "repetition": 1, "run": "not yet"},
        ],
        "runs": {"a": {"metrics": [tree], "costs": costs}},
    }
    file = tmp_path / "elsewhere.json"
    file.write_text(json.dumps(results))
    found = results_from_study(file)
    assert [(e.metric, e.row, e.condition, e.repetition) for e in found[:2]] == [
        ("accuracy", "member 0", {"rho": 0.1}, 1),
        ("accuracy", "member 1", {"rho": 0.1}, 1),
    ]
    assert (found[0].value, found[1].mc_stderr, found[0].percent) == (0.5, 0.2, True)
    assert [(each.metric, each.value) for each in found[2:]] == [("epochs", 2), ("passes", 4), ("seconds", 1.5)]
