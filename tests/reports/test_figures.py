"""Every figure draws with one run, missing metrics, NaN, fifty members, and long names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import synthetic_results as synthetic

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
        return synthetic.one_run()
    if case == "missing":
        return [synthetic.result_row("mine", "member 0", 1.0)]
    if case == "nan":
        return synthetic.one_run(broken=True)
    if case == "fifty members":
        return synthetic.one_run(50)
    return synthetic.study([{synthetic.LONG: f"{synthetic.LONG}{i}", "rho": 0.1 * i} for i in range(9)], 1, sizes=True)


def scores(case: str) -> Any:
    pair = (np.arange(9.0), np.arange(9.0) + 3)
    sets = {"one run": {"mnist": pair}, "missing": {}, "nan": {"mnist": (np.full(9, np.nan), pair[1])}}
    return {name: {"entropy": each} for name, each in sets.get(case, {synthetic.LONG: pair}).items()}


def training_logs(case: str) -> Any:
    several = {
        "one run": {"run": [synthetic.training_log()]},
        "missing": {"run": [[]]},
        "nan": {"run": [synthetic.training_log(broken=True)]},
    }
    several["fifty members"] = {"run": [synthetic.training_log()] * 50}
    return several.get(case, {synthetic.LONG: [synthetic.training_log()], "other": [synthetic.training_log(3)]})


def loss_surfaces(case: str) -> Any:
    count = {"one run": 3, "missing": 0, "fifty members": 50}.get(case, 3)
    return {f"surface-{i}": synthetic.surface(broken=case == "nan") for i in range(count)}


def draw_gallery(case: str) -> Any:
    predictions = synthetic.predictions({"fifty members": 50, "missing": 1}.get(case, 3))
    if case == "nan":
        predictions.probabilities[:] = np.nan
    names = [synthetic.LONG] * 4 if case == "long names" else ()
    images = np.random.default_rng(0).random((20, 3, 70, 70)) if case == "long names" else np.zeros((20, 1, 8, 8), "u1")
    return gallery.gallery(predictions, lambda ids: images[ids], names)


def partition_sets(case: str) -> Any:
    sets = synthetic.sam_sets({"missing": 0, "fifty members": 50}.get(case, 3))
    return synthetic.SamSets(5, sets.counts, [None] * 3, [[None] * 3] * 3) if case == "nan" else sets


def slices(case: str) -> Any:
    members = {"missing": 0, "fifty members": 50}.get(case, 3)
    return synthetic.lines(
        [f"{synthetic.LONG if case == 'long names' else 'member'} {i}" for i in range(members)], broken=case == "nan"
    )


DRAW: dict[str, Draw] = {
    "sharpness_diversity": lambda case: sharpness_diversity.sharpness_diversity(numbers(case)),
    "accuracy_bars": lambda case: accuracy.accuracy_bars(numbers(case)),
    "over_size": lambda case: curves.over_size(numbers(case)),
    "severity": lambda case: curves.severity(numbers(case)),
    "reliability": lambda case: uncertainty.reliability(numbers(case)),
    "roc": lambda case: uncertainty.roc(scores(case)),
    "training": lambda case: training.training(training_logs(case)),
    "sam_sets": lambda case: partition.sam_sets(partition_sets(case)),
    "gallery": draw_gallery,
    "lines": lambda case: landscape.lines(slices(case)),
    "surfaces": lambda case: landscape.surfaces(loss_surfaces(case)),
}
DRAWS_NAN = ("training", "sam_sets")  # part of the figure is finite


@pytest.mark.parametrize("case", ["one run", "fifty members", "long names"])
@pytest.mark.parametrize("name", DRAW)
def test_a_figure_is_drawn_and_no_text_exceeds_the_canvas(name: str, case: str) -> None:
    drawn = DRAW[name](case)
    assert drawn is not None
    assert drawn.caption.endswith(".")
    assert "nan" not in drawn.caption.lower()
    assert not exceeds_canvas(drawn)


@pytest.mark.parametrize("name", DRAW)
def test_a_figure_without_its_metric_is_none(name: str) -> None:
    assert DRAW[name]("missing") is None


@pytest.mark.parametrize("name", DRAW)
def test_a_figure_of_nan_is_none_or_has_no_nan_in_its_caption(name: str) -> None:
    drawn = DRAW[name]("nan")
    assert (drawn is None) is (name not in DRAWS_NAN)
    assert drawn is None or "nan" not in drawn.caption


def test_tick_labels_of_small_values_include_the_exponent_and_long_names_have_two_lines() -> None:
    results = synthetic.study(synthetic.grid(4))
    named = first_measured(results, SHARPNESS)
    assert named is not None
    tiny = [replace(each, metric="sam_sharpness", value=1e-6 * (each.value - 0.3), stderr=None)
            if each.metric == named[0] else each for each in results]  # fmt: skip
    drawn = sharpness_diversity.sharpness_diversity(tiny, sharpness="sam_sharpness")
    assert drawn is not None
    assert not exceeds_canvas(drawn)
    (axes,) = drawn.figure.axes
    assert axes.xaxis.get_offset_text().get_text() == ""
    assert any("e-0" in label.get_text() for label in axes.get_xticklabels())
    assert axes.get_xlabel().count("\n") == 1


def test_a_metric_is_plotted_against_a_factor() -> None:
    results = synthetic.study(synthetic.grid(8))
    drawn = curves.against(results, metric="pds", factor="rho")
    assert drawn is not None
    assert not exceeds_canvas(drawn)
    numbers = [each.value for each in results if each.metric == "pds"]
    lowest = min(np.mean(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True))
    assert f"from {lowest:.3g}" in drawn.caption
    assert curves.against(synthetic.one_run(), metric="pds") is None
    assert curves.against(synthetic.study(synthetic.grid(8), broken=True), metric="pds") is None
    long = synthetic.study([{synthetic.LONG: i, "name": synthetic.LONG * 2} for i in range(3)], 1)
    assert curves.against(long, metric="pds") is not None


def test_the_fitted_line_equals_that_of_the_statistics_module() -> None:
    results = []
    for i, x in enumerate((0.1, 0.2, 0.4, 0.8)):
        where = {"run": f"runs/{i}", "condition": {"rho": float(i)}}
        results.append(synthetic.result_row("worst_l2", "mean of members", x, split="train", **where))
        results.append(synthetic.result_row("der", "members together", 2 * x**0.5, **where))
    drawn = sharpness_diversity.sharpness_diversity(results)
    assert drawn is not None
    assert "β is 0.5" in drawn.caption
    line = next(each for each in drawn.figure.axes[0].lines if len(each.get_xdata()) == 50)
    np.testing.assert_allclose(line.get_ydata(), 2 * np.asarray(line.get_xdata()) ** 0.5)
    assert math.isclose(slope([0.1, 0.2, 0.4], [1, 2, 4]).value, 1)
    wide = [synthetic.result_row("trace", "mean of members", 10.0**i, run=f"{i}", condition={"n": i}) for i in range(3)]
    wide += [synthetic.result_row("kl", "mean of pairs", 1.0, run=f"{i}", condition={"n": i}) for i in range(3)]
    again = sharpness_diversity.sharpness_diversity(wide, sharpness="trace", diversity="kl", split="test")
    assert again is not None
    assert again.figure.axes[0].get_xscale() == "log"
    many = sharpness_diversity.sharpness_diversity(synthetic.study(synthetic.grid(50), 1))
    assert many is not None


def test_a_line_is_fitted_only_over_a_factor_that_varies() -> None:
    def seeds(conditions: list[dict[str, Any]]) -> list[Any]:
        rows = []
        for i, x in enumerate((0.1, 0.2, 0.4, 0.8, 0.9, 1.3)):
            where = {"run": f"runs/{i}", "condition": conditions[i % len(conditions)], "repetition": i}
            rows.append(synthetic.result_row("worst_l2", "mean of members", x, split="train", **where))
            rows.append(synthetic.result_row("der", "members together", 2 * x**0.5, **where))
        return rows

    for conditions, has_fit in (
        ([{}], False),
        ([{"method": "SAM", "rho": 0.1}], False),
        ([{"method": "SAM"}, {"method": "SGD"}], False),
        ([{"rho": 0.1}, {"rho": 0.2}, {"rho": 0.3}], True),
    ):
        drawn = sharpness_diversity.sharpness_diversity(seeds(conditions))
        assert drawn is not None
        assert ("β is" in drawn.caption) is has_fit
        assert any(len(each.get_xdata()) == 50 for each in drawn.figure.axes[0].lines) is has_fit


def test_bars_show_the_mean_of_members_and_the_gain_of_the_ensemble() -> None:
    results = [synthetic.result_row("accuracy", f"member {i}", a, percent=True) for i, a in enumerate((0.8, 0.9))]
    results.append(synthetic.result_row("accuracy", MEAN_PROBABILITY, 0.87, percent=True))
    drawn = accuracy.accuracy_bars(results)
    assert drawn is not None
    mean, gain = drawn.figure.axes[0].patches
    assert (round(mean.get_width(), 6), round(gain.get_x(), 6), round(gain.get_width(), 6)) == (85, 85, 2)  # type: ignore[attr-defined]
    assert "on test samples is 87.0 %, +2.0 points" in drawn.caption
    alone = accuracy.accuracy_bars(results[:1])
    assert alone is not None
    assert "gain" not in alone.caption
    worse = accuracy.accuracy_bars(
        [*results[:2], synthetic.result_row("accuracy", MEAN_PROBABILITY, 0.5, stderr=math.nan)]
    )
    assert worse is not None
    assert "-35.0 points" in worse.caption
    members = [each for each in synthetic.study(synthetic.grid(4)) if each.row != MEAN_PROBABILITY]
    several = accuracy.accuracy_bars(members)
    assert several is not None
    assert several.caption.startswith("The mean accuracy of members on")


def test_only_the_best_of_many_conditions_have_bars_and_colors() -> None:
    results = synthetic.study(synthetic.grid(24), 1)
    drawn = accuracy.accuracy_bars(results)
    assert drawn is not None
    assert "no condition is distinguished as the best. Only the 20 highest are shown" in drawn.caption
    curve = curves.over_size(results)
    assert curve is not None
    assert "17 others" in [text.get_text() for text in curve.figure.legends[0].texts]


def test_the_area_under_the_plotted_roc_curve_is_the_auroc() -> None:
    rng = np.random.default_rng(1)
    inside, outside = rng.normal(size=80).round(1), rng.normal(1, size=90).round(1)
    false, true = uncertainty.rates(inside, outside)
    assert np.trapezoid(true, false) == pytest.approx(auroc(inside, outside).value)
    thinned = uncertainty.rates(rng.normal(size=2000), rng.normal(1, size=2000))[0]
    assert len(thinned) <= uncertainty.MAX_POINTS + 1
    assert (thinned[0], thinned[-1]) == (0, 1)


def test_the_caption_of_a_reliability_diagram_states_over_or_underconfidence() -> None:
    cells = {"share": (0.5, 0.495, 0.005), "confidence": (0.6, 0.9, 0.1), "accuracy": (0.5, 0.8, 1.0)}
    results = [
        synthetic.result_row("reliability", f"member 0 · bin {i} · {what}", value)
        for what, values in cells.items()
        for i, value in enumerate(values)
    ]
    drawn = uncertainty.reliability(results)
    assert drawn is not None
    assert "overconfident by 9.5 points" in drawn.caption
    assert [len(each.get_xdata()) for each in drawn.figure.axes[0].lines] == [2, 2]  # the smallest bin is left out
    several = uncertainty.reliability(synthetic.study(synthetic.grid(3), 1))
    assert several is not None
    assert "the largest gap of 3" in several.caption


def test_disagreeing_members_have_mutual_information() -> None:
    same = np.full((2, 1, 2), 0.5, np.float32)
    apart = np.array([[[1.0, 0.0]], [[0.0, 1.0]]], np.float32)
    np.testing.assert_allclose(
        gallery.member_disagreement(np.concatenate([same, apart], 1)), [0.0, math.log(2)], atol=1e-6
    )
    assert gallery.gallery(synthetic.predictions(samples=1), lambda ids: np.zeros((len(ids), 1, 8, 8))) is None


def test_paths_and_planes_are_drawn() -> None:
    drawn = landscape.lines(synthetic.lines(["members 0 and 1"], kind="paths"))
    assert drawn is not None
    assert "barrier is 0.25 above" in drawn.caption
    assert landscape.lines({"kind": "spirals"}) is None
    through = landscape.surfaces({"plane-0-1-2": synthetic.surface(kind="plane")})
    assert through is not None
    assert "members 0, 1, 2" in through.caption
    wide = synthetic.lines(["member 0"])
    wide["lines"]["member 0"]["losses"] = [100.0, 0.1, None]
    assert landscape.lines(wide) is not None


def test_the_severity_figure_of_one_run_includes_its_members() -> None:
    results = synthetic.one_run()
    results.append(
        synthetic.result_row(
            "accuracy under corruption", "mean of members · severity 5", 0.3, split="corrupted", percent=True
        )
    )
    drawn = curves.severity(results)
    assert drawn is not None
    assert len(drawn.figure.legends[0].texts) == 2
    odd = [synthetic.result_row("accuracy under corruption", "mean of members · severity x", 0.3, split="corrupted")]
    assert curves.severity(odd) is None


def test_the_curves_with_the_best_final_values_are_colored() -> None:
    row = "ensemble (mean probability) · severity"
    results = [
        synthetic.result_row("accuracy under corruption", f"{row} {level}", 0.3 + way / 100 - level / 50,
                             split="corrupted", percent=True, condition={"way": way})
        for way in range(12) for level in (1, 5)
    ]  # fmt: skip
    drawn = curves.severity(results)
    assert drawn is not None
    assert drawn.caption.endswith("best: not distinguished. The 7 highest at this severity are colored.")
    again = curves.severity([*results, *(replace(each, repetition=1, value=each.value + 0.001) for each in results)])
    assert again is not None
    assert "best: way=11. " in again.caption
    legend = [text.get_text() for text in drawn.figure.legends[0].texts]
    assert legend == [*(f"way={way}" for way in range(11, 4, -1)), "5 others"]


def test_equal_numbers_give_equal_bytes_in_every_file_format() -> None:
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    first, second = (accuracy.accuracy_bars(synthetic.one_run()) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.file("svg") == second.file("svg")
    svg = first.file("svg").decode()
    assert f"<title>{first.title}</title>" in svg
    assert "fill: #ffffff" in svg  # a white background, readable on a dark page
    for kind in style.KINDS:
        assert first.file(kind).startswith(starts[kind])


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "$\\frac{", "_hidden", "名\x00前\n😀", '#222222 href="#x"', "]]>&amp;"]
)
def test_any_name_can_be_drawn_and_is_escaped(name: str) -> None:
    drawn = curves.over_size(synthetic.study([{"name": name}, {"name": "other"}], 1))
    assert drawn is not None
    svg = drawn.inline_svg("mark")
    assert "<script" not in svg
    assert 'id="mark-' in svg
    assert "xlink:href" not in svg
    assert "<metadata" not in svg
    assert "#222222;" not in svg.partition("</text>")[0]
    assert len(drawn.figure.legends[0].texts) == 2


def exceeds_canvas(drawn: ReportFigure) -> bool:
    """Return whether something is drawn outside of the canvas, where it would be cut."""
    with style.figure_style():
        box, (width, height) = drawn.figure.get_tightbbox(), drawn.figure.get_size_inches()
    return bool(box.x0 < -0.01 or box.y0 < -0.01 or box.x1 > width + 0.01 or box.y1 > height + 0.01)
