"""Sharpness-aware sets of a data partition: how many members apply SAM to a sample, and how much sets overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.formatting import format_number, format_range, pluralize
from plateaux.loss_landscape.plot_style import COLORS
from plateaux.reports import style
from plateaux.reports.style import ReportFigure

MAX_LABELED = 6  # above that, members have no numeric labels in the plot


@dataclass(frozen=True, slots=True)
class SamSets:
    """The sharpness-aware sets of one data partition."""

    epoch: int
    counts: Sequence[int]  # samples in the sets of 0, 1, ..., M members
    shares: Sequence[float | None]  # fraction of samples in the set of each member
    overlap: Sequence[Sequence[float | None]]  # intersection over union of two sets


def sam_sets(sets: SamSets) -> ReportFigure | None:
    """Draw how many members apply SAM to a sample, and the overlap of the sets of two members."""
    members = len(sets.overlap)
    if not members or not sum(sets.counts):
        return None
    overlap = np.array(sets.overlap, dtype=np.float64)  # null becomes NaN
    with style.figure_style():
        figure, (left, right) = style.new_figure(2.8, 1, 2, width_ratios=(3, 2))
        total = sum(sets.counts)
        heights = [100 * count / total for count in sets.counts]
        left.bar(range(len(heights)), heights, color=COLORS[0], width=0.8)
        left.set(xlabel="members that apply SAM to a sample", ylabel="samples, %")
        left.xaxis.get_major_locator().set_params(integer=True)
        left.grid(False, axis="x")
        _draw_overlap(right, overlap)
        return style.finalize(
            "sam_sets", f"Sharpness-aware sets at epoch {sets.epoch}", _caption(sets, overlap), figure
        )


def _draw_overlap(axes: Any, overlap: NDArray[np.float64]) -> None:
    members = len(overlap)
    axes.imshow(overlap, vmin=0, vmax=1, cmap="viridis")
    axes.grid(False)
    axes.set(xlabel="member", title="overlap")
    ticks = range(0, members, max(1, members // 5))
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    for i in range(members if members <= MAX_LABELED else 0):
        for j in range(members):
            color = "#fefefe" if overlap[i, j] < 0.6 else "#111111"
            axes.text(j, i, f"{100 * overlap[i, j]:.0f}", ha="center", va="center", fontsize=7, color=color)


def _caption(sets: SamSets, overlap: NDArray[np.float64]) -> str:
    members = len(overlap)
    pairs = [float(overlap[i, j]) for i in range(members) for j in range(i)]
    shares = format_range([float(share) for share in sets.shares if share is not None], percent=True)
    total = sum(sets.counts)
    text = (
        f"After {pluralize(sets.epoch, 'epoch')} each of {pluralize(members, 'member')} applies SAM to {shares} of "
        f"{pluralize(total, 'sample')}; all members to {format_number(sets.counts[-1] / total, True)}, none to "
        f"{format_number(sets.counts[0] / total, True)}"
    )  # fmt: skip
    if not pairs:
        return f"{text}."
    return f"{text}. The sets of two members overlap by {format_range(pairs, percent=True)} (intersection over union)."
