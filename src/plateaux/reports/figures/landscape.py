"""Plots of the loss landscape, from the data written by `plateaux landscape --plots`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.formatting import format_range, pluralize
from plateaux.reports import style
from plateaux.reports.style import ReportFigure

Tree = Mapping[str, Any]  # contents of the JSON file of a plot
MAX_SURFACES = 6  # per figure


def lines(tree: Tree) -> ReportFigure | None:
    """Draw the loss along slices through members, or on paths between them."""
    kind = tree.get("kind")
    curves = {name: _points(line) for name, line in tree.get("lines", {}).items()}
    curves = {name: (at, losses) for name, (at, losses) in curves.items() if np.isfinite(losses).any()}
    if kind not in ("slices", "paths") or not curves:
        return None
    with style.figure_style():
        figure, axes = style.new_figure(3.2)
        for position, (at, losses) in enumerate(curves.values()):
            label = style.legend_label(position, list(curves))
            axes.plot(at, losses, label=label, **{**style.line_style(position), "marker": None})
        losses_shown = [float(loss) for _, losses in curves.values() for loss in losses if math.isfinite(loss)]
        if style.needs_log_scale(losses_shown):
            style.set_log_scale(axes.yaxis)
        along = "distance from the member, in norms of its filters"
        axes.set_xlabel(along if kind == "slices" else "position between two members")
        axes.set_ylabel("loss")
        style.legend(figure, axes)
        title = "Loss around each member" if kind == "slices" else "Loss between members"
        return style.finalize(f"landscape_{kind}", title, _lines_caption(kind, curves), figure)


def surfaces(trees: Mapping[str, Tree]) -> ReportFigure | None:
    """Draw the loss over two directions around each member, or over the plane through three members."""
    surfaces_by_name = {
        name: tree["surface"] for name, tree in trees.items() if {"x", "y", "losses"} <= set(tree.get("surface", ()))
    }
    grids = {name: _to_array(each["losses"]) for name, each in surfaces_by_name.items()}
    shown = [name for name in surfaces_by_name if np.isfinite(grids[name]).any()][:MAX_SURFACES]
    if not shown:
        return None
    losses_shown = [float(height) for name in shown for height in grids[name].ravel() if math.isfinite(height)]
    is_log = style.needs_log_scale(losses_shown)
    scale = min(losses_shown), max(losses_shown)
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    with style.figure_style():
        figure, cells = style.new_figure(0.7 + 4.6 / columns * rows, rows, columns, squeeze=False)
        for name, axes in zip(shown, cells.ravel(), strict=False):
            image = _draw_surface(axes, surfaces_by_name[name], grids[name], scale, is_log)
            axes.set_title(style.wrap_label(_members_label(name), 24))
        for axes in cells.ravel()[len(shown) :]:
            axes.set_axis_off()
        bar = figure.colorbar(image, ax=cells, location="bottom", shrink=0.7, aspect=40)
        bar.set_label("loss")
        if is_log:
            style.set_log_scale(bar.ax.xaxis)
        marks = [float(mark["loss"]) for name in shown for mark in surfaces_by_name[name].get("marks", {}).values()]
        text = f"The loss around {', '.join(map(_members_label, shown))}: {format_range(marks)} at the members (dots), "
        caption = f"{text}up to {format_range([max(losses_shown)])} at the edges; all plots share one color scale."
        kind = trees[shown[0]]["kind"]
        return style.finalize(f"landscape_{kind}", "Loss surfaces", caption, figure)


def _draw_surface(
    axes: Any, surface: Tree, losses: NDArray[np.float64], scale: tuple[float, float], is_log: bool
) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    norm = (LogNorm if is_log else Normalize)(vmin=scale[0], vmax=scale[1])
    x, y = surface["x"], surface["y"]
    image = axes.imshow(
        losses, extent=(x[0], x[-1], y[0], y[-1]), origin="lower", cmap="viridis", norm=norm, aspect="auto",
        interpolation="bilinear",
    )  # fmt: skip
    for mark in surface.get("marks", {}).values():
        axes.plot(mark["x"], mark["y"], "o", color="#fefefe", markeredgecolor="#111111", markersize=5)
    axes.grid(False)
    axes.locator_params(nbins=3)
    return image


def _members_label(name: str) -> str:
    """Return the members of a plot by its name, such as `surface-2` or `plane-0-1-2`."""
    kind, *numbers = name.split("-")
    text = {"surface": "member", "plane": "members"}.get(kind, kind)
    return f"{text} {', '.join(numbers)}".strip()


def _points(line: Tree) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return _to_array(line["at"]), _to_array(line["losses"])


def _to_array(numbers: Sequence[Any]) -> NDArray[np.float64]:
    """Return numbers as an array, with null as NaN."""
    return np.array(numbers, dtype=np.float64)


def _lines_caption(kind: str, curves: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]) -> str:
    ends = [float(losses[i]) for _, losses in curves.values() for i in (0, -1)]
    if kind == "slices":
        middle = format_range([float(losses[len(losses) // 2]) for _, losses in curves.values()])
        return (
            f"Loss of {pluralize(len(curves), 'member')} along one filter-normalized random direction each: {middle} "
            f"at the member and {format_range(ends)} at the ends."
        )
    barriers = [float(np.nanmax(losses) - np.nanmean(losses[[0, -1]])) for _, losses in curves.values()]
    return (
        f"On {pluralize(len(curves), 'straight path')} between members the loss barrier is {format_range(barriers)} "
        f"above the mean loss of both ends ({format_range(ends)})."
    )
