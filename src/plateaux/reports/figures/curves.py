"""Curves over the ensemble size, the severity of corruptions, or a factor of a study."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plateaux.core.formatting import format_number, format_range
from plateaux.core.row_names import MEAN_OF_MEMBERS
from plateaux.core.stats.comparisons import DEFAULT, Inference
from plateaux.core.stats.intervals import Interval
from plateaux.reports import style
from plateaux.reports.query import (
    CORRUPTED,
    ROWS,
    base_name,
    default_split,
    find_best,
    headline_row,
    is_number,
    label_without,
    mean_over_repetitions,
    result_label,
    swept_factor,
)
from plateaux.reports.style import ReportFigure
from plateaux.studies.comparison import MAIN
from plateaux.studies.result_rows import ResultRow

Curve = Mapping[float, Sequence[ResultRow]]  # repetitions by x value


def over_size(
    results: Sequence[ResultRow],
    *,
    metric: str = "accuracy",
    split: str | None = None,
    inference: Inference = DEFAULT,
) -> ReportFigure | None:
    """Draw a metric against the size of the ensemble."""
    split = split or default_split(results, f"{metric} by size")
    points: dict[str, dict[float, list[ResultRow]]] = {}
    for result in results:
        size = re.fullmatch(r"(\d+) members?", result.row)
        if size and result.metric == f"{metric} by size" and result.split == split:
            points.setdefault(result_label(result), {}).setdefault(float(size[1]), []).append(result)
    curves = _finite(points)
    if not curves:
        return None
    ends = {name: (_at(curve, min(curve)), _at(curve, max(curve))) for name, curve in curves.items()}
    percent, sizes = _percent(curves), [size for curve in curves.values() for size in curve]
    first, last = ([pair[side].value for pair in ends.values()] for side in (0, 1))
    caption = (
        f"{metric} on {split} samples: {format_range(first, percent)} with {min(sizes):.0f} and "
        f"{format_range(last, percent)} with {max(sizes):.0f} members; means over ensembles of each size."
    )
    names = ("members", f"{metric} on {split} samples")
    titles = (f"over_size_{base_name(metric)}", f"{metric} by ensemble size")
    return _draw(*titles, caption, curves, names, inference, integer_ticks=True)


def severity(results: Sequence[ResultRow], *, inference: Inference = DEFAULT) -> ReportFigure | None:
    """Draw accuracy against the severity of corruptions; severity 0 is clean samples."""
    rows = [MEAN_OF_MEMBERS, *MAIN] if len({result_label(result) for result in results}) == 1 else list(MAIN)
    available = {result.row.base for result in results if result.metric == CORRUPTED}
    max_rows = 2 if rows[0] == MEAN_OF_MEMBERS else 1
    rows_drawn = [row for row in rows if row in available][:max_rows]
    points: dict[str, dict[float, list[ResultRow]]] = {}
    for result in results:
        for row in rows_drawn:
            level = _severity(result, row)
            if level is not None:
                name = row if len(rows_drawn) > 1 else result_label(result)
                points.setdefault(name, {}).setdefault(level, []).append(result)
    curves = {name: curve for name, curve in _finite(points).items() if max(curve) > 0}
    if not curves:
        return None
    worst = max(level for curve in curves.values() for level in curve)
    mildest = min(level for curve in curves.values() for level in curve)
    ends = {name: _at(curve, worst).value for name, curve in curves.items() if worst in curve}
    starts = [_at(curve, mildest).value for curve in curves.values() if mildest in curve]
    last = {name: curve[worst] for name, curve in curves.items() if worst in curve}
    best = find_best(last, higher_is_better=True, inference=inference)
    caption = (
        f"Accuracy falls from {format_range(starts, True)} at severity {mildest:.0f}{' (clean)' * (mildest == 0)} to "
        f"{format_range(list(ends.values()), True)} at severity {worst:.0f}, mean over the corruptions"
        + (f"; best: {best or 'not distinguished'}." if len(ends) > 1 else ".")
    )
    if len(curves) > style.MAX_COLORED:  # the curve that the caption names must have a color
        known = {name: end for name, end in ends.items() if not math.isnan(end)}
        curves = dict(sorted(curves.items(), key=lambda item: -known.get(item[0], -math.inf)))
        caption += f" The {style.MAX_COLORED} highest at this severity are colored."
    names = ("severity of corruption", "accuracy, mean over corruptions")
    return _draw("severity", "Accuracy under corruption", caption, curves, names, inference, integer_ticks=True)


def against(
    results: Sequence[ResultRow],
    *,
    metric: str,
    factor: str | None = None,
    split: str | None = None,
    row: str | None = None,
    inference: Inference = DEFAULT,
) -> ReportFigure | None:
    """Draw a metric against a numeric factor of a study, such as lambda or rho."""
    factor = factor or swept_factor(results)
    split = split or default_split(results, metric)
    row = row or headline_row(results, metric, split, wanted=(*MAIN, *ROWS))
    points: dict[str, dict[float, list[ResultRow]]] = {}
    for result in results:
        if (result.metric, result.split, result.row) == (metric, split, row) and is_number(
            result.condition.get(factor or "")
        ):
            at = float(result.condition[factor or ""])
            points.setdefault(label_without(result, factor), {}).setdefault(at, []).append(result)
    curves = _finite(points)
    if factor is None or not any(len(curve) > 1 for curve in curves.values()):
        return None
    values_at = {(name, at): _at(curve, at).value for name, curve in curves.items() for at in curve}
    low, high = (pick(values_at, key=lambda key: values_at[key]) for pick in (min, max))
    percent = _percent(curves)
    caption = (
        f"{metric} ({row}, {split} samples) against {factor}: from {format_number(values_at[low], percent)} at "
        f"{factor}={low[1]:g} ({low[0]}) to {format_number(values_at[high], percent)} at {factor}={high[1]:g} "
        f"({high[0]})."
    )
    title = f"{base_name(metric)} against {factor}"
    names = (factor, f"{base_name(metric)} on {split}")
    return _draw(f"against_{base_name(metric)}", title, caption, curves, names, inference)


def _severity(result: ResultRow, row: str) -> float | None:
    """Return the severity of a result, 0 for clean samples, or None if it has none."""
    if result.metric == "accuracy" and result.split == "test" and result.row == row:
        return 0.0
    if result.metric == CORRUPTED and result.row.base == row and result.row.part:
        level = result.row.part[0].removeprefix("severity ")
        return float(level) if level.isdigit() else None
    return None


def _finite(points: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the curves without NaN and infinite values."""
    finite = {
        name: {at: curve[at] for at in sorted(curve) if math.isfinite(_at(curve, at).value)}
        for name, curve in points.items()
    }
    return {name: curve for name, curve in finite.items() if curve}


def _at(curve: Curve, at: float) -> Interval:
    return mean_over_repetitions(curve[at])


def _percent(curves: Mapping[str, Curve]) -> bool:
    return any(result.percent for curve in curves.values() for several in curve.values() for result in several)


def _draw(
    name: str,
    title: str,
    caption: str,
    curves: Mapping[str, Curve],
    labels: tuple[str, str],
    inference: Inference,
    *,
    integer_ticks: bool = False,
) -> ReportFigure:
    percent = _percent(curves)
    with style.figure_style():
        figure, axes = style.new_figure(3.2)
        for position, curve in enumerate(curves.values()):
            label = style.legend_label(position, list(curves))
            _line(axes, curve, position, label, 100.0 if percent else 1.0, inference)
        if integer_ticks:
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel(style.wrap_label(labels[0], 60))
        axes.set_ylabel(style.wrap_label(labels[1], 44) + (", %" if percent else ""))
        if len(curves) > 1:
            style.legend(figure, axes)
        return style.finalize(name, title, caption, figure)


def _line(axes: Any, curve: Curve, position: int, name: str | None, scale: float, inference: Inference) -> None:
    values = [_at(curve, at) for at in curve]
    heights = [scale * value.value for value in values]
    if position >= style.MAX_COLORED:
        axes.plot(list(curve), heights, label=name, **style.line_style(position))
        return
    errors = [scale * np.nan_to_num(inference.error(value)) for value in values]
    axes.errorbar(
        list(curve), heights, yerr=errors, label=name, elinewidth=0.8, capsize=2, **style.line_style(position)
    )
