"""Whether doubt can be trusted: reliability diagrams, and curves of telling strangers from one's own samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plateaux.core.formatting import format_range
from plateaux.core.plot_style import INK
from plateaux.core.row_names import MEAN_PROBABILITY, RowName
from plateaux.core.stats.ranking import auroc
from plateaux.reports import style
from plateaux.reports.query import bare, default_split, is_member, result_label
from plateaux.reports.style import ReportFigure
from plateaux.studies.results import ResultRow

Bins = dict[int, dict[str, float]]  # bin -> share, confidence, accuracy
LEAST = 0.01  # of the samples, for a bin to be drawn
POINTS = 200  # of a curve at most
THIN = {"color": style.GREY, "linewidth": 0.7, "alpha": 0.5, "zorder": 1}


def reliability(findings: Sequence[ResultRow], *, on: str | None = None) -> ReportFigure | None:
    """Draw accuracy against confidence, bin by bin, and how many samples each bin has."""
    mine = [each for each in findings if bare(each.metric) == "reliability"]
    on = on or default_split(mine, mine[0].metric if mine else "")
    tables = _tables([each for each in mine if each.split == on])
    whole = {key: bins for key, bins in tables.items() if key[1] == MEAN_PROBABILITY}
    whole = whole or dict(list(tables.items())[:1])
    if not whole:
        return None
    alone = len({label for label, _ in tables}) == 1
    with style.figure_style():
        figure, (high, low) = style.new_figure(4.4, 2, 1, sharex=True, height_ratios=(3, 1))
        high.plot((0, 100), (0, 100), color=INK, linewidth=0.8, linestyle=":", label="as sure as right")
        if alone:
            _members(high, [bins for (_, row), bins in tables.items() if is_member(row) and (_, row) not in whole])
        names = [row if alone else label for label, row in whole]
        for position, bins in enumerate(whole.values()):
            x, y, share = (_column(_worth(bins), what) for what in ("confidence", "accuracy", "share"))
            high.plot(x, y, label=style.legend_label(position, names), **style.line_style(position))
            low.plot(x, share, **style.line_style(position))
        high.set(ylabel="accuracy, %", xlim=(0, 100), ylim=(0, 102))
        low.set(ylabel="samples, %", xlabel="confidence, %")
        style.legend(figure, high)
        return style.finalize("reliability", "As sure as right?", _sentence(whole, names, on), figure)


def roc(scores: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]]) -> ReportFigure | None:
    """Draw how many strangers each score catches against how many of one's own: set -> score -> inside, outside."""
    curves: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    areas: dict[str, float] = {}
    for outside, by_score in scores.items():
        for score, (own, strange) in by_score.items():
            inner, outer = (np.asarray(each, float)[np.isfinite(each)] for each in (own, strange))
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
            words = style.legend_label(position, list(curves))
            label = f"{words} ({areas[name]:.3f})" if words and position < style.SERIES else words
            axes.plot(*(100 * side for side in curves[name]), label=label, **options)
        axes.set(xlabel="own samples taken for strange, %", ylabel="strange samples caught, %", aspect="equal")
        style.legend(figure, axes)
        best = max(areas, key=lambda name: areas[name])
        sentence = (
            f"Strange samples caught against own samples alarmed about; areas (AUROC, in brackets) go from "
            f"{format_range(list(areas.values()))}, the largest for {best}."
        )
        return style.finalize("roc", "Alarmed by what was never seen", sentence, figure)


def rates(inside: ArrayLike, outside: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the shares of inside and of outside samples that score at least each threshold, thinned.

    >>> [side.tolist() for side in rates([0.0, 1.0], [1.0, 2.0])]
    [[0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0]]
    """
    low, high = (np.sort(np.asarray(each, float)) for each in (inside, outside))
    at = np.unique(np.concatenate([low, high]))[::-1]
    false, true = (1 - np.searchsorted(each, at, "left") / len(each) for each in (low, high))
    keep = np.unique(np.linspace(0, len(at) - 1, POINTS).round().astype(int)) if len(at) > POINTS else slice(None)
    return np.concatenate([[0.0], false[keep]]), np.concatenate([[0.0], true[keep]])


def _tables(mine: Sequence[ResultRow]) -> dict[tuple[str, RowName], Bins]:
    """Return the bins by condition and row; of several repetitions the first."""
    found: dict[tuple[str, RowName], Bins] = {}
    for each in mine:
        row, rest = each.row.base, each.row.part
        if len(rest) == 2 and rest[0].removeprefix("bin ").isdigit() and math.isfinite(each.value):
            bins = found.setdefault((result_label(each), row), {})
            bins.setdefault(int(rest[0].removeprefix("bin ")), {}).setdefault(rest[1], each.value)
    full = {
        key: {at: b for at, b in bins.items() if {"share", "confidence", "accuracy"} <= b.keys()}
        for key, bins in found.items()
    }
    return {key: bins for key, bins in full.items() if bins}


def _members(axes: Any, tables: Sequence[Bins]) -> None:
    for position, bins in enumerate(tables):
        label = "members" if position == 0 else None
        axes.plot(*(_column(_worth(bins), what) for what in ("confidence", "accuracy")), label=label, **THIN)


def _worth(bins: Bins) -> Bins:
    """Return the bins that hold enough samples to be drawn: of a handful of samples any share may come out."""
    return {at: each for at, each in bins.items() if each["share"] >= LEAST} or bins


def _column(bins: Bins, what: str) -> list[float]:
    return [100 * bins[at][what] for at in sorted(bins)]


def _sentence(whole: Mapping[tuple[str, RowName], Bins], names: Sequence[str], on: str) -> str:
    gaps = {
        name: sum(b["share"] * (b["confidence"] - b["accuracy"]) for b in bins.values())
        for name, bins in zip(names, whole.values(), strict=True)
    }
    worst = max(gaps, key=lambda name: abs(gaps[name]))
    how = "too sure" if gaps[worst] > 0 else "not sure enough"
    words = f"On {on} samples {worst} is {how} by {100 * abs(gaps[worst]):.1f} points on average"
    words += f", the furthest of {len(gaps)}" if len(gaps) > 1 else ""
    return (
        f"{words}. Above the dotted line answers are right more often than they claim; bins with less than "
        f"{LEAST:.0%} of the samples are left out."
    )
