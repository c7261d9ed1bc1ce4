"""Which samples are careful for whom: what members decided when they met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.formatting import format_number, format_range, pluralize
from plateaux.core.plot_style import COLORS
from plateaux.reports import style
from plateaux.reports.style import ReportFigure

WRITTEN = 6  # members at most whose overlaps are written into the picture


@dataclass(frozen=True, slots=True)
class SamSets:
    """What one meeting decided."""

    epoch: int
    counts: Sequence[int]  # of samples about which 0, 1, ... M members are careful
    shares: Sequence[float | None]  # of the samples each member is careful about
    overlap: Sequence[Sequence[float | None]]  # shared by two members, of those that either is careful about


def sam_sets(met: SamSets) -> ReportFigure | None:
    """Draw how many members are careful about a sample, and how far two members agree."""
    members = len(met.overlap)
    if not members or not sum(met.counts):
        return None
    table = np.array(met.overlap, dtype=np.float64)  # null is nan
    with style.figure_style():
        figure, (left, right) = style.new_figure(2.8, 1, 2, width_ratios=(3, 2))
        total = sum(met.counts)
        heights = [100 * count / total for count in met.counts]
        left.bar(range(len(heights)), heights, color=COLORS[0], width=0.8)
        left.set(xlabel="members careful about a sample", ylabel="samples, %")
        left.xaxis.get_major_locator().set_params(integer=True)
        left.grid(False, axis="x")
        _overlap(right, table)
        return style.finalize("sam_sets", f"Sharpness-aware sets at epoch {met.epoch}", _sentence(met, table), figure)


def _overlap(axes: Any, table: NDArray[np.float64]) -> None:
    members = len(table)
    axes.imshow(table, vmin=0, vmax=1, cmap="viridis")
    axes.grid(False)
    axes.set(xlabel="member", title="overlap")
    ticks = range(0, members, max(1, members // 5))
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    for i in range(members if members <= WRITTEN else 0):
        for j in range(members):
            ink = "#fefefe" if table[i, j] < 0.6 else "#111111"
            axes.text(j, i, f"{100 * table[i, j]:.0f}", ha="center", va="center", fontsize=7, color=ink)


def _sentence(met: SamSets, table: NDArray[np.float64]) -> str:
    members = len(table)
    apart = [float(table[i, j]) for i in range(members) for j in range(i)]
    shares = format_range([float(share) for share in met.shares if share is not None], percent=True)
    total = sum(met.counts)
    words = (
        f"When {pluralize(members, 'member')} met after {pluralize(met.epoch, 'epoch')}, each became careful about "
        f"{shares} of {pluralize(total, 'sample')}; all about {format_number(met.counts[-1] / total, True)}, "
        "nobody about "
        f"{format_number(met.counts[0] / total, True)}"
    )  # fmt: skip
    if not apart:
        return f"{words}."
    return f"{words}. Two members share {format_range(apart, percent=True)} of what either is careful about."
