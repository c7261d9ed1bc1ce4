"""Diversity against sharpness, with a power-law fit for each family of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plateaux.core.formatting import format_number, pluralize
from plateaux.core.stats.comparisons import DEFAULT, Inference
from plateaux.core.stats.intervals import Interval, slope
from plateaux.reports import style
from plateaux.reports.query import (
    DIVERSITY,
    ROWS,
    SHARPNESS,
    base_name,
    default_split,
    first_measured,
    headline_row,
    label_without,
    mean_over_repetitions,
    swept_factor,
)
from plateaux.reports.style import ReportFigure
from plateaux.studies.result_rows import ResultRow

Point = tuple[ResultRow, ResultRow]  # sharpness, diversity
MAX_ERROR_BARS = 40  # more points are drawn without error bars


def sharpness_diversity(
    results: Sequence[ResultRow],
    *,
    sharpness: str | None = None,
    diversity: str | None = None,
    split: str | None = None,
    inference: Inference = DEFAULT,
) -> ReportFigure | None:
    """Draw the diversity of every run against the sharpness of its members, with fits."""
    x_metric = first_measured(results, (sharpness,) if sharpness else SHARPNESS)
    y_metric = first_measured(
        results, (diversity,) if diversity else DIVERSITY, split or default_split(results, diversity or "der")
    )
    if x_metric is None or y_metric is None:
        return None
    points = [point for point in _points(results, x_metric, y_metric) if all(math.isfinite(one.value) for one in point)]
    if not points:
        return None
    factor = swept_factor(results)
    families: dict[str, list[Point]] = {}
    for point in points:
        families.setdefault(label_without(point[0], factor), []).append(point)
    fits = {name: fit for name, several in families.items() if (fit := _fit(several, factor)) is not None}
    with style.figure_style():
        figure, axes = style.new_figure(3.6)
        for position, points_of_family in enumerate(families.values()):
            _scatter(
                axes,
                points_of_family,
                position,
                style.legend_label(position, list(families)),
                inference if len(points) <= MAX_ERROR_BARS else None,
            )
        for position, name in enumerate(list(families)[: style.MAX_COLORED]):
            if name in fits:
                _draw_fit(axes, families[name], position, fits[name].value)
        if style.needs_log_scale([point[0].value for point in points]):
            style.set_log_scale(axes.xaxis)
        axes.set_xlabel(f"{base_name(x_metric[0])}, mean of members, on {x_metric[1]} samples\n(flatter to the left)")
        axes.set_ylabel(f"{base_name(y_metric[0])} on {y_metric[1]} samples")
        if len(families) > 1:
            style.legend(figure, axes)
        caption = _caption(len(points), fits, factor, (x_metric[0], y_metric[0]))
        return style.finalize("sharpness_diversity", "Diversity against sharpness", caption, figure)


def _points(results: Sequence[ResultRow], x_metric: tuple[str, str], y_metric: tuple[str, str]) -> list[Point]:
    rows = headline_row(results, *x_metric, wanted=ROWS), headline_row(results, *y_metric)
    by_axis: list[dict[tuple[str, Any, int], ResultRow]] = [{}, {}]
    for result in results:
        for side, (where, row) in enumerate(zip((x_metric, y_metric), rows, strict=True)):
            if (result.metric, result.split) == where and result.row == row:
                by_axis[side][result.run, str(result.condition), result.repetition] = result
    return [(by_axis[0][key], by_axis[1][key]) for key in by_axis[0] if key in by_axis[1]]


def _scatter(
    axes: Any, points_of_family: Sequence[Point], position: int, name: str | None, inference: Inference | None
) -> None:
    options = {**style.line_style(position), "linestyle": "none"}
    options.setdefault("marker", "o")
    x, y = ([point[side].value for point in points_of_family] for side in (0, 1))
    if inference is not None:
        means = [[mean_over_repetitions([point[side]]) for point in points_of_family] for side in (0, 1)]
        errors = [np.nan_to_num([inference.error(mean) for mean in several]) for several in means]
        axes.errorbar(x, y, xerr=errors[0], yerr=errors[1], label=name, elinewidth=0.7, **options)
    else:
        axes.plot(x, y, label=name, **options)


def _fit(points_of_family: Sequence[Point], factor: str | None) -> Interval | None:
    """Return the exponent of diversity = c sharpness^beta, if a factor varies over at least three points."""
    varies = factor is not None and len({point[0].condition.get(factor) for point in points_of_family}) > 1
    fit = slope(*([point[side].value for point in points_of_family] for side in (0, 1)))
    return fit if varies and len(points_of_family) > 2 and math.isfinite(fit.value) else None


def _draw_fit(axes: Any, points_of_family: Sequence[Point], position: int, beta: float) -> None:
    x, y = (np.array([point[side].value for point in points_of_family]) for side in (0, 1))
    fine = (x > 0) & (y > 0)
    height = float(np.exp((np.log(y[fine]) - beta * np.log(x[fine])).mean()))
    line = np.geomspace(x[fine].min(), x[fine].max(), 50)
    axes.plot(line, height * line**beta, color=style.line_style(position)["color"], linewidth=1.0, alpha=0.8, zorder=1)


def _caption(count: int, fits: Mapping[str, Interval], factor: str | None, metrics: tuple[str, str]) -> str:
    first = f"{pluralize(count, 'run')} by sharpness of their members ({metrics[0]}) and by diversity ({metrics[1]})."
    if not fits:
        return f"{first} There is no fit: no numeric factor has three values, or there are too few runs per family."
    texts = []
    for name, fit in list(fits.items())[:3]:
        ends = f" (95 % interval {format_number(fit.low)} to {format_number(fit.high)})" if fit.half >= 0 else ""
        texts.append(f"{format_number(fit.value)}{ends} for {name}")
    more = f", and {len(fits) - 3} more" if len(fits) > 3 else ""
    return f"{first} The lines are fits of diversity = c · sharpness^β over {factor}; β is {'; '.join(texts)}{more}."
