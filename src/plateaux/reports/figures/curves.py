"""Curves: over the size of the ensemble, over severities of corruption, over a factor of a study."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from plateaux.core.formatting import format_number, format_range
from plateaux.core.row_names import MEAN_OF_MEMBERS
from plateaux.core.types import Estimate
from plateaux.reports import style
from plateaux.reports.query import (
    ROWS,
    bare,
    default_split,
    headline_row,
    is_number,
    over,
    result_label,
    swept_factor,
    without,
)
from plateaux.reports.style import ReportFigure
from plateaux.studies.comparison import MAIN
from plateaux.studies.results import ResultRow

Curve = Mapping[float, Sequence[ResultRow]]  # by what goes along the axis: the repetitions there
CORRUPTED = "accuracy under corruption"


def over_size(
    findings: Sequence[ResultRow], *, measure: str = "accuracy", on: str | None = None
) -> ReportFigure | None:
    """Draw a measure over the size of the ensemble."""
    on = on or default_split(findings, f"{measure} by size")
    found: dict[str, dict[float, list[ResultRow]]] = {}
    for each in findings:
        size = re.fullmatch(r"(\d+) members?", each.row)
        if size and each.metric == f"{measure} by size" and each.split == on:
            found.setdefault(result_label(each), {}).setdefault(float(size[1]), []).append(each)
    curves = _usable(found)
    if not curves:
        return None
    ends = {name: (_at(curve, min(curve)), _at(curve, max(curve))) for name, curve in curves.items()}
    percent, sizes = _percent(curves), [size for curve in curves.values() for size in curve]
    first, last = ([pair[side].value for pair in ends.values()] for side in (0, 1))
    sentence = (
        f"On {on} samples {measure} goes from {format_range(first, percent)} with {min(sizes):.0f} to "
        f"{format_range(last, percent)} with {max(sizes):.0f} members; means over ensembles of each size."
    )
    names = ("members", f"{measure} on {on} samples")
    return _drawn(f"over_size_{bare(measure)}", f"More members: {measure}", sentence, curves, names, whole=True)


def severity(findings: Sequence[ResultRow]) -> ReportFigure | None:
    """Draw accuracy over the severity of corruptions, clean samples at 0."""
    rows = [MEAN_OF_MEMBERS, *MAIN] if len({result_label(each) for each in findings}) == 1 else list(MAIN)
    there = {each.row.base for each in findings if each.metric == CORRUPTED}
    main = (
        [row for row in rows if row in there][:2] if rows[0] == MEAN_OF_MEMBERS else [r for r in rows if r in there][:1]
    )
    found: dict[str, dict[float, list[ResultRow]]] = {}
    for each in findings:
        for row in main:
            level = _severity(each, row)
            if level is not None:
                name = row if len(main) > 1 else result_label(each)
                found.setdefault(name, {}).setdefault(level, []).append(each)
    curves = {name: curve for name, curve in _usable(found).items() if max(curve) > 0}
    if not curves:
        return None
    worst = max(level for curve in curves.values() for level in curve)
    mild = min(level for curve in curves.values() for level in curve)
    ends = {name: _at(curve, worst).value for name, curve in curves.items() if worst in curve}
    begins = [_at(curve, mild).value for curve in curves.values() if mild in curve]
    best = max(ends, key=lambda name: -math.inf if math.isnan(ends[name]) else ends[name])
    sentence = (
        f"Accuracy falls from {format_range(begins, True)} at severity {mild:.0f}{' (clean)' * (mild == 0)} to "
        f"{format_range(list(ends.values()), True)} at severity {worst:.0f}, mean over the corruptions"
        + (f"; best there: {best}." if len(ends) > 1 else ".")
    )
    if len(curves) > style.SERIES:  # whom the sentence names must be seen
        known = {name: end for name, end in ends.items() if not math.isnan(end)}
        curves = dict(sorted(curves.items(), key=lambda item: -known.get(item[0], -math.inf)))
        sentence += f" The {style.SERIES} best there are in colour."
    names = ("severity of corruption", "accuracy, mean over corruptions")
    return _drawn("severity", "Under corruption", sentence, curves, names, whole=True)


def against(
    findings: Sequence[ResultRow],
    *,
    measure: str,
    factor: str | None = None,
    on: str | None = None,
    row: str | None = None,
) -> ReportFigure | None:
    """Draw a measure against a factor of a study that is a number, such as lambda or rho."""
    factor = factor or swept_factor(findings)
    on = on or default_split(findings, measure)
    row = row or headline_row(findings, measure, on, wanted=(*MAIN, *ROWS))
    found: dict[str, dict[float, list[ResultRow]]] = {}
    for each in findings:
        if (each.metric, each.split, each.row) == (measure, on, row) and is_number(each.condition.get(factor or "")):
            at = float(each.condition[factor or ""])
            found.setdefault(without(each, factor), {}).setdefault(at, []).append(each)
    curves = _usable(found)
    if factor is None or not any(len(curve) > 1 for curve in curves.values()):
        return None
    tops = {(name, at): _at(curve, at).value for name, curve in curves.items() for at in curve}
    low, high = (pick(tops, key=lambda key: tops[key]) for pick in (min, max))
    percent = _percent(curves)
    sentence = (
        f"{measure} ({row}, {on} samples) against {factor}: lowest {format_number(tops[low], percent)} at "
        f"{factor}={low[1]:g} ({low[0]}), highest {format_number(tops[high], percent)} at {factor}={high[1]:g} "
        f"({high[0]})."
    )
    title = f"{bare(measure)} against {factor}"
    return _drawn(f"against_{bare(measure)}", title, sentence, curves, (factor, f"{bare(measure)} on {on}"))


def _severity(each: ResultRow, row: str) -> float | None:
    """Return the severity that a finding is about, of clean samples 0; None, if it is about none."""
    if each.metric == "accuracy" and each.split == "test" and each.row == row:
        return 0.0
    if each.metric == CORRUPTED and each.row.base == row and each.row.part[:1] != ():
        level = each.row.part[0].removeprefix("severity ")
        return float(level) if level.isdigit() else None
    return None


def _usable(found: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the curves without what is no number."""
    fine = {
        name: {at: curve[at] for at in sorted(curve) if math.isfinite(_at(curve, at).value)}
        for name, curve in found.items()
    }
    return {name: curve for name, curve in fine.items() if curve}


def _at(curve: Curve, at: float) -> Estimate:
    return over(curve[at])


def _percent(curves: Mapping[str, Curve]) -> bool:
    return any(each.percent for curve in curves.values() for several in curve.values() for each in several)


def _drawn(
    name: str, title: str, sentence: str, curves: Mapping[str, Curve], labels: tuple[str, str], *, whole: bool = False
) -> ReportFigure:
    percent = _percent(curves)
    with style.figure_style():
        figure, axes = style.new_figure(3.2)
        for position, curve in enumerate(curves.values()):
            _line(axes, curve, position, style.legend_label(position, list(curves)), 100.0 if percent else 1.0)
        if whole:
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel(style.wrap_label(labels[0], 60))
        axes.set_ylabel(style.wrap_label(labels[1], 44) + (", %" if percent else ""))
        if len(curves) > 1:
            style.legend(figure, axes)
        return style.finalize(name, title, sentence, figure)


def _line(axes: Any, curve: Curve, position: int, name: str | None, times: float) -> None:
    values = [_at(curve, at) for at in curve]
    heights = [times * value.value for value in values]
    if position >= style.SERIES:
        axes.plot(list(curve), heights, label=name, **style.line_style(position))
        return
    errors = [times * (value.stderr or 0.0) for value in values]
    axes.errorbar(
        list(curve), heights, yerr=errors, label=name, elinewidth=0.8, capsize=2, **style.line_style(position)
    )
