"""Tables of methods and compact results of studies, compared with SciPy and with the complete results."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import Script
from scipy import stats

from plateaux.studies.results import results_from_study

ROOT = Path(__file__).resolve().parents[2]
PILOT = ROOT / "studies" / "results" / "sharpbalance_pilot_mlp.json"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "studies")
    return importlib.import_module("_method_tables")


def measured(tables: ModuleType, values: dict[str, list[float]]) -> list[object]:
    column = tables.ACCURACY
    return [
        tables.Measured({"method": method}, number, column.metric, column.split, column.row, value)
        for method, numbers in values.items()
        for number, value in enumerate(numbers)
    ]


def test_a_difference_is_paired_by_repetition_and_bold_if_its_interval_excludes_zero(tables: ModuleType) -> None:
    plain, ours, noise = [0.50, 0.60, 0.70], [0.52, 0.621, 0.719], [0.40, 0.70, 0.71]
    numbers = tables.Numbers(measured(tables, {"plain": plain, "ours": ours, "noise": noise}))
    methods = {name: {"method": name} for name in ("plain", "ours", "noise")}
    _, _, first, second = tables.table(numbers, methods, [tables.ACCURACY], {"method": "plain"}).splitlines()
    for line, name, values in ((first, "ours", ours), (second, "noise", noise)):
        differences = 100 * (np.array(values) - np.array(plain))
        half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / 3**0.5
        text = f"{differences.mean():+.2f} ± {half:.2f}"
        assert line == f"| {name} | {f'**{text}**' if name == 'ours' else text} |"


def test_a_repetition_that_only_one_method_has_is_left_out_of_the_difference(tables: ModuleType) -> None:
    numbers = tables.Numbers(measured(tables, {"plain": [0.5, 0.6], "ours": [0.6, 0.7, 0.1]}))
    found = numbers.difference({"method": "ours"}, {"method": "plain"}, tables.ACCURACY)
    assert (found.value, found.count) == (pytest.approx(10), 2)
    assert numbers.mean({"method": "theirs"}, tables.ACCURACY) is None


def test_compact_results_keep_every_mean_and_leave_out_single_corruptions(tmp_path: Path, script: Script) -> None:
    done = script(ROOT / "studies" / "compact_results.py", str(PILOT), str(tmp_path / "compact.json"))
    assert done.returncode == 0, done.stderr
    complete = {(each.run, each.metric, each.split, str(each.row)): each.value for each in results_from_study(PILOT)}
    kept = {
        (each.run, each.metric, each.split, str(each.row)): each.value
        for each in results_from_study(tmp_path / "compact.json")
    }
    assert kept.items() <= complete.items()
    splits = {split for *_, split, _ in complete.keys() - kept.keys()}
    assert len(splits) == 15 * 5 + 1, "each corruption at each severity, and rows under corruption"
    assert {row for _, _, split, row in complete.keys() - kept.keys() if split == "corrupted"} == {
        row
        for _, _, split, row in complete
        if split == "corrupted" and row.startswith(("member ", "ensemble (mean logit)"))
    }


def test_the_power_calculation_of_the_page_uses_the_chosen_settings(
    monkeypatch: pytest.MonkeyPatch, tables: ModuleType
) -> None:
    fair = importlib.import_module("_fair_test")
    results = results_from_study(ROOT / "studies" / "results" / "sharpbalance_tuning_mlp.json")
    held_out = {}
    for each in results:
        if (each.metric, each.split, str(each.row)) == ("accuracy", "validation", "ensemble (mean probability)"):
            held_out.setdefault((each.condition["method"], each.condition["rho"]), []).append(100 * each.value)
    best = {method: max((sum(v), rho) for (own, rho), v in held_out.items() if own == method) for method, _ in held_out}
    sam = np.array(held_out["SAM", best["SAM"][1]])
    found = [np.std(np.array(held_out[rule, best[rule][1]]) - sam, ddof=1) for rule in fair.RULES]
    pooled = np.sqrt(np.mean(np.square(found)))
    assert f"pooled {pooled:.2f}" in fair.power(results)
    assert f"this is {pooled * 1.5:.2f} points" in fair.power(results)  # 1 / (1 - .3 - .3 / 9) = 1.5


def test_compact_results_keep_the_rows_of_a_run_of_one_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    compact = importlib.import_module("compact_results").compact
    detected = {f"member 0 · max_probability · {name}": value for name, value in (("auroc", 0.6), ("aupr_in", 0.7))}
    several = {**detected, "members together · max_probability · auroc": 0.8}
    metrics = [{"metric": "ood", "split": "far", "rows": rows} for rows in (detected, several)]
    one, ensemble = compact({"runs": {"a": {"metrics": metrics}}})["runs"]["a"]["metrics"]
    assert one["rows"] == {"member 0 · max_probability · auroc": 0.6}
    assert ensemble["rows"] == {"members together · max_probability · auroc": 0.8}


def test_a_method_is_compared_by_its_ensemble_or_its_only_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    file = ROOT / "studies" / "results" / "which_method.json"
    lines = importlib.import_module("_which_method").tables(file)["means"].splitlines()
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1] for line in lines[2:]}
    expected = {"bagging": ("bagging", "ensemble (mean probability)")}
    expected |= {name: (name, "mean of members") for name in cells if name.startswith("one network")}
    assert len(expected) == 3
    for name, (method, row) in expected.items():
        values = [
            100 * each.value
            for each in results_from_study(file)
            if (each.condition["method"], each.metric, each.split, str(each.row)) == (method, "accuracy", "test", row)
        ]
        half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
        assert cells[name] == f"{np.mean(values):.2f} ± {half:.2f}"


def test_means_are_over_the_repetitions_that_all_methods_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies")
    results = ROOT / "studies" / "results"
    tables = importlib.import_module("_which_method").tables(results / "which_method.json")
    for name, metric, split, row in (
        ("means", "accuracy", "test", "ensemble (mean probability)"),
        ("ood", "ood", "mnist (mnist)", "members together · max_probability · auroc"),
    ):
        values = [
            100 * each.value
            for each in results_from_study(results / "sharpbalance_test.json")
            if (each.metric, each.split, str(each.row)) == (metric, split, row)
            and each.condition["method"] == "deep ensemble"
            and each.repetition < 5  # which_method.toml has five repetitions, the test ten
        ]
        assert len(values) == 5
        assert f"| deep ensemble | {np.mean(values):.2f} ±" in tables[name]
    networks = [line for line in tables["ood"].splitlines() if line.startswith("| one network")]
    assert len(networks) == 2
    assert all(line.endswith("|  |  |") for line in networks), "one network has no mutual information"
