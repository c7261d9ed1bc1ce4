"""The experiment, its figures, captions, numbers and verdicts, and the command that makes them."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from plateaux.cli.common import handle_errors
from plateaux.commands import WorkDone
from plateaux.errors import RecipeError
from plateaux.stats import interval_from_stderr, mean_of_independent, t_interval
from plateaux_papers.commands import theory
from plateaux_papers.theory import Setting, SimulationResult, theorem1
from plateaux_papers.theory.captions import captions, deviation_percent, format_largest
from plateaux_papers.theory.experiment import (
    FigurePlot,
    Pair,
    Point,
    TheoryExperiment,
    plotted_bounds,
    predict,
    run_experiment,
)
from plateaux_papers.theory.figures import draw_figures
from plateaux_papers.theory.record import deviations, record
from plateaux_papers.theory.verdicts import (
    judge_claims,
    judge_sam_bounds,
    judge_sam_diversity,
    judge_subsets,
    judge_trade_off,
)

BASE = Setting(n=1200, d=60)  # the paper's ratios, smaller


pytestmark = pytest.mark.xdist_group("experiment")  # one worker runs the experiment once


@pytest.fixture(scope="module")
def experiment() -> TheoryExperiment:
    return run_experiment(matrices=8, starts=6, density=3, steps=20, base=BASE)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_the_interval_has_nominal_coverage(count: int) -> None:
    draws = np.random.default_rng(0).standard_normal((4000, count)) + 3
    held = [each.low <= 3 <= each.high for each in map(t_interval, draws)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.012)


def test_simultaneous_intervals_are_wider() -> None:
    values = np.random.default_rng(0).standard_normal(20)
    one, joint = t_interval(values), t_interval(values, simultaneous=50)
    assert joint.low < one.low < one.value < one.high < joint.high
    from_stderr = interval_from_stderr(mean_of_independent(values.tolist()), 20)
    assert (from_stderr.low, from_stderr.high) == pytest.approx((one.low, one.high))


def test_settings_are_the_papers(experiment: TheoryExperiment) -> None:
    assert list(experiment.figures) == ["1b", "2", "9", "10", "11"]
    assert [len(plots) for plots in experiment.figures.values()] == [2, 1, 2, 9, 9]
    ten = [setting for plot in experiment.figures["10"] for setting in plot.curves["SAM"]]
    assert {(s.k, s.eta) for s in ten} == {(k, eta) for k in (2, 4, 8) for eta in (0.1, 0.05, 0.01)}
    assert {s.rho for s in ten} == {0.3, 0.4, 0.5}
    assert not any(s.stable for s in ten)
    eleven = [setting for plot in experiment.figures["11"] for setting in plot.curves["subsets"]]
    assert {s.parts for s in eleven} == {10}
    nine = experiment.figures["9"]
    assert [s.k for s in nine[1].curves["subsets"]] == list(range(1, 16))
    assert (nine[0].curves["subsets"][0].rho, nine[0].curves["subsets"][-1].rho) == (0.4, 1.0)
    assert Setting() == replace(Setting(), n=3000, d=150, variance=0.1, radius=0.01)


def test_pairs_have_equal_bounds_and_converge_where_they_should(experiment: TheoryExperiment) -> None:
    assert {pair.formula for pair in experiment.pairs} == {"printed", "corrected"}
    for pair in experiment.pairs:
        for setting in (pair.full, pair.subsets):
            assert experiment.points[setting].predictions[pair.formula].upper == pytest.approx(pair.bound, rel=2e-3)
    assert {pair.bound for pair in experiment.pairs if pair.full.stable} == {0.2, 0.3, 0.4, 0.5}
    assert all(pair.subsets.stable for pair in experiment.pairs)


def test_a_bound_that_the_other_curve_does_not_have_is_left_out() -> None:
    flat, steep = replace(BASE, rho=0.1), replace(BASE, rho=0.5)
    some = [replace(BASE, parts=10, rho=rho) for rho in (0.01, 1.5)]
    plot = FigurePlot("", "rho", {"SAM": [flat, flat, steep], "subsets": some})
    assert plotted_bounds({"1b": [plot]}) == []


def test_every_number_that_is_drawn_is_recorded(experiment: TheoryExperiment) -> None:
    found = json.loads(json.dumps(record(experiment), allow_nan=False))
    assert (found["matrices"], found["starts"], found["seed"]) == (8, 6, 0)
    drawn = [s for plots in experiment.figures.values() for p in plots for c in p.curves.values() for s in c]
    stored = [
        point
        for figure in found["figures"].values()
        for plot in figure["panels"]
        for curve in plot["curves"].values()
        for point in curve
    ]
    assert len(stored) == len(drawn)
    for setting, point in zip(drawn, stored, strict=True):
        simulated_values = experiment.points[setting].simulated
        assert point["simulated"]["sharpness"]["mean"] == pytest.approx(float(simulated_values.sharpness.mean()))
        assert point["simulated"]["diversity"]["error"] == pytest.approx(
            float(simulated_values.diversity.std(ddof=1)) / 8**0.5
        )
        assert point["printed"]["upper"] == predict(setting)["printed"].upper
        assert point["stable"] == setting.stable


def test_captions_contain_the_numbers(experiment: TheoryExperiment) -> None:
    words = captions(experiment)
    assert set(words) == set(experiment.figures)
    assert re.search(r"where SAM converges, .* subsets are \d\.\d to \d\.\d times as diverse", words["1b"])
    points = [experiment.points[s] for s in experiment.figures["2"][0].curves["SAM"]]
    assert format_largest(deviation_percent(points, "printed", "diversity")) in words["2"]
    assert "SAM diverges in 27 of 27 settings. The printed lower bound is below zero in 27 of them." in words["10"]
    assert "lower bound" not in words["11"]
    assert all(words[name].endswith(".") for name in words)


@pytest.mark.parametrize(
    ("values", "words"), [([0.5, -3.25], "-3.2 %"), ([12.6, 1.0], "+13 %"), ([-0.01], "0 %"), ([0.04, 0.0], "0 %")]
)
def test_percentages_are_short(values: list[float], words: str) -> None:
    assert format_largest(np.array(values)) == words


def test_figures_are_drawn_and_equal_numbers_give_equal_files(experiment: TheoryExperiment) -> None:
    few = replace_figures(experiment, ("1b", "2", "10"))
    files = draw_figures(few)
    assert sorted(files) == [
        "theory-10.png", "theory-10.svg", "theory-1b.png", "theory-1b.svg", "theory-2.png", "theory-2.svg",
    ]  # fmt: skip
    for name, content in files.items():
        if name.endswith(".svg"):
            text = content.decode()
            assert ET.fromstring(text).tag.endswith("svg")
            assert "upper bound, corrected" in text or "bound, corrected" in text
        else:
            assert content.startswith(b"\x89PNG")
    one = replace_figures(experiment, ("2",))
    assert draw_figures(one).items() <= files.items()


def replace_figures(experiment: TheoryExperiment, names: tuple[str, ...]) -> TheoryExperiment:
    return replace(experiment, figures={name: experiment.figures[name] for name in names})


def made_up(off_by: float, *, spread: float = 0.01, sharp: float = 0.97, rho: float = 0.1) -> TheoryExperiment:
    """Return an experiment of one setting, its diversity off the corrected formula by that share."""
    setting = Setting(rho=rho)
    says = predict(setting)
    noise = np.linspace(-1, 1, 20)
    diversity = says["corrected"].diversity * (1 + off_by + spread * noise)
    sharpness = says["corrected"].upper * (sharp + spread * noise)
    point = Point(setting, SimulationResult(diversity, sharpness), says)
    return TheoryExperiment({}, [], {setting: point}, 20, 2, 0)


@pytest.mark.parametrize(
    ("off_by", "spread", "verdict"),
    [
        (0.0, 0.01, "reproduced"),
        (0.1, 0.01, "not reproduced"),
        (-0.1, 0.01, "not reproduced"),
        (0.0, 0.4, "inconclusive"),
        (-0.1, 0.4, "inconclusive"),
    ],
)
def test_an_equality_is_judged_by_its_interval(off_by: float, spread: float, verdict: str) -> None:
    found = judge_sam_diversity(made_up(off_by, spread=spread))
    assert found["claim"] == 14
    assert found["corrected"]["verdict"] == verdict
    assert found["corrected"]["converging"]["simulation / formula - 1"]["mean"] == pytest.approx(off_by)
    assert "diverging" not in found["corrected"]


@pytest.mark.parametrize(
    ("sharp", "verdict"),
    [(0.99, "reproduced"), (1.02, "not reproduced"), (0.5, "not reproduced"), (0.97, "not reproduced")],
)
def test_bounds_are_judged_by_theirs(sharp: float, verdict: str) -> None:
    found = judge_sam_bounds(made_up(0.0, sharp=sharp, spread=0.005))["corrected"]
    assert found["verdict"] == verdict
    assert found["converging"]["settings above the upper bound"] == int(sharp > 1)
    assert found["converging"]["settings below the lower bound"] == int(sharp < 0.98)


def test_near_the_threshold_the_verdict_is_inconclusive() -> None:
    wide = made_up(0.0, sharp=0.9, spread=0.3)
    assert judge_sam_bounds(wide)["corrected"]["verdict"] == "inconclusive"


def pair_of(more: float, spread: float = 1e-3) -> TheoryExperiment:
    whole, some = Setting(), Setting(parts=10)
    noise = np.linspace(-1, 1, 20)
    points = {
        each: Point(each, SimulationResult(0.01 + shift + spread * noise**power, np.ones(20)), predict(each))
        for each, shift, power in ((whole, 0.0, 1), (some, more, 2))
    }
    return TheoryExperiment(
        {}, [Pair("printed", 0.1, whole, some), Pair("corrected", 0.1, whole, some)], points, 20, 2, 0
    )


@pytest.mark.parametrize(
    ("more", "verdict"), [(0.05, "reproduced"), (-0.05, "not reproduced"), (-3.5e-4, "inconclusive")]
)
def test_the_trade_off_is_judged_by_the_difference(more: float, verdict: str) -> None:
    assert judge_trade_off(pair_of(more))["printed"]["verdict"] == verdict


def test_all_claims_are_judged_by_both_formulas(experiment: TheoryExperiment) -> None:
    found = judge_claims(experiment)
    assert [each["claim"] for each in found] == [14, 15, 16, 17]
    for each in found:
        assert len(each["criterion"]) > 40
        for formula in ("printed", "corrected"):
            assert each[formula]["verdict"] in ("reproduced", "not reproduced", "inconclusive")
            assert {"converging", "diverging"} <= set(each[formula])
    assert judge_subsets(experiment) == found[2]
    assert found[3]["corrected"]["converging"]["verdict"] == "reproduced"
    means = {name: found[0][name]["diverging"]["simulation / formula - 1"]["mean"] for name in ("printed", "corrected")}
    assert abs(means["corrected"]) < abs(means["printed"])


def test_the_table_has_a_row_for_each_figure(experiment: TheoryExperiment) -> None:
    rows = deviations(experiment)
    assert [row[0] for row in rows] == list(experiment.figures)
    assert all(len(row) == 7 for row in rows)


def command(monkeypatch: pytest.MonkeyPatch, experiment: TheoryExperiment) -> typer.Typer:
    def short(**options: Any) -> TheoryExperiment:
        options["progress"](WorkDone(1, 1))
        return replace_figures(experiment, ("2",))

    monkeypatch.setattr("plateaux_papers.theory.experiment.run_experiment", short)
    app = typer.Typer()
    app.command()(handle_errors(theory.theory))
    app.command()(lambda: None)
    return app


def test_the_command_writes_figures_and_numbers(
    experiment: TheoryExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = command(monkeypatch, experiment)
    out = tmp_path / "new" / "folder"
    done = CliRunner().invoke(app, ["theory", "--out", str(out), "--matrices", "8", "--json"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert sorted(file.name for file in out.iterdir()) == ["theory-2.png", "theory-2.svg", "theory.json"]
    stored = json.loads((out / "theory.json").read_text(encoding="utf-8"))
    assert printed["figures"] == stored["figures"]
    assert [each["claim"] for each in stored["claims"]] == [14, 15, 16, 17]


def test_the_command_prints_two_tables_in_a_terminal(experiment: TheoryExperiment) -> None:
    from rich.console import Console

    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(theory._differences(deviations(experiment)))
    console.print(theory._verdicts(judge_claims(experiment)))
    text = console.export_text()
    assert "the furthest of each figure" in text
    assert "1b" in text
    assert "Theorem 2's diversity and bound hold" in text


def test_without_matplotlib_the_error_names_the_extra(
    experiment: TheoryExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RecipeError, match=r"plateaux\[report\]"):
        draw_figures(experiment)
    done = CliRunner().invoke(command(monkeypatch, experiment), ["theory", "--out", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert not (tmp_path / "none").exists()


def test_predictions_do_not_warn_where_theorems_do() -> None:
    assert predict(Setting(rho=0.4))["corrected"].upper > 1
    with pytest.warns(UserWarning, match="diverges"):
        theorem1(Setting(rho=0.4))
