"""How training went: the loss and the accuracy of every member, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plateaux.core.formatting import format_range, pluralize
from plateaux.reports import style
from plateaux.reports.style import ReportFigure

Course = Sequence[Mapping[str, Any]]  # lines of one member's log: epoch, train loss, train accuracy, validation ...
THIN = 30  # members of one condition whose own curves are drawn


def training(courses: Mapping[str, Sequence[Course]]) -> ReportFigure | None:
    """Draw loss and accuracy by epoch: members thin, their mean bold; by condition, each with its members' courses."""
    fine = {name: [each for each in map(_usable, several) if each] for name, several in courses.items()}
    fine = {name: several for name, several in fine.items() if several}
    if not fine:
        return None
    with style.figure_style():
        figure, (high, low) = style.new_figure(4.2, 2, 1, sharex=True)
        for position, several in enumerate(fine.values()):
            label = style.legend_label(position, list(fine))
            _curves(high, several, "train loss", position, 1.0, label)
            _curves(low, several, "train accuracy", position, 100.0, None)
            _curves(low, several, "validation accuracy", position, 100.0, None, dashed=True)
        losses = [loss for several in fine.values() for each in several for loss in _column(each, "train loss")[1]]
        if style.needs_log_scale([loss for loss in losses if math.isfinite(loss)]):
            style.logarithmic(high.yaxis)
        high.set_ylabel("training loss")
        low.set(xlabel="epoch", ylabel="accuracy, %")
        low.xaxis.get_major_locator().set_params(integer=True)
        if len(fine) > 1:
            style.legend(figure, high)
        return style.finalize("training", "How training went", _sentence(fine), figure)


def _usable(course: Course) -> list[Mapping[str, Any]]:
    return [line for line in course if isinstance(line.get("epoch"), int) and "train loss" in line]


def _column(course: Course, what: str) -> tuple[list[int], list[float]]:
    there = [line for line in course if isinstance(line.get(what), int | float)]
    return [line["epoch"] for line in there], [float(line[what]) for line in there]


def _curves(
    axes: Any,
    several: Sequence[Course],
    what: str,
    position: int,
    times: float,
    label: str | None,
    *,
    dashed: bool = False,
) -> None:
    options = {**style.line_style(position), "marker": None, **({"linestyle": ":"} if dashed else {})}
    by_epoch: dict[int, list[float]] = {}
    thin = {**options, "linewidth": 0.6, "alpha": 0.35, "zorder": 1}
    for number, course in enumerate(several):
        epochs, heights = _column(course, what)
        for epoch, height in zip(epochs, heights, strict=True):
            by_epoch.setdefault(epoch, []).append(times * height)
        if len(several) > 1 and number < THIN and position < style.SERIES:
            axes.plot(epochs, [times * height for height in heights], **thin)
    if by_epoch:
        mean = [float(np.mean([h for h in by_epoch[e] if math.isfinite(h)] or [math.nan])) for e in sorted(by_epoch)]
        axes.plot(sorted(by_epoch), mean, label=label, **options)


def _sentence(courses: Mapping[str, Sequence[Course]]) -> str:
    members = sum(map(len, courses.values()))
    epochs = max(each[-1]["epoch"] for several in courses.values() for each in several)
    ends = [_column(each, "train loss")[1][-1:] for several in courses.values() for each in several]
    tops = [_column(each, "train accuracy")[1][-1:] for several in courses.values() for each in several]
    words = f"{pluralize(members, 'member')} over {pluralize(epochs, 'epoch')}: the training loss ends at "
    words += format_range([one for end in ends for one in end])
    if accuracies := [one for top in tops for one in top]:
        words += f", the training accuracy at {format_range(accuracies, percent=True)}"
    return f"{words}. Thin lines are members, bold ones their mean; dotted: validation, where there is any."
