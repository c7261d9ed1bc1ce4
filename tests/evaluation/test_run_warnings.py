"""A member or an ensemble that has failed is reported by evaluate, status, and the report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from synthetic_results import result_row
from torch import nn
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.core.types import Estimate
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.run_warnings import result_warnings, run_warnings
from plateaux.reports.report import report
from plateaux.reports.summary import summary, warning_lines

COUNTS = [35, 33, 32]


def result(metric: str, ensemble: float, *members: float, stderr: float = 0.02) -> MetricResult:
    rows = {f"member {number}": Estimate(value, stderr) for number, value in enumerate(members)}
    rows["ensemble (mean probability)"] = Estimate(ensemble, stderr)
    return MetricResult(metric, "test", rows, True, {}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([result("accuracy", 0.95, 0.94, 0.93), result("nll", 0.2, 0.3, 0.3), result("ece", 0.02, 0.03)], {}),
        (
            [result("accuracy", 0.9, 0.38, 0.9)],
            {"member-at-chance": "1 of 2 members .* 38.0 % (member 0), .* has 35.0 %"},
        ),
        ([result("accuracy", 0.9, 0.40, 0.9)], {}),
        ([result("accuracy", 0.1, 0.1, 0.1)], {"member-at-chance": "2 of 2 members"}),
        ([result("accuracy", 0.87, 0.9, 0.8)], {"ensemble-below-member": "is 87.0 %, below that of member 0, 90.0 %"}),
        ([result("accuracy", 0.89, 0.9, 0.8)], {}),
        (
            [result("nll", 0.4, 15.6, 0.3)],
            {"nll-above-frequencies": "class frequencies, 1.098: 15.600 (member 0). The"},
        ),
        ([result("nll", math.nan, math.inf)], {"nll-above-frequencies": "inf (member 0)"}),
        ([result("ece", 0.4, 0.05)], {"high-ece": "is 40.0 %. Run"}),
        ([result("ece", 0.05, 0.4)], {}),
    ],
)
def test_a_failure_is_found_in_the_results(results: list[MetricResult], expected: dict[str, str]) -> None:
    found = result_warnings("test", results, COUNTS, {0: 1.0, 1: 2.0})
    texts = {name: text for names in found.values() for name, text in names.items()}
    assert texts.keys() == expected.keys()
    for name, pattern in expected.items():
        assert all(part in texts[name] for part in pattern.split(" .* ")), texts[name]


def test_a_split_with_one_class_has_no_chance_level() -> None:
    assert result_warnings("test", [result("accuracy", 1.0, 1.0)], [0, 50], {0: 1.0}) == {"outputs": {}}


def net() -> nn.Module:
    return nn.Linear(4, 3)


@pytest.fixture
def weak(tmp_path: Path) -> plateaux.Run:
    """Return a run whose first two members have equal weights and are worse than chance; the third is good."""
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    data = plateaux.from_tensors((x, x[:, :3].argmax(1)), (x[:60] + 0.01, x[:60, :3].argmax(1)), classes=3)
    for number, scale in enumerate((-9.0, -9.0, 9.0)):
        weight = {"weight": scale * torch.eye(3, 4), "bias": torch.zeros(3)}
        save_file(weight, tmp_path / f"{number}.safetensors")
    recipe = plateaux.Recipe.from_dict({"members": 3, "data": {"name": "own"}, "model": {"name": "own"}})
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    return plateaux.import_weights(tmp_path / "run", recipe, files, data=data, model=net)


NAMES = ("equal-members", "member-at-chance", "nll-above-frequencies", "ensemble-below-member", "high-ece")


def test_failed_members_are_named_by_evaluate_status_and_the_report(
    weak: plateaux.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    data = plateaux.from_tensors((x, x[:, :3].argmax(1)), (x[:60] + 0.01, x[:60, :3].argmax(1)), classes=3)
    run = plateaux.open_run(weak, data=data, model=net)
    plateaux.evaluate(run)
    assert all(f"[{name}]" in caplog.text for name in NAMES)
    assert "Members 0 and 1 have equal outputs for all test samples" in caplog.text
    assert "2 of 3 members are not better than chance on test samples" in caplog.text
    done = CliRunner().invoke(app, ["status", str(weak), "--json"])
    assert all(f"[{name}]" in done.stderr for name in NAMES)
    assert json.loads(done.stdout)["members"]
    lines = {line.label: line.text for line in report([run], figures=False).summary}
    assert all(f"[{name}]" in lines["Warnings"] for name in NAMES)
    assert "from the mean of its members" in lines["Accuracy"]
    assert "from the best of them (100" in lines["Accuracy"]


def test_warnings_belong_to_the_members_that_were_evaluated(weak: plateaux.Run) -> None:
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    data = plateaux.from_tensors((x, x[:, :3].argmax(1)), (x[:60] + 0.01, x[:60, :3].argmax(1)), classes=3)
    run = plateaux.open_run(weak, data=data, model=net)
    plateaux.evaluate(run)
    plateaux.evaluate(run, members=[2], metrics="accuracy")
    assert run_warnings(run, [2]) == {}
    assert set(run_warnings(run)) == set(NAMES)
    run.update_info({"calibration_digest": "of a calibration"})
    assert set(run_warnings(plateaux.open_run(weak))) == set(NAMES) - {"high-ece"}


def test_warnings_of_several_runs_are_counted() -> None:
    assert warning_lines([{}, {}]) == []
    (line,) = warning_lines([{"high-ece": "The error is 40 %"}, {}, {"high-ece": "The error is 30 %"}])
    assert (line.label, line.text) == ("Warnings", "The error is 40 % [high-ece] (2 of 3 runs).")


@pytest.mark.parametrize(("ensemble", "end"), [(0.8, "(70.0 %) and -10.0 points from the best of them (90.0 %)."),
                                               (0.95, "(70.0 %).")])  # fmt: skip
def test_the_summary_names_the_best_member_if_it_is_better_than_the_ensemble(ensemble: float, end: str) -> None:
    values = {"member 0": 0.5, "member 1": 0.9, "mean of members": 0.7, "ensemble (mean probability)": ensemble}
    rows = [result_row("accuracy", name, value, percent=True) for name, value in values.items()]
    assert summary(rows)[0].text.endswith(end)
