"""Reports read complete and damaged run folders and studies, and the command writes them."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic_results as synthetic
import torch
from cases import rewrite
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.config.experiment import Experiment
from plateaux.core.errors import RunError
from plateaux.core.types import Estimate
from plateaux.data.sources import from_tensors
from plateaux.evaluation.metrics.calibration import reliability
from plateaux.evaluation.results import MetricResult
from plateaux.reports import artifacts
from plateaux.reports.export import to_html, write_figures
from plateaux.reports.report import FAMILIES, report
from plateaux.reports.report_inputs import read_inputs
from plateaux.storage.run import Run

RECIPE = {
    "members": 2,
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden_sizes": [8]},
    "method": {"name": "sharpbalance", "partition_epoch": 1},
    "train": {"epochs": 2},
}


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with every kind of result that a report can show."""
    root = tmp_path_factory.mktemp("report") / "demo"
    plateaux.train(plateaux.Recipe.from_dict(RECIPE), root)
    plateaux.evaluate(root, metrics=["accuracy", "nll", "disagreement", "der"], ensemble_sizes=True)
    run = Run.open(root)
    add_ood_predictions(run)
    hashes = {f"member {n}": run.weights_hash(n) for n in range(2)}
    for name, tree in {
        "slices": synthetic.lines(["member 0"]), "paths": synthetic.lines(["members 0 and 1"], kind="paths"),
        "surface-0": synthetic.surface(), "plane-0-1-2": synthetic.surface(kind="plane"), "odd": {"kind": "surface"},
    }.items():  # fmt: skip
        run.store.put_json(f"landscape/{name}.json", {**tree, "about": {"hashes": hashes}})
    old = {"about": {"hashes": {"member 0": "of other weights"}}}
    run.store.put_json("landscape/old.json", {**synthetic.lines(["member 0"]), **old})
    return root


def add_ood_predictions(run: Run) -> None:
    """Cache predictions on out-of-distribution samples, as evaluating on them does."""
    predictions, logits = artifacts.load_predictions(run)["test"]
    hashes = [run.weights_hash(n) for n in predictions.members]
    cache = artifacts.PredictionCache(run.store, {"split": "mnist", "name": "mnist"})
    labels, ids = torch.from_numpy(predictions.labels), torch.from_numpy(predictions.ids)
    cache.write(hashes, {"ids": ids, "labels": labels, "logits": logits.transpose(0, 1) / 3})
    rows = {"members together · entropy · auroc": Estimate(0.9, 0.01)}
    found = MetricResult("ood", "mnist (far)", rows, None, {}, {"samples": 5})
    run.store.put_json("metrics/ood-1.json", found.to_dict())


def copy_run(root: Path, to: Path) -> Path:
    return Path(shutil.copytree(root, to))


def test_a_complete_run_has_every_figure_of_a_run(full_run: Path) -> None:
    built = report([full_run], sample_images=True)
    names = {name for name, _ in built.figures()}
    assert names >= {
        "accuracy_bars", "over_size_accuracy", "over_size_nll", "training", "reliability", "roc", "sam_sets", "gallery",
        "landscape_slices", "landscape_paths", "landscape_surface", "landscape_plane",
    }  # fmt: skip
    page = to_html(built)
    assert "data:image/png;base64," in page
    assert [part.title for part in built.parts] == ["This run", "Members"]


def test_a_report_writes_nothing_into_the_run(full_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in full_run.rglob("*")}
    report([full_run], only_figures=["reliability", "sam_sets"])
    assert {path: path.stat().st_mtime_ns for path in full_run.rglob("*")} == before


def test_damaged_artifacts_are_skipped(full_run: Path, tmp_path: Path) -> None:
    root = copy_run(full_run, tmp_path / "demo")
    for name in ("sam_sets/1/0.safetensors", "landscape/slices.json", "landscape/plane-0-1-2.json"):
        (root / name).write_bytes(b"no such thing")
    for file in root.glob("predictions/*/about.json"):
        file.write_text("{}")
    for file in root.glob("members/0/log/*.jsonl"):
        file.write_text("not JSON\n")
    (root / "landscape/surface-0.json").write_text(json.dumps({"kind": "surface", "about": {"hashes": {}}}))
    built = report([root])
    names = {name for name, _ in built.figures()}
    assert "accuracy_bars" in names
    assert not names & {"sam_sets", "gallery", "roc", "reliability", "landscape_slices", "landscape_surface"}


def test_bins_from_cached_logits_equal_the_reliability_metric(full_run: Path) -> None:
    predictions, logits = artifacts.load_predictions(Run.open(full_run))["test"]
    like = read_inputs([full_run]).results[0]
    bins = {each.row: each.value for each in artifacts.reliability_rows(predictions, logits, like)}
    (truth,) = plateaux.evaluate(full_run, metrics=["reliability"])
    assert bins == {row: pytest.approx(value.value, nan_ok=True) for row, value in truth.rows.items()}
    assert reliability().group == "uncertainty"


def test_a_partition_counts_members_that_apply_sam(full_run: Path) -> None:
    (sets,) = artifacts.load_partitions(Run.open(full_run))
    summary = Run.open(full_run).store.get_json("sam_sets/1/summary.json")
    assert sum(sets.counts) == summary["trained"]
    sam_samples = sum(k * count for k, count in enumerate(sets.counts))
    assert sam_samples == pytest.approx(sum(share * summary["trained"] for share in summary["share"]))


def test_images_are_loaded_only_from_the_same_dataset(full_run: Path) -> None:
    run = Run.open(full_run)
    images = artifacts.load_images(run)
    assert images is not None
    data = plateaux.dataset.get("digits")()
    np.testing.assert_array_equal(images(np.array([3, 1])), data.test.fetch(torch.tensor([3, 1]))[0].numpy())
    samples = torch.rand(4, 1, 8, 8), torch.arange(4)
    other = from_tensors(samples, samples, classes=10)
    assert artifacts.load_images(plateaux.open_run(run, data=other)) is None
    floats = artifacts._pixels(torch.tensor([[[[-1.0, 3.0]]]]))
    np.testing.assert_allclose(floats, [[[[0.0, 1.0]]]])
    with pytest.raises(ValueError, match="Not a batch of images"):
        artifacts._pixels({"words": torch.zeros(1)})


def test_too_many_logits_are_not_read(full_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_LOGITS", 10)
    assert artifacts.load_predictions(Run.open(full_run)) == {}
    assert artifacts.load_ood_scores({}, ["mnist (far)"]) == {}


def test_runs_are_distinguished_by_their_recipes(full_run: Path, tmp_path: Path) -> None:
    roots = []
    for name, seed, rho in (("a", 0, 0.1), ("b", 1, 0.1), ("c", 0, 0.2), ("d", 0, 0.2)):
        root = copy_run(full_run, tmp_path / name)
        changed = plateaux.Recipe.from_dict({**RECIPE, "seed": seed, "method": {**RECIPE["method"], "rho": rho}})  # type: ignore[dict-item]
        rewrite(replace(Run.open(root), experiment=Experiment(changed)))
        roots.append(root)
    inputs = read_inputs(roots)
    assert [(each.name, each.repetition) for each in inputs.sections] == [
        ("rho=0.1", 0), ("rho=0.1", 1), ("rho=0.2", 0), ("run=d, rho=0.2", 0),
    ]  # fmt: skip
    assert inputs.title == "a and 3 more"
    assert {str(each.condition) for each in inputs.results} == {str(each.condition) for each in inputs.sections}
    assert list(inputs.training_logs()) == ["rho=0.1", "rho=0.2", "run=d, rho=0.2"]
    assert len(inputs.training_logs()["rho=0.1"]) == 4


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
only = ["accuracy_bars", "training"]
"""
    from plateaux.studies.runner import StudyRunner
    from plateaux.studies.study import Study

    (tmp_path / "study.toml").write_text(text)
    StudyRunner(Study.load(tmp_path / "study.toml"), tmp_path / "out").run()
    shutil.copy(tmp_path / "out" / "results.json", tmp_path / "alone.json")
    sources = [read_inputs([tmp_path / "out"]), read_inputs([tmp_path / "alone.json"])]
    for inputs in sources:
        assert (inputs.question, inputs.baseline, len(inputs.sections)) == ("Is it flat?", {"rho": 0.0}, 4)
        assert [name for name, _ in report(inputs).figures()] == ["accuracy_bars", "training"]
    assert [each.run is None for each in sources[1].sections] == [True] * 4
    assert sources[0].sections[0].run is not None
    both = read_inputs([tmp_path / "out", tmp_path / "alone.json"])
    assert len(both.sections) == 8
    assert {each.condition["study"] for each in both.results} == {"out", "alone"}
    assert len({each.name for each in both.sections}) == 4
    titles = [table.title for table in report(sources[0], figures=False).parts[0].tables]
    assert "Difference from rho=0.0" in titles


def test_a_folder_without_run_or_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is neither a run folder \(with run\.json\) nor a study"):
        read_inputs([tmp_path])
    with pytest.raises(RunError, match="Nothing to report on"):
        read_inputs([])


# The command.


def run_report(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["report", *options])
    return done.exit_code, done.output


def test_the_command_writes_every_format_and_figures(full_run: Path, tmp_path: Path) -> None:
    few = ("--only-figures", "accuracy_bars,sam_sets", "--json")
    code, output = run_report(str(full_run), "-o", str(tmp_path / "sub" / "report.html"), *few)
    assert code == 0, output
    assert json.loads(output)["summary"]["Accuracy"].startswith("The accuracy of the ensemble")
    assert (tmp_path / "sub" / "report.html").read_text().startswith("<!DOCTYPE html>")
    code, output = run_report(
        str(full_run), "-o", str(tmp_path / "r.md"), "--figures-dir", str(tmp_path / "figures"), *few
    )
    assert len(json.loads(output)["figures"]) == 6
    linked = re.findall(r"\]\((figures/\S+)\)", (tmp_path / "r.md").read_text())
    assert linked == ["figures/accuracy_bars.svg", "figures/sam_sets.svg"]
    assert all((tmp_path / name).is_file() for name in linked)
    assert run_report(str(full_run), "-o", str(tmp_path / "r.csv"), *few)[0] == 0
    assert (tmp_path / "r.csv").read_text().startswith("run,condition,repetition,metric,split,row,value")
    assert run_report(str(full_run), "-o", str(tmp_path / "r.txt"), "--format", "json", *few)[0] == 0
    assert json.loads((tmp_path / "r.txt").read_text())["title"] == "demo"
    style = ("--figures-dir", str(tmp_path / "small"), "--figure-width", "3.3", "--font-size", "7", "--label",
             "accuracy on test samples, %=Accuracy (%)", "--standard-errors", "--correction", "holm")  # fmt: skip
    assert run_report(str(full_run), "-o", str(tmp_path / "r.tex"), *few, *style)[0] == 0
    assert "± is one standard error" in (tmp_path / "r.tex").read_text().splitlines()[0]
    assert ">Accuracy (%)<" in (tmp_path / "small" / "accuracy_bars.svg").read_text()
    assert not list(tmp_path.rglob("*.part"))


def test_invalid_arguments_of_the_command_are_reported(full_run: Path, tmp_path: Path) -> None:
    assert run_report(str(tmp_path), "-o", str(tmp_path / "r.html"))[0] == 4
    code, output = run_report(str(full_run), "-o", str(tmp_path / "r.docx"))
    assert code == 2
    assert "There is no report format 'docx'" in output
    code, output = run_report(str(full_run), "-o", str(tmp_path / "r.html"), "--label", "accuracy")
    assert (code, "--label accuracy: give OLD=NEW" in output) == (2, True)
    (tmp_path / "file").write_text("")
    code, output = run_report(str(full_run), "-o", str(tmp_path / "file" / "r.csv"))
    assert code == 4
    assert "choose another output path" in output


def test_figures_are_written_only_in_the_requested_formats(full_run: Path, tmp_path: Path) -> None:
    files = write_figures(report([full_run], only_figures=["accuracy_bars"]), tmp_path / "out", kinds=["svg"])
    assert [file.name for file in files] == ["accuracy_bars.svg"]
    assert len(set(FAMILIES)) == len(FAMILIES)
