"""How flat against how different: the sharpness-diversity plane, with a power law through every family of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plateaux.core.formatting import format_number, pluralize
from plateaux.core.stats.intervals import slope
from plateaux.reports import style
from plateaux.reports.query import (
    DIVERSITY,
    ROWS,
    SHARPNESS,
    bare,
    default_split,
    first_measured,
    headline_row,
    swept_factor,
    without,
)
from plateaux.reports.style import ReportFigure
from plateaux.studies.results import ResultRow

Point = tuple[ResultRow, ResultRow]  # sharpness, diversity
WITH_ERRORS = 40  # points at most that have bars of error


def sharpness_diversity(
    findings: Sequence[ResultRow], *, sharpness: str | None = None, diversity: str | None = None, on: str | None = None
) -> ReportFigure | None:
    """Draw every run at the sharpness of its members and their diversity, and how the one goes with the other."""
    across = first_measured(findings, (sharpness,) if sharpness else SHARPNESS)
    up = first_measured(
        findings, (diversity,) if diversity else DIVERSITY, on or default_split(findings, diversity or "der")
    )
    if across is None or up is None:
        return None
    points = [each for each in _points(findings, across, up) if all(math.isfinite(one.value) for one in each)]
    if not points:
        return None
    factor = swept_factor(findings)
    families: dict[str, list[Point]] = {}
    for each in points:
        families.setdefault(without(each[0], factor), []).append(each)
    with style.figure_style():
        figure, axes = style.new_figure(3.6)
        for position, several in enumerate(families.values()):
            _scatter(
                axes, several, position, style.legend_label(position, list(families)), bars=len(points) <= WITH_ERRORS
            )
            _fit(axes, several, position)
        if style.needs_log_scale([each[0].value for each in points]):
            style.logarithmic(axes.xaxis)
        axes.set_xlabel(f"{bare(across[0])}, mean of members, on {across[1]} samples\n(flatter to the left)")
        axes.set_ylabel(f"{bare(up[0])} on {up[1]} samples")
        if len(families) > 1:
            style.legend(figure, axes)
        return style.finalize(
            "sharpness_diversity", "How flat against how different", _sentence(families, across[0], up[0]), figure
        )


def _points(findings: Sequence[ResultRow], across: tuple[str, str], up: tuple[str, str]) -> list[Point]:
    rows = headline_row(findings, *across, wanted=ROWS), headline_row(findings, *up)
    found: list[dict[tuple[str, Any, int], ResultRow]] = [{}, {}]
    for each in findings:
        for side, (where, row) in enumerate(zip((across, up), rows, strict=True)):
            if (each.metric, each.split) == where and each.row == row:
                found[side][each.run, str(each.condition), each.repetition] = each
    return [(found[0][key], found[1][key]) for key in found[0] if key in found[1]]


def _scatter(axes: Any, several: Sequence[Point], position: int, name: str | None, *, bars: bool) -> None:
    options = {**style.line_style(position), "linestyle": "none"}
    options.setdefault("marker", "o")
    x, y = ([each[side].value for each in several] for side in (0, 1))
    if bars:
        errors = [[each[side].stderr or 0.0 for each in several] for side in (0, 1)]
        axes.errorbar(x, y, xerr=errors[0], yerr=errors[1], label=name, elinewidth=0.7, **options)
    else:
        axes.plot(x, y, label=name, **options)


def _fit(axes: Any, several: Sequence[Point], position: int) -> None:
    """Draw diversity = c sharpness^beta through the points, where there are enough of them."""
    x, y = (np.array([each[side].value for each in several]) for side in (0, 1))
    beta = slope(x, y).value
    if len(several) < 3 or math.isnan(beta) or position >= style.SERIES:
        return
    fine = (x > 0) & (y > 0)
    height = float(np.exp((np.log(y[fine]) - beta * np.log(x[fine])).mean()))
    line = np.geomspace(x[fine].min(), x[fine].max(), 50)
    axes.plot(line, height * line**beta, color=style.line_style(position)["color"], linewidth=1.0, alpha=0.8, zorder=1)


def _sentence(families: Mapping[str, Sequence[Point]], sharpness: str, diversity: str) -> str:
    total = sum(map(len, families.values()))
    first = (
        f"{pluralize(total, 'run')} by the sharpness of the members ({sharpness}) and their diversity ({diversity})."
    )
    fits = []
    for name, several in families.items():
        made = slope([each[0].value for each in several], [each[1].value for each in several])
        if len(several) >= 3 and math.isfinite(made.value):
            around = (
                ""
                if math.isnan(made.half)
                else f" (95 % interval {format_number(made.low)} to {format_number(made.high)})"
            )
            fits.append(f"{format_number(made.value)}{around} for {name}")
    if not fits:
        return f"{first} Too few runs of a kind for a fit."
    more = f", and {len(fits) - 3} more" if len(fits) > 3 else ""
    return f"{first} Lines are diversity = c · sharpness^β; β is {'; '.join(fits[:3])}{more}."
