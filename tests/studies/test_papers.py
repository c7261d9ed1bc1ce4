"""The studies of papers: found by name, with declared tables and figures, run end to end at a tiny size."""

from __future__ import annotations

import json
import math
import os
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from plateaux.cli.main import app
from plateaux.config.builders.data import build_data
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.core.formatting import format_with_stderr
from plateaux.core.types import Estimate
from plateaux.reports.report import DECLARABLE, report
from plateaux.storage.local_store import SCRATCH_PREFIX
from plateaux.storage.run import Run
from plateaux.studies.builtin import builtin_studies, study_file
from plateaux.studies.cost_estimate import CostEstimate
from plateaux.studies.results import results_from_study
from plateaux.studies.runner import StudyRunner
from plateaux.studies.smoke import cover, shrink, smoke_study
from plateaux.studies.study import Study
from plateaux.studies.tables import declared_tables, row_label, select

STUDIES = Path(__file__).parents[2] / "studies"
PAPERS = sorted(name for name, file in builtin_studies().items() if file.parent.name == "papers")
LONG = bool(os.environ.get("PLATEAUX_LONG"))
# In CI a third, the same in every run: the seed is one with every paper and without the longest studies.
SMOKED = PAPERS if LONG else random.Random(8).sample(PAPERS, math.ceil(len(PAPERS) / 3))


def test_every_table_and_figure_is_found_by_the_name_of_its_paper() -> None:
    assert study_file("lu2024_figure7").stem == study_file("lu2024_table3").stem == "lu2024_figure7"
    assert study_file("lu2024_figure15").stem == "lu2024_figure8"
    assert study_file("rethinking2025_table8.toml").stem == "rethinking2025_table8"
    with pytest.raises(RecipeError, match="lu2024_figure7"):
        study_file("lu2024_figur7")


@pytest.mark.parametrize("name", PAPERS)
def test_a_study_states_its_paper_and_shows_what_it_produces(name: str) -> None:
    study = Study.load(name)
    assert study.name == name
    assert study.paper
    assert study.question
    titles = " ".join([*(table.title for table in study.tables), *(figure.title for figure in study.figures.draw)])
    for product in study.produces:
        word, number = product.split(" ", 1)
        assert number in titles
        assert word in titles
    assert all(figure.family in DECLARABLE for figure in study.figures.draw)
    conditions = [condition for condition, _ in study.conditions()]
    for table in study.tables:
        fixed = {key for key, value in table.where.items() if not isinstance(value, list | tuple)}
        rows = {row_label({k: v for k, v in each.items() if k not in fixed}) for each in conditions}
        assert set(table.paper) <= rows
        assert all(len(values) == len(table.columns) for values in table.paper.values())
    StudyRunner(study, "unused").check(data=False)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SMOKED)
def test_smoke(name: str, tmp_path: Path) -> None:
    """Every level of every factor is trained and evaluated, and no declared cell or figure is empty."""
    full = Study.load(name)
    small = smoke_study(full, tmp_path / "generated")
    StudyRunner(small, tmp_path / "study").run()
    built = report([tmp_path / "study"], max_runs=0)
    levels = {(factor, str(value)) for condition, _ in full.conditions() for factor, value in condition.items()}
    trained = {(factor, str(value)) for condition, _ in small.conditions() for factor, value in condition.items()}
    assert trained == levels
    shown = " ".join(table.title for part in built.parts for table in part.tables)
    for config, table in zip(full.tables, declared_tables(full.tables, built.results), strict=True):
        assert config.title in shown
        trained_rows = {row_label(each.condition) for each in select(built.results, config.where)}
        for row in table.rows:
            for title, cell in zip(table.header[1:], row[1:], strict=True):
                assert cell.text or row[0].text not in trained_rows or title.endswith(", paper"), (row[0].text, title)
    drawn = {figure.title for _, figure in built.figures()}
    assert {figure.title for figure in full.figures.draw if _has_points(figure.family)} <= drawn


def _has_points(family: str) -> bool:
    """Return whether one condition is enough for a figure; a curve needs two points."""
    return family in ("accuracy_bars", "sharpness_diversity")


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
    expected = Estimate(float(np.mean(values)), float(np.std(values, ddof=1)) / 3**0.5)
    assert rows["lr=0.1"][0] == format_with_stderr(expected, percent=True)
    assert shown.title in {each.title for part in built.parts for each in part.tables}


def test_seeds_are_those_of_the_file_and_one_for_each_repetition() -> None:
    study = Study.load("lu2024_figure7")
    runner = StudyRunner(study, "unused")
    assert {(trial.repetition, trial.recipe.seed) for trial in runner.trials} == {(0, 13), (1, 113), (2, 43)}
    with pytest.raises(RecipeError, match="lists 1 seeds for 2 repetitions"):
        Study.from_dict({"base": "quickstart", "seeds": [1], "repetitions": 2})


def test_a_study_extends_another_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('extends = "rethinking2025_table1"\n[base.train]\nepochs = 7\n')
    study = Study.load(file)
    assert study.name == "mine"
    assert study.base["train"] == {"epochs": 7}
    assert study.base["data"]["name"] == "cifar10"
    file.write_text('extends = "mine.toml"\n')
    with pytest.raises(RecipeError, match="at most 5"):
        Study.load(file)


def test_a_smoke_test_keeps_differences_between_conditions() -> None:
    small = [(condition, shrink(recipe)) for condition, recipe in cover(Study.load("lu2024_figure5").conditions())]
    models = {json.dumps(recipe.to_dict()["model"]) for _, recipe in small}
    assert len(models) == 7
    recipe = Recipe.load("cifar100_resnet18_sharpbalance")
    tiny = shrink(recipe)
    assert (tiny.train.epochs, tiny.method.options["partition_epoch"], tiny.data.validation_split) == (2, 1, 0.25)
    assert tiny.lr_scheduler[0].options["milestones"] == [1]


@pytest.mark.parametrize(
    ("name", "runs", "images"),
    [
        # 3 data sets x 3 methods x 3 ensembles x 3 members x 200 epochs: SGD 200 passes, SAM 400.
        ("lu2024_figure7", 27, None),
        ("rethinking2025_table1", 6, (3 * 10 * 100 + 3 * 10 * 200) * 50_000),
        ("sed2024_table1", 6, None),  # nor a file with the weights of the backbone
        # 2 repetitions x 3 members x 40 epochs of 1,000 images: rho = 0 once, three other values twice.
        pytest.param(str(STUDIES / "sharpbalance_pilot.toml"), 8, 2 * 3 * 40 * (1 + 3 * 2) * 1000, id="pilot"),
        pytest.param(str(STUDIES / "sharpbalance_tuning_mlp.toml"), 93, None, id="tuning_mlp"),  # on Fashion-MNIST
    ],
)
def test_a_dry_run_needs_no_data(
    name: str, runs: int, images: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("sed") and find_spec("timm") is None:
        pytest.skip("timm is not installed")
    monkeypatch.setenv("PLATEAUX_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    options = ["--dry-run", "--json", "--images-per-second", "1000"]
    result = CliRunner().invoke(app, ["study", name, *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["runs"]) == runs
    assert found["bytes"] > 0
    if images is not None:
        evaluated = sum(run["evaluation"] for run in found["runs"])
        assert found["device_hours"] == pytest.approx((images + evaluated) / 1000 / 3600)
    assert not list(tmp_path.iterdir())


def test_bytes_of_a_dry_run_are_those_of_the_weights(tmp_path: Path) -> None:
    base: dict[str, Any] = {
        "members": 3,
        "data": {"name": "blobs", "samples": 40, "test_samples": 20, "batch_size": 10},
        "model": {"name": "mlp", "hidden_sizes": [64, 64]},
        "train": {"epochs": 1},
    }
    runner = StudyRunner(Study.from_dict({"base": base}), tmp_path / "s")
    (cost,) = CostEstimate(runner, images_per_second=10).all()
    runner.run()
    files = [file.stat().st_size for file in (tmp_path / "s").rglob("*.safetensors")]
    weights = sorted(files)[-3:]
    assert 0.8 * sum(weights) < cost.bytes <= sum(weights)


@pytest.mark.nightly
def test_a_smoke_test_says_that_it_is_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["study", "lu2024_table5_albert", "--smoke", "--out", str(tmp_path / "s"), "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["is_smoke_test"] is True
    assert found["tables"][0]["title"].startswith("Table 5 (ALBERT)")
    stored = json.loads((tmp_path / "s" / "results.json").read_text())
    assert stored["study"]["question"].startswith("Smoke test on generated files, not a result")
    assert not (tmp_path / "s" / "generated").is_symlink()
    assert all(run["recipe"]["data"]["root"].endswith("generated") for run in stored["runs"].values())


def test_the_page_lists_every_study_of_a_paper() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "results" / "reproduce.md").read_text(encoding="utf-8")
    assert [name for name in PAPERS if f"| `{name}` |" not in page] == []


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
