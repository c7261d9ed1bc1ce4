"""Training curves: loss and accuracy of every member by epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plateaux.core.formatting import format_range, pluralize
from plateaux.reports import style
from plateaux.reports.style import ReportFigure

TrainingLog = Sequence[Mapping[str, Any]]  # lines of one member: epoch, train loss, train accuracy, validation ...
MAX_THIN_LINES = 30  # member curves per condition


def training(logs: Mapping[str, Sequence[TrainingLog]]) -> ReportFigure | None:
    """Draw loss and accuracy by epoch, with thin lines for members and bold lines for their mean per condition."""
    usable = {name: [log for log in map(_usable, logs_of_condition) if log] for name, logs_of_condition in logs.items()}
    usable = {name: logs_of_condition for name, logs_of_condition in usable.items() if logs_of_condition}
    if not usable:
        return None
    with style.figure_style():
        figure, (high, low) = style.new_figure(4.2, 2, 1, sharex=True)
        for position, logs_of_condition in enumerate(usable.values()):
            label = style.legend_label(position, list(usable))
            _curves(high, logs_of_condition, "train loss", position, 1.0, label)
            _curves(low, logs_of_condition, "train accuracy", position, 100.0, None)
            _curves(low, logs_of_condition, "validation accuracy", position, 100.0, None, dashed=True)
        losses = [
            loss
            for logs_of_condition in usable.values()
            for log in logs_of_condition
            for loss in _column(log, "train loss")[1]
        ]
        if style.needs_log_scale([loss for loss in losses if math.isfinite(loss)]):
            style.set_log_scale(high.yaxis)
        high.set_ylabel("training loss")
        low.set(xlabel="epoch", ylabel="accuracy, %")
        low.xaxis.get_major_locator().set_params(integer=True)
        if len(usable) > 1:
            style.legend(figure, high)
        return style.finalize("training", "Training curves", _caption(usable), figure)


def _usable(log: TrainingLog) -> list[Mapping[str, Any]]:
    return [line for line in log if isinstance(line.get("epoch"), int) and "train loss" in line]


def _column(log: TrainingLog, column: str) -> tuple[list[int], list[float]]:
    lines = [line for line in log if isinstance(line.get(column), int | float)]
    return [line["epoch"] for line in lines], [float(line[column]) for line in lines]


def _curves(
    axes: Any,
    logs_of_condition: Sequence[TrainingLog],
    column: str,
    position: int,
    scale: float,
    label: str | None,
    *,
    dashed: bool = False,
) -> None:
    options = {**style.line_style(position), "marker": None, **({"linestyle": ":"} if dashed else {})}
    by_epoch: dict[int, list[float]] = {}
    thin_style = {**options, "linewidth": 0.6, "alpha": 0.35, "zorder": 1}
    for number, log in enumerate(logs_of_condition):
        epochs, heights = _column(log, column)
        for epoch, height in zip(epochs, heights, strict=True):
            by_epoch.setdefault(epoch, []).append(scale * height)
        if len(logs_of_condition) > 1 and number < MAX_THIN_LINES and position < style.MAX_COLORED:
            axes.plot(epochs, [scale * height for height in heights], **thin_style)
    if by_epoch:
        mean = [float(np.mean([h for h in by_epoch[e] if math.isfinite(h)] or [math.nan])) for e in sorted(by_epoch)]
        axes.plot(sorted(by_epoch), mean, label=label, **options)


def _caption(logs: Mapping[str, Sequence[TrainingLog]]) -> str:
    members = sum(map(len, logs.values()))
    epochs = max(log[-1]["epoch"] for logs_of_condition in logs.values() for log in logs_of_condition)
    ends = [_column(log, "train loss")[1][-1:] for logs_of_condition in logs.values() for log in logs_of_condition]
    tops = [_column(log, "train accuracy")[1][-1:] for logs_of_condition in logs.values() for log in logs_of_condition]
    text = f"{pluralize(members, 'member')} over {pluralize(epochs, 'epoch')}: the training loss ends at "
    text += format_range([one for end in ends for one in end])
    if accuracies := [one for top in tops for one in top]:
        text += f", the training accuracy at {format_range(accuracies, percent=True)}"
    return f"{text}. Thin lines are members, bold lines their mean; dotted lines are validation."
