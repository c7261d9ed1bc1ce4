"""How good members are, and what they gain by answering together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plateaux.core.formatting import format_number, format_percentage_points, format_range, pluralize
from plateaux.core.plot_style import COLORS, INK
from plateaux.core.row_names import MEAN_PROBABILITY
from plateaux.core.types import Estimate
from plateaux.reports import style
from plateaux.reports.query import default_split, is_member, over, result_label
from plateaux.reports.style import ReportFigure
from plateaux.studies.results import ResultRow

MOST = 20  # conditions that have a bar
CROWD = 200  # dots of members before they are left out


@dataclass(frozen=True, slots=True)
class Bar:
    """The members of one condition, and the ensemble they make."""

    members: Sequence[float]
    mean: float
    ensemble: Estimate

    @property
    def gain(self) -> float:
        return self.ensemble.value - self.mean


def accuracy_bars(findings: Sequence[ResultRow], *, on: str | None = None) -> ReportFigure | None:
    """Draw the mean accuracy of members as bars, with the ensemble's gain on top and members as dots."""
    on = on or default_split(findings)
    bars = {name: bar for name, bar in _bars(findings, on).items() if math.isfinite(bar.mean)}
    if not bars:
        return None
    shown = sorted(bars, key=lambda name: -_height(bars[name]))[:MOST] if len(bars) > MOST else list(bars)
    with style.figure_style():
        labels = [style.wrap_label(name) for name in shown]
        more = sum(label.count("\n") for label in labels)
        figure, axes = style.new_figure(0.9 + 0.34 * max(len(shown), 2) + 0.12 * more)
        for position, name in enumerate(shown):
            _draw(axes, bars[name], position)
        start = _start([bars[name] for name in shown])
        end = max(_end(bars[name]) for name in shown)
        axes.set_xlim(start, end + 0.14 * max(end - start, 1.0))
        axes.set_yticks(range(len(shown)), labels)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.grid(False, axis="y")
        axes.set_xlabel(f"accuracy on {on} samples, %")
        style.legend(figure, axes)
        sentence = _sentence(bars, on) + _left_out(len(bars)) + f" The axis starts at {start:g} %."
        return style.finalize("accuracy_bars", "Members, and what they gain together", sentence, figure)


def _bars(findings: Sequence[ResultRow], on: str) -> dict[str, Bar]:
    members: dict[str, list[float]] = {}
    together: dict[str, list[ResultRow]] = {}
    for each in findings:
        if each.metric == "accuracy" and each.split == on:
            if is_member(each.row) and math.isfinite(each.value):
                members.setdefault(result_label(each), []).append(each.value)
            elif each.row == MEAN_PROBABILITY:
                together.setdefault(result_label(each), []).append(each)
    nothing = Estimate(math.nan)
    return {
        name: Bar(several, sum(several) / len(several), over(together[name]) if name in together else nothing)
        for name, several in members.items()
    }


def _height(bar: Bar) -> float:
    return bar.ensemble.value if math.isfinite(bar.ensemble.value) else bar.mean


def _draw(axes: Any, bar: Bar, position: int) -> None:
    first = position == 0
    axes.barh(position, 100 * bar.mean, height=0.6, color=COLORS[5], label="mean of members" if first else None)
    if math.isfinite(bar.gain):
        colour = COLORS[1] if bar.gain >= 0 else COLORS[3]
        name = "gain of the ensemble" if first else None
        axes.barh(position, 100 * bar.gain, left=100 * bar.mean, height=0.6, color=colour, label=name)
        if bar.ensemble.stderr and math.isfinite(bar.ensemble.stderr):
            end, error = 100 * bar.ensemble.value, 100 * bar.ensemble.stderr
            axes.errorbar(end, position, xerr=error, color=INK, elinewidth=0.9, capsize=2)
        words = format_percentage_points(bar.gain).removesuffix(" points")
        axes.annotate(words, (_end(bar), position), (4, 0), textcoords="offset points", va="center", fontsize=8)
    dots = [100 * each for each in bar.members[:CROWD]]
    heights = [position + 0.2 * ((i % 5) - 2) / 2 for i in range(len(dots))]
    name = "a member" if first else None
    axes.plot(dots, heights, "o", color=INK, markersize=2.2, alpha=0.7, label=name, zorder=3)


def _end(bar: Bar) -> float:
    """Return how far right something is drawn of a bar."""
    error = bar.ensemble.stderr if bar.ensemble.stderr and math.isfinite(bar.ensemble.stderr) else 0.0
    return 100 * max(bar.mean, *bar.members, _height(bar) + error)


def _start(bars: Sequence[Bar]) -> float:
    """Return where the axis starts: a round number below all, so that gains can be seen."""
    seen = [each for bar in bars for each in (*bar.members, bar.ensemble.value) if math.isfinite(each)]
    low, high = 100 * min(seen), 100 * max(seen)
    return max(0.0, 5.0 * math.floor((low - 0.3 * (high - low)) / 5.0))


def _sentence(bars: Mapping[str, Bar], on: str) -> str:
    if len(bars) == 1:
        bar = next(iter(bars.values()))
        members = f"{pluralize(len(bar.members), 'member')} ({format_range(bar.members, percent=True)})"
        if math.isnan(bar.gain):
            return f"On {on} samples {members}, {format_number(bar.mean, percent=True)} on average."
        return (
            f"The ensemble is right on {format_number(bar.ensemble.value, percent=True)} of the {on} samples, "
            f"{format_percentage_points(bar.gain)} from the mean of its {members}."
        )
    gains = {name: bar for name, bar in bars.items() if math.isfinite(bar.gain)}
    if not gains:
        means = format_range([bar.mean for bar in bars.values()], percent=True)
        return f"Members are right on {means} of the {on} samples."
    best = max(gains, key=lambda name: gains[name].ensemble.value)
    low, high = (pick(bar.gain for bar in gains.values()) for pick in (min, max))
    return (
        f"Over {pluralize(len(gains), 'condition')} the ensemble gains "
        f"{format_percentage_points(low).removesuffix(' points')} to "
        f"{format_percentage_points(high)} on the mean of its members; the best on {on} samples is {best} with "
        f"{format_number(gains[best].ensemble.value, percent=True)}."
    )


def _left_out(count: int) -> str:
    return f" Shown are the {MOST} best." if count > MOST else ""
