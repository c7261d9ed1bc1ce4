"""Every figure draws with one run, with missing measures, with nan, with fifty members and with long names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import made_up_results as made
import numpy as np
import pytest

from plateaux.core.row_names import MEAN_PROBABILITY
from plateaux.core.stats.intervals import slope
from plateaux.core.stats.ranking import auroc
from plateaux.reports import style
from plateaux.reports.figures import (
    accuracy,
    curves,
    gallery,
    landscape,
    partition,
    sharpness_diversity,
    training,
    uncertainty,
)
from plateaux.reports.query import SHARPNESS, first_measured
from plateaux.reports.style import ReportFigure

Draw = Callable[[str], ReportFigure | None]


def numbers(case: str) -> list[Any]:
    if case == "one run":
        return made.one_run()
    if case == "missing":
        return [made.finding("mine", "member 0", 1.0)]
    if case == "nan":
        return made.one_run(broken=True)
    if case == "fifty members":
        return made.one_run(50)
    return made.study([{made.LONG: f"{made.LONG}{i}", "rho": 0.1 * i} for i in range(9)], 1, sizes=True)


def scores(case: str) -> Any:
    pair = (np.arange(9.0), np.arange(9.0) + 3)
    sets = {"one run": {"mnist": pair}, "missing": {}, "nan": {"mnist": (np.full(9, np.nan), pair[1])}}
    return {name: {"entropy": each} for name, each in sets.get(case, {made.LONG: pair}).items()}


def courses(case: str) -> Any:
    several = {
        "one run": {"run": [made.course()]},
        "missing": {"run": [[]]},
        "nan": {"run": [made.course(broken=True)]},
    }
    several["fifty members"] = {"run": [made.course()] * 50}
    return several.get(case, {made.LONG: [made.course()], "other": [made.course(3)]})


def pictures(case: str) -> Any:
    count = {"one run": 3, "missing": 0, "fifty members": 50}.get(case, 3)
    return {f"surface-{i}": made.surface(broken=case == "nan") for i in range(count)}


def answers(case: str) -> Any:
    said = made.said({"fifty members": 50, "missing": 1}.get(case, 3))
    if case == "nan":
        said.probabilities[:] = np.nan
    names = [made.LONG] * 4 if case == "long names" else ()
    images = np.random.default_rng(0).random((20, 3, 70, 70)) if case == "long names" else np.zeros((20, 1, 8, 8), "u1")
    return gallery.gallery(said, lambda ids: images[ids], names)


def met(case: str) -> Any:
    found = made.met({"missing": 0, "fifty members": 50}.get(case, 3))
    return made.SamSets(5, found.counts, [None] * 3, [[None] * 3] * 3) if case == "nan" else found


def slices(case: str) -> Any:
    members = {"missing": 0, "fifty members": 50}.get(case, 3)
    return made.lines(
        [f"{made.LONG if case == 'long names' else 'member'} {i}" for i in range(members)], broken=case == "nan"
    )


DRAW: dict[str, Draw] = {
    "sharpness_diversity": lambda case: sharpness_diversity.sharpness_diversity(numbers(case)),
    "accuracy_bars": lambda case: accuracy.accuracy_bars(numbers(case)),
    "over_size": lambda case: curves.over_size(numbers(case)),
    "severity": lambda case: curves.severity(numbers(case)),
    "reliability": lambda case: uncertainty.reliability(numbers(case)),
    "roc": lambda case: uncertainty.roc(scores(case)),
    "training": lambda case: training.training(courses(case)),
    "sam_sets": lambda case: partition.sam_sets(met(case)),
    "gallery": answers,
    "lines": lambda case: landscape.lines(slices(case)),
    "surfaces": lambda case: landscape.surfaces(pictures(case)),
}
DRAWS_NAN = ("training", "sam_sets")  # there is still something to see


@pytest.mark.parametrize("case", ["one run", "fifty members", "long names"])
@pytest.mark.parametrize("name", DRAW)
def test_a_figure_draws_and_no_word_is_cut(name: str, case: str) -> None:
    drawn = DRAW[name](case)
    assert drawn is not None
    assert drawn.sentence.endswith(".")
    assert "nan" not in drawn.sentence
    assert not reaches_over(drawn)


@pytest.mark.parametrize("name", DRAW)
def test_a_figure_without_its_measure_is_none(name: str) -> None:
    assert DRAW[name]("missing") is None


@pytest.mark.parametrize("name", DRAW)
def test_a_figure_of_no_numbers_is_none_or_says_so(name: str) -> None:
    drawn = DRAW[name]("nan")
    assert (drawn is None) is (name not in DRAWS_NAN)
    assert drawn is None or "nan" not in drawn.sentence


def test_small_numbers_are_told_at_the_ticks_and_a_long_name_in_two_lines() -> None:
    found = made.study(made.grid(4))
    named = first_measured(found, SHARPNESS)
    assert named is not None
    tiny = [replace(each, metric="sam_sharpness", value=1e-6 * (each.value - 0.3), stderr=None)
            if each.metric == named[0] else each for each in found]  # fmt: skip
    drawn = sharpness_diversity.sharpness_diversity(tiny, sharpness="sam_sharpness")
    assert drawn is not None
    assert not reaches_over(drawn)
    (axes,) = drawn.figure.axes
    assert axes.xaxis.get_offset_text().get_text() == ""
    assert any("e-0" in label.get_text() for label in axes.get_xticklabels())
    assert axes.get_xlabel().count("\n") == 1


def test_a_measure_is_drawn_against_a_factor() -> None:
    found = made.study(made.grid(8))
    drawn = curves.against(found, measure="pds", factor="rho")
    assert drawn is not None
    assert not reaches_over(drawn)
    numbers = [each.value for each in found if each.metric == "pds"]
    lowest = min(np.mean(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True))
    assert f"lowest {lowest:.3g}" in drawn.sentence
    assert curves.against(made.one_run(), measure="pds") is None
    assert curves.against(made.study(made.grid(8), broken=True), measure="pds") is None
    long = made.study([{made.LONG: i, "name": made.LONG * 2} for i in range(3)], 1)
    assert curves.against(long, measure="pds") is not None


def test_the_fit_of_the_plane_is_that_of_statistics() -> None:
    found = []
    for i, x in enumerate((0.1, 0.2, 0.4, 0.8)):
        where = {"run": f"runs/{i}", "condition": {"rho": float(i)}}
        found.append(made.finding("worst_l2", "mean of members", x, on="train", **where))
        found.append(made.finding("der", "members together", 2 * x**0.5, **where))
    drawn = sharpness_diversity.sharpness_diversity(found)
    assert drawn is not None
    assert "β is 0.5" in drawn.sentence
    line = next(each for each in drawn.figure.axes[0].lines if len(each.get_xdata()) == 50)
    np.testing.assert_allclose(line.get_ydata(), 2 * np.asarray(line.get_xdata()) ** 0.5)
    assert math.isclose(slope([0.1, 0.2, 0.4], [1, 2, 4]).value, 1)
    wide = [made.finding("trace", "mean of members", 10.0**i, run=f"{i}", condition={"n": i}) for i in range(3)]
    wide += [made.finding("kl", "mean of pairs", 1.0, run=f"{i}", condition={"n": i}) for i in range(3)]
    again = sharpness_diversity.sharpness_diversity(wide, sharpness="trace", diversity="kl", on="test")
    assert again is not None
    assert again.figure.axes[0].get_xscale() == "log"
    many = sharpness_diversity.sharpness_diversity(made.study(made.grid(50), 1))
    assert many is not None


def test_bars_are_the_means_of_members_and_the_gain_lies_on_top() -> None:
    found = [made.finding("accuracy", f"member {i}", a, percent=True) for i, a in enumerate((0.8, 0.9))]
    found.append(made.finding("accuracy", MEAN_PROBABILITY, 0.87, percent=True))
    drawn = accuracy.accuracy_bars(found)
    assert drawn is not None
    mean, gain = drawn.figure.axes[0].patches
    assert (round(mean.get_width(), 6), round(gain.get_x(), 6), round(gain.get_width(), 6)) == (85, 85, 2)  # type: ignore[attr-defined]
    assert "87.0 % of the test samples, +2.0 points" in drawn.sentence
    alone = accuracy.accuracy_bars(found[:1])
    assert alone is not None
    assert "gain" not in alone.sentence
    worse = accuracy.accuracy_bars([*found[:2], made.finding("accuracy", MEAN_PROBABILITY, 0.5, error=math.nan)])
    assert worse is not None
    assert "-35.0 points" in worse.sentence
    members = [each for each in made.study(made.grid(4)) if each.row != MEAN_PROBABILITY]
    several = accuracy.accuracy_bars(members)
    assert several is not None
    assert several.sentence.startswith("Members are right on")


def test_of_many_conditions_the_best_have_bars_and_only_some_a_colour() -> None:
    found = made.study(made.grid(24), 1)
    drawn = accuracy.accuracy_bars(found)
    assert drawn is not None
    assert "Shown are the 20 best" in drawn.sentence
    best = max(
        each.value for each in found if (each.metric, each.row, each.split) == ("accuracy", MEAN_PROBABILITY, "test")
    )
    assert f"{100 * best:.1f} %" in drawn.sentence
    curve = curves.over_size(found)
    assert curve is not None
    assert "17 others" in [text.get_text() for text in curve.figure.legends[0].texts]


def test_the_area_under_the_drawn_rates_is_the_auroc() -> None:
    chance = np.random.default_rng(1)
    inside, outside = chance.normal(size=80).round(1), chance.normal(1, size=90).round(1)
    false, true = uncertainty.rates(inside, outside)
    assert np.trapezoid(true, false) == pytest.approx(auroc(inside, outside).value)
    thinned = uncertainty.rates(chance.normal(size=2000), chance.normal(1, size=2000))[0]
    assert len(thinned) <= uncertainty.POINTS + 1
    assert (thinned[0], thinned[-1]) == (0, 1)


def test_a_reliability_diagram_says_how_far_confidence_is_off() -> None:
    cells = {"share": (0.5, 0.495, 0.005), "confidence": (0.6, 0.9, 0.1), "accuracy": (0.5, 0.8, 1.0)}
    found = [
        made.finding("reliability", f"member 0 · bin {i} · {what}", value)
        for what, values in cells.items()
        for i, value in enumerate(values)
    ]
    drawn = uncertainty.reliability(found)
    assert drawn is not None
    assert "too sure by 9.5 points" in drawn.sentence
    assert [len(each.get_xdata()) for each in drawn.figure.axes[0].lines] == [2, 2]  # the smallest bin is left out
    several = uncertainty.reliability(made.study(made.grid(3), 1))
    assert several is not None
    assert "the furthest of 3" in several.sentence


def test_members_that_differ_have_mutual_information() -> None:
    same = np.full((2, 1, 2), 0.5, np.float32)
    apart = np.array([[[1.0, 0.0]], [[0.0, 1.0]]], np.float32)
    np.testing.assert_allclose(gallery.differing(np.concatenate([same, apart], 1)), [0.0, math.log(2)], atol=1e-6)
    assert gallery.gallery(made.said(samples=1), lambda ids: np.zeros((len(ids), 1, 8, 8))) is None


def test_paths_and_planes_are_drawn() -> None:
    drawn = landscape.lines(made.lines(["members 0 and 1"], kind="paths"))
    assert drawn is not None
    assert "rises by 0.25 above" in drawn.sentence
    assert landscape.lines({"kind": "spirals"}) is None
    through = landscape.surfaces({"plane-0-1-2": made.surface(kind="plane")})
    assert through is not None
    assert "members 0, 1, 2" in through.sentence
    wide = made.lines(["member 0"])
    wide["lines"]["member 0"]["losses"] = [100.0, 0.1, None]
    assert landscape.lines(wide) is not None


def test_severities_of_one_run_show_its_members_too() -> None:
    found = made.one_run()
    found.append(
        made.finding("accuracy under corruption", "mean of members · severity 5", 0.3, on="corrupted", percent=True)
    )
    drawn = curves.severity(found)
    assert drawn is not None
    assert len(drawn.figure.legends[0].texts) == 2
    odd = [made.finding("accuracy under corruption", "mean of members · severity x", 0.3, on="corrupted")]
    assert curves.severity(odd) is None


def test_of_many_curves_those_that_are_best_at_the_end_have_the_colours() -> None:
    row = "ensemble (mean probability) · severity"
    found = [
        made.finding("accuracy under corruption", f"{row} {level}", 0.3 + way / 100 - level / 50, on="corrupted",
                     percent=True, condition={"way": way})
        for way in range(12) for level in (1, 5)
    ]  # fmt: skip
    drawn = curves.severity(found)
    assert drawn is not None
    assert drawn.sentence.endswith("best there: way=11. The 7 best there are in colour.")
    legend = [text.get_text() for text in drawn.figure.legends[0].texts]
    assert legend == [*(f"way={way}" for way in range(11, 4, -1)), "5 others"]


def test_the_same_numbers_give_the_same_bytes_and_every_kind_is_a_file() -> None:
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    first, second = (accuracy.accuracy_bars(made.one_run()) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.file("svg") == second.file("svg")
    for kind in style.KINDS:
        assert first.file(kind).startswith(starts[kind])


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "$\\frac{", "_hidden", "名\x00前\n😀", '#222222 href="#x"', "]]>&amp;"]
)
def test_any_name_can_be_drawn_and_is_only_text(name: str) -> None:
    drawn = curves.over_size(made.study([{"name": name}, {"name": "other"}], 1))
    assert drawn is not None
    svg = drawn.inline("mark")
    assert "<script" not in svg
    assert 'id="mark-' in svg
    assert "xlink:href" not in svg
    assert "<metadata" not in svg
    assert "#222222;" not in svg.partition("</text>")[0]
    assert len(drawn.figure.legends[0].texts) == 2


def reaches_over(drawn: ReportFigure) -> bool:
    """Say whether something is drawn beyond the paper: a word would be cut there."""
    with style.figure_style():
        box, (width, height) = drawn.figure.get_tightbbox(), drawn.figure.get_size_inches()
    return bool(box.x0 < -0.01 or box.y0 < -0.01 or box.x1 > width + 0.01 or box.y1 > height + 0.01)
