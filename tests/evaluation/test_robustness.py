"""Robustness: summaries of metrics under corruption equal hand-computed values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plateaux.core.errors import DataError
from plateaux.core.types import Estimate
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.robustness import read_baseline, robustness

ACCURACIES = {("fog", 1): 0.9, ("fog", 2): 0.8, ("snow", 1): 0.7, ("snow", 2): 0.5}


def measured() -> list[MetricResult]:
    data = {"name": "cifar10", "samples": 100, "source": "generated, CIFAR-C-like"}
    return [
        MetricResult("accuracy", f"{kind} {level}", {"member 0": Estimate(number, 0.02)}, True, {},
                    {**data, "corruption": kind, "severity": level})
        for (kind, level), number in ACCURACIES.items()
    ]  # fmt: skip


def test_means_are_by_kind_by_severity_and_over_all() -> None:
    summary, error = robustness(measured())
    rows = {name: value.value for name, value in summary.rows.items()}
    assert rows == pytest.approx(
        {
            "member 0 · cACC": 0.725,
            "member 0 · severity 1": 0.8,
            "member 0 · severity 2": 0.65,
            "member 0 · fog": 0.85,
            "member 0 · snow": 0.6,
        }
    )
    assert summary.rows["member 0 · cACC"].stderr == pytest.approx(0.02)
    assert summary.data["source"] == "generated, CIFAR-C-like"
    assert error.metric == "mean corruption error (not normalized)"
    assert error.rows["member 0"].value == pytest.approx(1 - 0.725)
    assert error.higher_is_better is False


def test_mce_is_the_mean_of_ratios_to_the_baseline() -> None:
    baseline = {"fog": [0.2, 0.4, 1, 1, 1], "snow": [0.5, 0.5, 1, 1, 1]}
    found = robustness(measured(), baseline)[1]
    assert found.metric == "mCE"
    assert found.rows["member 0"].value == pytest.approx(((0.1 + 0.2) / 0.6 + (0.3 + 0.5) / 1.0) / 2)
    with pytest.raises(DataError, match="The baseline has no errors for snow"):
        robustness(measured(), {"fog": baseline["fog"]})


def test_other_metrics_have_means_over_all_and_by_severity() -> None:
    losses = {("fog", 1): 0.2, ("fog", 5): 1.0, ("snow", 1): 0.4, ("snow", 5): 2.4}
    results = [
        MetricResult("nll", f"{kind} {level}", {"member 0": Estimate(loss, 0.1), "member 0 · class 3": Estimate(9.0)},
                     False, {}, {"name": "cifar10", "source": "generated", "corruption": kind, "severity": level})
        for (kind, level), loss in losses.items()
    ]  # fmt: skip
    summary, error, found = robustness([*measured(), *results])
    assert (summary.metric, error.metric) == ("accuracy under corruption", "mean corruption error (not normalized)")
    assert (found.metric, found.split, found.higher_is_better) == ("nll under corruption", "corrupted", False)
    # (0.2 + 1.0 + 0.4 + 2.4) / 4, (0.2 + 0.4) / 2 and (1.0 + 2.4) / 2; classes are left out
    by_hand = {"member 0": 1.0, "member 0 · severity 1": 0.3, "member 0 · severity 5": 1.7}
    assert {name: value.value for name, value in found.rows.items()} == pytest.approx(by_hand)
    assert found.rows["member 0"].stderr == pytest.approx(0.1)
    assert found.data == {
        "name": "cifar10", "source": "generated", "corruptions": ["fog", "snow"], "severities": [1, 5]
    }  # fmt: skip
    assert robustness(results) == [found]


def test_a_mean_over_published_and_generated_images_names_both_sources() -> None:
    sources = {"fog": "published files", "snow": "generated, CIFAR-C-like"}
    results = [
        MetricResult(metric, f"{kind} {level}", {"member 0": Estimate(0.5, 0.1)}, False, {},
                     {"name": "cifar10", "source": source, "corruption": kind, "severity": level})
        for metric in ("nll", "accuracy") for kind, source in sources.items() for level in (1, 2)
    ]  # fmt: skip
    found = {each.metric: each.data["source"] for each in robustness(results)}
    assert found["nll under corruption"] == "generated, CIFAR-C-like, published files"
    assert found["accuracy under corruption"] == "generated, CIFAR-C-like, published files"


def test_without_corruption_results_there_is_no_summary() -> None:
    assert robustness([]) == []


@pytest.mark.parametrize("tree", [{"fog": [0.1]}, {"fog": [0.1] * 4 + [2.0]}, [1, 2], {"fog": 3}])
def test_an_invalid_baseline_file_is_rejected(tree: object, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"expected \{\"fog\": \[0.18"):
        read_baseline(tmp_path / "b.json")


def test_a_baseline_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps({"fog": [0.1, 0.2, 0.3, 0.4, 0.5]}))
    assert read_baseline(tmp_path / "b.json")["fog"][2] == 0.3
