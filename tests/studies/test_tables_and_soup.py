"""Declared tables, seeds, studies that extend others, and the soup of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plateaux.config.builders.data import build_data
from plateaux.core.errors import RecipeError
from plateaux.core.stats.comparisons import Inference
from plateaux.core.stats.intervals import t_interval
from plateaux.reports.report import report
from plateaux.storage.local_store import SCRATCH_PREFIX
from plateaux.storage.run import Run
from plateaux.studies.declared_tables import declared_tables
from plateaux.studies.result_rows import results_from_study
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study


def test_a_declared_table_has_the_numbers_of_the_study_and_those_of_the_paper(tmp_path: Path) -> None:
    base: dict[str, Any] = {
        "members": 3,
        "data": {"name": "blobs", "samples": 40, "test_samples": 20, "batch_size": 10},
        "model": {"name": "mlp", "hidden_sizes": [4]},
        "train": {"epochs": 1},
    }
    table = {
        "title": "Table 9",
        "where": {"way": "plain"},
        "paper": {"lr=0.1": [90.125, None], "lr=0.3": [12.0, None]},
        "columns": [
            {"title": "members", "metric": "accuracy", "row": "members"},
            {"title": "ensemble", "metric": "accuracy"},
        ],
    }
    grid = {"optimizer.lr": [0.1, 0.2], "way": {"plain": {}, "sam": {"method": {"name": "sam"}}}}
    tree = {"base": base, "grid": grid, "tables": [table], "seeds": [5], "evaluate": {"metrics": ["accuracy"]}}
    study = Study.from_dict(tree)
    StudyRunner(study, tmp_path / "s").run()
    built = report([tmp_path / "s"], figures=False)
    (shown,) = declared_tables(study.tables, built.results)
    assert list(shown.header) == ["", "members", "members, paper", "ensemble"]
    rows = {row[0]: row[1:] for row in shown.text_rows()}
    assert list(rows) == ["lr=0.1", "lr=0.2", "lr=0.3"]
    assert rows["lr=0.3"] == ["", "12", ""]  # published, but not a condition of the study
    assert [row[1] for row in rows.values()] == ["90.125", "", "12"]
    values = [
        each.value
        for each in built.results
        if each.metric == "accuracy" and each.row.kind == "member" and each.condition == {"lr": 0.1, "way": "plain"}
    ]
    assert len(values) == 3
    assert rows["lr=0.1"][0] == Inference().format(t_interval(values), percent=True)
    assert shown.caption.startswith("± is half of a 95 % interval over repetitions, of a mean over members")
    assert shown.title in {each.title for part in built.parts for each in part.tables}


def test_seeds_are_those_of_the_file_and_one_for_each_repetition() -> None:
    study = Study.from_dict({"base": {"recipe": "quickstart"}, "seeds": [13, 113, 43], "repetitions": 3})
    runner = StudyRunner(study, "unused")
    assert {(trial.repetition, trial.recipe.seed) for trial in runner.trials} == {(0, 13), (1, 113), (2, 43)}
    with pytest.raises(RecipeError, match="lists 1 seeds for 2 repetitions"):
        Study.from_dict({"base": "quickstart", "seeds": [1], "repetitions": 2})


def test_a_study_extends_another_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    (tmp_path / "first.toml").write_text('base = { recipe = "cifar10_small" }\n')
    file.write_text('extends = "first.toml"\n[base.train]\nepochs = 7\n')
    study = Study.load(file)
    assert study.name == "mine"
    assert study.base["train"]["epochs"] == 7
    assert study.base["data"]["name"] == "cifar10"
    file.write_text('extends = "mine.toml"\n')
    with pytest.raises(RecipeError, match="at most 5"):
        Study.load(file)


def test_the_soup_of_a_study_is_the_network_with_the_mean_weights(tmp_path: Path) -> None:
    base: dict[str, Any] = {
        "members": 3,
        "data": {"name": "blobs", "samples": 60, "test_samples": 50, "batch_size": 10},
        "model": {"name": "mlp", "hidden_sizes": []},
        "train": {"epochs": 2},
    }
    evaluate = {"splits": ["test"], "metrics": ["accuracy"], "soup": True}
    left = tmp_path / "s" / "runs" / f"{SCRATCH_PREFIX}left"  # by a killed process
    left.mkdir(parents=True)
    (left / ".lock").touch()
    StudyRunner(Study.from_dict({"base": base, "evaluate": evaluate}), tmp_path / "s").run()
    results = results_from_study(tmp_path / "s")
    (found,) = [each for each in results if each.metric == "accuracy of the soup"]
    assert found.row == "uniform soup"
    (folder,) = [each for each in (tmp_path / "s" / "runs").iterdir() if each.is_dir()]  # the soup is not kept
    run = Run.open(folder)
    weights = [run.weights(number) for number in range(3)]
    mean = {name: sum(tree[name] for tree in weights) / 3 for name in weights[0]}
    data = build_data(run.recipe)
    x, y = data.test.fetch(torch.arange(50))
    (weight,) = [value for value in mean.values() if value.dim() == 2]
    (bias,) = [value for value in mean.values() if value.dim() == 1]
    assert found.value == pytest.approx(float(((x @ weight.T + bias).argmax(-1) == y).float().mean()))
