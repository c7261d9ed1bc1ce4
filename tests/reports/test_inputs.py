"""A report reads run folders and studies, whole, damaged or alone, and the command writes it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import made_up_results as made
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.core.errors import RunError
from plateaux.core.types import Estimate
from plateaux.data.sources import from_tensors
from plateaux.evaluation.metrics.calibration import reliability
from plateaux.evaluation.options import EvalOptions
from plateaux.evaluation.results import MetricResult
from plateaux.reports import artifacts
from plateaux.reports.export import to_html, write_figures
from plateaux.reports.inputs import read
from plateaux.reports.report import FAMILIES, compose, report
from plateaux.storage.run import Run

RECIPE = {
    "members": 2,
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden_sizes": [8]},
    "method": {"name": "sharpbalance", "partition_epoch": 1},
    "train": {"epochs": 2},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of which everything was asked that a report can show."""
    root = tmp_path_factory.mktemp("book") / "demo"
    plateaux.train(plateaux.Recipe.from_dict(RECIPE), root)
    plateaux.evaluate(
        root, metrics=["accuracy", "nll", "disagreement", "der"], options=EvalOptions(ensemble_sizes=True)
    )
    run = Run.open(root)
    strangers(run)
    hashes = {f"member {n}": run.weights_hash(n) for n in range(2)}
    for name, tree in {
        "slices": made.lines(["member 0"]), "paths": made.lines(["members 0 and 1"], kind="paths"),
        "surface-0": made.surface(), "plane-0-1-2": made.surface(kind="plane"), "odd": {"kind": "surface"},
    }.items():  # fmt: skip
        run.store.put_json(f"landscape/{name}.json", {**tree, "about": {"hashes": hashes}})
    old = {"about": {"hashes": {"member 0": "of other weights"}}}
    run.store.put_json("landscape/old.json", {**made.lines(["member 0"]), **old})
    return root


def strangers(run: Run) -> None:
    """Keep predictions about samples of elsewhere, as measuring on them would have done."""
    said, logits = artifacts.load_predictions(run)["test"]
    hashes = [run.weights_hash(n) for n in said.members]
    shelf = artifacts.PredictionCache(run.store, {"split": "mnist", "name": "mnist"})
    labels, ids = torch.from_numpy(said.labels), torch.from_numpy(said.ids)
    shelf.write(hashes, {"ids": ids, "labels": labels, "logits": logits.transpose(0, 1) / 3})
    rows = {"members together · entropy · auroc": Estimate(0.9, 0.01)}
    found = MetricResult("ood", "mnist (far)", rows, None, {}, {"samples": 5})
    run.store.put_json("metrics/ood-1.json", found.to_dict())


def copied(root: Path, to: Path) -> Path:
    return Path(shutil.copytree(root, to))


def test_a_whole_run_has_every_figure_of_a_run(whole: Path) -> None:
    made_of = report([whole])
    names = {name for name, _ in made_of.figures()}
    assert names >= {
        "accuracy_bars", "over_size_accuracy", "over_size_nll", "training", "reliability", "roc", "sam_sets", "gallery",
        "landscape_slices", "landscape_paths", "landscape_surface", "landscape_plane",
    }  # fmt: skip
    page = to_html(made_of)
    assert "data:image/png;base64," in page
    assert [part.title for part in made_of.parts] == ["This run", "Members"]


def test_a_report_writes_nothing_into_the_run(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    report([whole], only_figures=["reliability", "sam_sets"])
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_what_is_damaged_is_left_out_and_the_rest_is_shown(whole: Path, tmp_path: Path) -> None:
    root = copied(whole, tmp_path / "demo")
    for name in ("sam_sets/1/0.safetensors", "landscape/slices.json", "landscape/plane-0-1-2.json"):
        (root / name).write_bytes(b"no such thing")
    for file in root.glob("predictions/*/about.json"):
        file.write_text("{}")
    for file in root.glob("members/0/log/*.jsonl"):
        file.write_text("not JSON\n")
    (root / "landscape/surface-0.json").write_text(json.dumps({"kind": "surface", "about": {"hashes": {}}}))
    made_of = report([root])
    names = {name for name, _ in made_of.figures()}
    assert "accuracy_bars" in names
    assert not names & {"sam_sets", "gallery", "roc", "reliability", "landscape_slices", "landscape_surface"}


def test_the_bins_made_from_kept_logits_are_those_that_measuring_finds(whole: Path) -> None:
    said, logits = artifacts.load_predictions(Run.open(whole))["test"]
    like = read([whole]).results[0]
    mine = {each.row: each.value for each in artifacts.reliability_rows(said, logits, like)}
    (truth,) = plateaux.evaluate(whole, metrics=["reliability"])
    assert mine == {row: pytest.approx(value.value, nan_ok=True) for row, value in truth.rows.items()}
    assert reliability().group == "uncertainty"


def test_a_meeting_counts_who_is_careful(whole: Path) -> None:
    (met,) = artifacts.load_partitions(Run.open(whole))
    summary = Run.open(whole).store.get_json("sam_sets/1/summary.json")
    assert sum(met.counts) == summary["trained"]
    careful = sum(k * count for k, count in enumerate(met.counts))
    assert careful == pytest.approx(sum(share * summary["trained"] for share in summary["share"]))


def test_pictures_come_from_the_very_samples_or_not_at_all(whole: Path) -> None:
    run = Run.open(whole)
    images = artifacts.load_images(run)
    assert images is not None
    data = plateaux.dataset.get("digits")()
    np.testing.assert_array_equal(images(np.array([3, 1])), data.test.fetch(torch.tensor([3, 1]))[0].numpy())
    samples = torch.rand(4, 1, 8, 8), torch.arange(4)
    other = from_tensors(samples, samples, classes=10)
    assert artifacts.load_images(run, plateaux.Components(data=other)) is None
    floats = artifacts._pixels(torch.tensor([[[[-1.0, 3.0]]]]))
    np.testing.assert_allclose(floats, [[[[0.0, 1.0]]]])
    with pytest.raises(ValueError, match="no pictures"):
        artifacts._pixels({"words": torch.zeros(1)})


def test_too_many_logits_are_not_read(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_LOGITS", 10)
    assert artifacts.load_predictions(Run.open(whole)) == {}
    assert artifacts.load_ood_scores({}, ["mnist (far)"]) == {}


def test_runs_are_told_apart_by_their_recipes(whole: Path, tmp_path: Path) -> None:
    roots = []
    for name, seed, rho in (("a", 0, 0.1), ("b", 1, 0.1), ("c", 0, 0.2), ("d", 0, 0.2)):
        root = copied(whole, tmp_path / name)
        changed = plateaux.Recipe.from_dict({**RECIPE, "seed": seed, "method": {**RECIPE["method"], "rho": rho}})  # type: ignore[dict-item]
        (root / "recipe.toml").write_text(changed.to_toml(), encoding="utf-8")
        roots.append(root)
    book = read(roots)
    assert [(each.name, each.repetition) for each in book.sections] == [
        ("rho=0.1", 0), ("rho=0.1", 1), ("rho=0.2", 0), ("run=d, rho=0.2", 0),
    ]  # fmt: skip
    assert book.title == "a and 3 more"
    assert {str(each.condition) for each in book.results} == {str(each.condition) for each in book.sections}
    assert list(book.courses()) == ["rho=0.1", "rho=0.2", "run=d, rho=0.2"]
    assert len(book.courses()["rho=0.1"]) == 4


def test_a_study_is_read_from_its_folder_and_from_its_file_alone(tmp_path: Path) -> None:
    text = """
question = "Is it flat?"
baseline = {rho = 0.0}
repetitions = 2
[base]
members = 2
[base.data]
name = "moons"
samples = 40
[base.model]
name = "mlp"
hidden_sizes = [4]
[base.method]
name = "sam"
[base.train]
epochs = 1
[grid]
"method.rho" = [0.0, 0.1]
[evaluate]
metrics = ["accuracy"]
[figures]
draw = ["accuracy_bars", "training"]
"""
    from plateaux.studies.runner import StudyRunner
    from plateaux.studies.study import Study

    (tmp_path / "study.toml").write_text(text)
    StudyRunner(Study.load(tmp_path / "study.toml"), tmp_path / "out").run()
    shutil.copy(tmp_path / "out" / "results.json", tmp_path / "alone.json")
    books = [read([tmp_path / "out"]), read([tmp_path / "alone.json"])]
    for book in books:
        assert (book.question, book.baseline, len(book.sections)) == ("Is it flat?", {"rho": 0.0}, 4)
        assert [name for name, _ in compose(book).figures()] == ["accuracy_bars", "training"]
    assert [each.run is None for each in books[1].sections] == [True] * 4
    assert books[0].sections[0].run is not None
    both = read([tmp_path / "out", tmp_path / "alone.json"])
    assert len(both.sections) == 8
    assert {each.condition["study"] for each in both.results} == {"out", "alone"}
    assert len({each.name for each in both.sections}) == 4
    titles = [sheet.title for sheet in compose(books[0], figures=False).parts[0].tables]
    assert "Difference from rho=0.0" in titles


def test_what_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is neither a run folder, which has run\.json, nor a study"):
        read([tmp_path])
    with pytest.raises(RunError, match="Nothing to report on"):
        read([])


# The command.


def told(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["report", *words])
    return done.exit_code, done.output


def test_the_command_writes_every_format_and_figures(whole: Path, tmp_path: Path) -> None:
    few = ("--only-figures", "accuracy_bars,sam_sets", "--json")
    code, said = told(str(whole), "-o", str(tmp_path / "sub" / "report.html"), *few)
    assert code == 0, said
    assert json.loads(said)["answers"]["How good?"].startswith("The ensemble answers")
    assert (tmp_path / "sub" / "report.html").read_text().startswith("<!DOCTYPE html>")
    code, said = told(str(whole), "-o", str(tmp_path / "r.md"), "--figures-dir", str(tmp_path / "figures"), *few)
    assert len(json.loads(said)["figures"]) == 6
    linked = re.findall(r"\]\((figures/\S+)\)", (tmp_path / "r.md").read_text())
    assert linked == ["figures/accuracy_bars.svg", "figures/sam_sets.svg"]
    assert all((tmp_path / name).is_file() for name in linked)
    assert told(str(whole), "-o", str(tmp_path / "r.csv"), *few)[0] == 0
    assert (tmp_path / "r.csv").read_text().startswith("run,condition,repetition,metric,split,row,value")
    assert told(str(whole), "-o", str(tmp_path / "r.txt"), "--format", "json", *few)[0] == 0
    assert json.loads((tmp_path / "r.txt").read_text())["title"] == "demo"
    assert not list(tmp_path.rglob("*.part"))


def test_the_command_says_what_is_wrong(whole: Path, tmp_path: Path) -> None:
    assert told(str(tmp_path), "-o", str(tmp_path / "r.html"))[0] == 4
    code, said = told(str(whole), "-o", str(tmp_path / "r.docx"))
    assert code == 2
    assert "cannot be written as 'docx'" in said
    (tmp_path / "file").write_text("")
    code, said = told(str(whole), "-o", str(tmp_path / "file" / "r.csv"))
    assert code == 4
    assert "choose another --out" in said


def test_figures_are_only_written_in_the_kinds_asked_for(whole: Path, tmp_path: Path) -> None:
    files = write_figures(report([whole], only_figures=["accuracy_bars"]), tmp_path / "out", kinds=["svg"])
    assert [file.name for file in files] == ["accuracy_bars.svg"]
    assert len(set(FAMILIES)) == len(FAMILIES)
