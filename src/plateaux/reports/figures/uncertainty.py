"""Reliability diagrams, and ROC curves of out-of-distribution detection."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plateaux.core.formatting import format_range
from plateaux.core.row_names import MEAN_PROBABILITY, RowName
from plateaux.core.stats.ranking import auroc
from plateaux.loss_landscape.plot_style import INK
from plateaux.reports import style
from plateaux.reports.query import base_name, default_split, is_member, result_label
from plateaux.reports.style import ReportFigure
from plateaux.studies.result_rows import ResultRow

Bins = dict[int, dict[str, float]]  # bin -> share of samples, confidence, accuracy
MIN_FRACTION = 0.01  # smaller bins are not drawn
MAX_POINTS = 200  # per curve
THIN_STYLE = {"color": style.GRAY, "linewidth": 0.7, "alpha": 0.5, "zorder": 1}


def reliability(results: Sequence[ResultRow], *, split: str | None = None) -> ReportFigure | None:
    """Draw a reliability diagram: accuracy against confidence by bin, and the fraction of samples in each bin."""
    reliability_results = [result for result in results if base_name(result.metric) == "reliability"]
    split = split or default_split(reliability_results, reliability_results[0].metric if reliability_results else "")
    tables = _tables([result for result in reliability_results if result.split == split])
    main = {key: bins for key, bins in tables.items() if key[1] == MEAN_PROBABILITY}
    main = main or dict(list(tables.items())[:1])
    if not main:
        return None
    is_single = len({label for label, _ in tables}) == 1
    with style.figure_style():
        figure, (high, low) = style.new_figure(4.4, 2, 1, sharex=True, height_ratios=(3, 1))
        high.plot((0, 100), (0, 100), color=INK, linewidth=0.8, linestyle=":", label="perfect calibration")
        if is_single:
            _members(high, [bins for (_, row), bins in tables.items() if is_member(row) and (_, row) not in main])
        names = [row if is_single else label for label, row in main]
        for position, bins in enumerate(main.values()):
            x, y, share = (_column(_large_bins(bins), column) for column in ("confidence", "accuracy", "share"))
            high.plot(x, y, label=style.legend_label(position, names), **style.line_style(position))
            low.plot(x, share, **style.line_style(position))
        high.set(ylabel="accuracy, %", xlim=(0, 100), ylim=(0, 102))
        low.set(ylabel="samples, %", xlabel="confidence, %")
        style.legend(figure, high)
        return style.finalize("reliability", "Reliability diagram", _caption(main, names, split), figure)


def roc(scores: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]]) -> ReportFigure | None:
    """Draw ROC curves of OOD scores, given as split -> score -> (in-distribution, out-of-distribution)."""
    curves: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    areas: dict[str, float] = {}
    for outside, by_score in scores.items():
        for score, (inside_scores, outside_scores) in by_score.items():
            inner, outer = (np.asarray(x, float)[np.isfinite(x)] for x in (inside_scores, outside_scores))
            if len(inner) and len(outer):
                name = f"{outside}, {score}"
                curves[name], areas[name] = rates(inner, outer), auroc(inner, outer).value
    if not curves:
        return None
    with style.figure_style():
        figure, axes = style.new_figure(4.2)
        axes.plot((0, 100), (0, 100), color=INK, linewidth=0.8, linestyle=":")
        for position, name in enumerate(curves):
            options = {**style.line_style(position), "marker": None}
            text = style.legend_label(position, list(curves))
            label = f"{text} ({areas[name]:.3f})" if text and position < style.MAX_COLORED else text
            axes.plot(*(100 * side for side in curves[name]), label=label, **options)
        axes.set(xlabel="false-positive rate, %", ylabel="true-positive rate, %", aspect="equal")
        style.legend(figure, axes)
        caption = (
            f"ROC curves of out-of-distribution detection; AUROC (in parentheses) is "
            f"{format_range(list(areas.values()))}."
        )
        return style.finalize("roc", "Out-of-distribution detection", caption, figure)


def rates(inside: ArrayLike, outside: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the fractions of inside and outside samples with a score of at least each threshold, subsampled.

    >>> [side.tolist() for side in rates([0.0, 1.0], [1.0, 2.0])]
    [[0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0]]
    """
    low, high = (np.sort(np.asarray(each, float)) for each in (inside, outside))
    at = np.unique(np.concatenate([low, high]))[::-1]
    false, true = (1 - np.searchsorted(each, at, "left") / len(each) for each in (low, high))
    keep = (
        np.unique(np.linspace(0, len(at) - 1, MAX_POINTS).round().astype(int)) if len(at) > MAX_POINTS else slice(None)
    )
    return np.concatenate([[0.0], false[keep]]), np.concatenate([[0.0], true[keep]])


def _tables(reliability_results: Sequence[ResultRow]) -> dict[tuple[str, RowName], Bins]:
    """Return the bins by condition and row, for the first repetition."""
    by_row: dict[tuple[str, RowName], Bins] = {}
    for result in reliability_results:
        row, rest = result.row.base, result.row.part
        if len(rest) == 2 and rest[0].removeprefix("bin ").isdigit() and math.isfinite(result.value):
            bins = by_row.setdefault((result_label(result), row), {})
            bins.setdefault(int(rest[0].removeprefix("bin ")), {}).setdefault(rest[1], result.value)
    full = {
        key: {at: b for at, b in bins.items() if {"share", "confidence", "accuracy"} <= b.keys()}
        for key, bins in by_row.items()
    }
    return {key: bins for key, bins in full.items() if bins}


def _members(axes: Any, tables: Sequence[Bins]) -> None:
    for position, bins in enumerate(tables):
        label = "members" if position == 0 else None
        axes.plot(
            *(_column(_large_bins(bins), column) for column in ("confidence", "accuracy")), label=label, **THIN_STYLE
        )


def _large_bins(bins: Bins) -> Bins:
    """Return the bins with enough samples for a reliable accuracy."""
    return {at: each for at, each in bins.items() if each["share"] >= MIN_FRACTION} or bins


def _column(bins: Bins, column: str) -> list[float]:
    return [100 * bins[at][column] for at in sorted(bins)]


def _caption(main: Mapping[tuple[str, RowName], Bins], names: Sequence[str], split: str) -> str:
    gaps = {
        name: sum(b["share"] * (b["confidence"] - b["accuracy"]) for b in bins.values())
        for name, bins in zip(names, main.values(), strict=True)
    }
    worst = max(gaps, key=lambda name: abs(gaps[name]))
    direction = "overconfident" if gaps[worst] > 0 else "underconfident"
    text = f"On {split} samples {worst} is {direction} by {100 * abs(gaps[worst]):.1f} points on average"
    text += f", the largest gap of {len(gaps)}" if len(gaps) > 1 else ""
    return (
        f"{text}. Above the dotted line accuracy exceeds confidence; bins with less than "
        f"{MIN_FRACTION:.0%} of the samples are not drawn."
    )
