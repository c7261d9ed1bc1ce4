"""Bars of member accuracy with the gain of the ensemble."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plateaux.core.formatting import format_number, format_percentage_points, format_range, pluralize
from plateaux.core.row_names import MEAN_PROBABILITY
from plateaux.core.stats.comparisons import DEFAULT, Inference
from plateaux.core.stats.intervals import t_interval
from plateaux.loss_landscape.plot_style import COLORS, INK
from plateaux.reports import style
from plateaux.reports.query import CORRUPTED, default_split, find_best, is_member, mean_over_repetitions, result_label
from plateaux.reports.style import ReportFigure
from plateaux.studies.comparison import SUMMED
from plateaux.studies.result_rows import ResultRow

MAX_BARS = 20  # conditions with a bar
MAX_DOTS = 200  # dots per bar


@dataclass(frozen=True, slots=True)
class Bar:
    """The accuracy of the members of one condition and of their ensemble."""

    members: Sequence[float]
    mean: float
    ensemble: float
    error: float
    repetitions: Sequence[ResultRow]  # of the ensemble

    @property
    def gain(self) -> float:
        return self.ensemble - self.mean


def accuracy_bars(
    results: Sequence[ResultRow], *, split: str | None = None, inference: Inference = DEFAULT
) -> ReportFigure | None:
    """Draw the mean accuracy of members as bars, with the gain of the ensemble on top and members as dots.

    The split "corrupted" means the mean over all corruptions and severities.
    """
    split = split or default_split(results)
    bars = {name: bar for name, bar in _bars(results, split, inference).items() if math.isfinite(bar.mean)}
    if not bars:
        return None
    names = sorted(bars, key=lambda name: -_height(bars[name]))[:MAX_BARS] if len(bars) > MAX_BARS else list(bars)
    with style.figure_style():
        labels = [style.wrap_label(name) for name in names]
        more = sum(label.count("\n") for label in labels)
        figure, axes = style.new_figure(0.9 + 0.34 * max(len(names), 2) + 0.12 * more)
        for position, name in enumerate(names):
            _draw(axes, bars[name], position)
        start = _axis_start([bars[name] for name in names])
        end = max(_axis_end(bars[name]) for name in names)
        axes.set_xlim(start, end + 0.14 * max(end - start, 1.0))
        axes.set_yticks(range(len(names)), labels)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(False, axis="y")
        axes.set_xlabel(f"accuracy on {split} samples, %")
        style.legend(figure, axes)
        caption = _caption(bars, split, inference) + _omission_note(len(bars)) + f" The axis starts at {start:g} %."
        return style.finalize("accuracy_bars", "Accuracy of members and gain of the ensemble", caption, figure)


def _bars(results: Sequence[ResultRow], split: str, inference: Inference) -> dict[str, Bar]:
    members: dict[str, list[float]] = {}
    ensembles: dict[str, list[ResultRow]] = {}
    metric, part = (CORRUPTED, SUMMED) if split == "corrupted" else ("accuracy", "")
    for result in results:
        if result.metric == metric and result.split == split and ".".join(result.row.part) == part:
            if is_member(result.row.base) and math.isfinite(result.value):
                members.setdefault(result_label(result), []).append(result.value)
            elif result.row.base == MEAN_PROBABILITY:
                ensembles.setdefault(result_label(result), []).append(result)
    bars = {}
    for name, values in members.items():
        mean = mean_over_repetitions(ensembles[name]) if name in ensembles else t_interval([])
        error = inference.error(mean)
        known = error if math.isfinite(error) else 0.0
        bars[name] = Bar(values, sum(values) / len(values), mean.value, known, ensembles.get(name, ()))
    return bars


def _height(bar: Bar) -> float:
    return bar.ensemble if math.isfinite(bar.ensemble) else bar.mean


def _draw(axes: Any, bar: Bar, position: int) -> None:
    first = position == 0
    axes.barh(position, 100 * bar.mean, height=0.6, color=COLORS[5], label="mean of members" if first else None)
    if math.isfinite(bar.gain):
        color = COLORS[1] if bar.gain >= 0 else COLORS[3]
        name = "gain of the ensemble" if first else None
        axes.barh(position, 100 * bar.gain, left=100 * bar.mean, height=0.6, color=color, label=name)
        if bar.error:
            axes.errorbar(100 * bar.ensemble, position, xerr=100 * bar.error, color=INK, elinewidth=0.9, capsize=2)
        text = format_percentage_points(bar.gain).removesuffix(" points")
        axes.annotate(text, (_axis_end(bar), position), (4, 0), textcoords="offset points", va="center", fontsize=8)
    dots = [100 * value for value in bar.members[:MAX_DOTS]]
    heights = [position + 0.2 * ((i % 5) - 2) / 2 for i in range(len(dots))]
    name = "member" if first else None
    axes.plot(dots, heights, "o", color=INK, markersize=2.2, alpha=0.7, label=name, zorder=3)


def _axis_end(bar: Bar) -> float:
    """Return the right end of everything drawn for a bar."""
    return 100 * max(bar.mean, *bar.members, _height(bar) + bar.error)


def _axis_start(bars: Sequence[Bar]) -> float:
    """Return the start of the axis: a round number below all values, so that gains are visible."""
    values = [value for bar in bars for value in (*bar.members, bar.ensemble) if math.isfinite(value)]
    low, high = 100 * min(values), 100 * max(values)
    return max(0.0, 5.0 * math.floor((low - 0.3 * (high - low)) / 5.0))


def _caption(bars: Mapping[str, Bar], split: str, inference: Inference) -> str:
    if len(bars) == 1:
        bar = next(iter(bars.values()))
        members = f"{pluralize(len(bar.members), 'member')} ({format_range(bar.members, percent=True)})"
        if math.isnan(bar.gain):
            return f"Accuracy on {split} samples: {members}, {format_number(bar.mean, percent=True)} on average."
        return (
            f"The accuracy of the ensemble on {split} samples is {format_number(bar.ensemble, percent=True)}, "
            f"{format_percentage_points(bar.gain)} from the mean of its {members}."
        )
    gains = {name: bar for name, bar in bars.items() if math.isfinite(bar.gain)}
    if not gains:
        means = format_range([bar.mean for bar in bars.values()], percent=True)
        return f"The mean accuracy of members on {split} samples is {means}."
    best = find_best({name: bar.repetitions for name, bar in gains.items()}, higher_is_better=True, inference=inference)
    low, high = (pick(bar.gain for bar in gains.values()) for pick in (min, max))
    last = "no condition is distinguished as the best"
    if best is not None:
        last = f"the best on {split} samples is {best} with {format_number(gains[best].ensemble, percent=True)}"
    return (
        f"In {pluralize(len(gains), 'condition')} the ensemble gains "
        f"{format_percentage_points(low).removesuffix(' points')} to "
        f"{format_percentage_points(high)} over the mean of its members; {last}."
    )


def _omission_note(count: int) -> str:
    return f" Only the {MAX_BARS} highest are shown." if count > MAX_BARS else ""
