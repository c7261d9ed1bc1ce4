"""The landscape in pictures, from what `plateaux landscape --plots` wrote down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.formatting import format_range, pluralize
from plateaux.reports import style
from plateaux.reports.style import ReportFigure

Tree = Mapping[str, Any]  # one picture's numbers, as its JSON file has them
MOST = 6  # surfaces side by side


def lines(tree: Tree) -> ReportFigure | None:
    """Draw the loss along slices through members, or on paths between them."""
    kind = tree.get("kind")
    found = {name: _numbers(each) for name, each in tree.get("lines", {}).items()}
    found = {name: (at, losses) for name, (at, losses) in found.items() if np.isfinite(losses).any()}
    if kind not in ("slices", "paths") or not found:
        return None
    with style.figure_style():
        figure, axes = style.new_figure(3.2)
        for position, (at, losses) in enumerate(found.values()):
            label = style.legend_label(position, list(found))
            axes.plot(at, losses, label=label, **{**style.line_style(position), "marker": None})
        heights = [float(loss) for _, losses in found.values() for loss in losses if math.isfinite(loss)]
        if style.needs_log_scale(heights):
            style.logarithmic(axes.yaxis)
        along = "distance from the member, in norms of its filters"
        axes.set_xlabel(along if kind == "slices" else "from the one member (0) to the other (1)")
        axes.set_ylabel("loss")
        style.legend(figure, axes)
        title = "Around each member" if kind == "slices" else "Between members"
        return style.finalize(f"landscape_{kind}", title, _about_lines(kind, found), figure)


def surfaces(trees: Mapping[str, Tree]) -> ReportFigure | None:
    """Draw the loss over two directions, a small picture for every member, or over the plane through three."""
    found = {
        name: tree["surface"] for name, tree in trees.items() if {"x", "y", "losses"} <= set(tree.get("surface", ()))
    }
    grids = {name: _grid(each["losses"]) for name, each in found.items()}
    shown = [name for name in found if np.isfinite(grids[name]).any()][:MOST]
    if not shown:
        return None
    heights = [float(height) for name in shown for height in grids[name].ravel() if math.isfinite(height)]
    logs = style.needs_log_scale(heights)
    scale = min(heights), max(heights)
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    with style.figure_style():
        figure, cells = style.new_figure(0.7 + 4.6 / columns * rows, rows, columns, squeeze=False)
        for name, axes in zip(shown, cells.ravel(), strict=False):
            drawn = _surface(axes, found[name], grids[name], scale, logs)
            axes.set_title(style.wrap_label(_called(name), 24))
        for axes in cells.ravel()[len(shown) :]:
            axes.set_axis_off()
        bar = figure.colorbar(drawn, ax=cells, location="bottom", shrink=0.7, aspect=40)
        bar.set_label("loss")
        if logs:
            style.logarithmic(bar.ax.xaxis)
        marks = [float(mark["loss"]) for name in shown for mark in found[name].get("marks", {}).values()]
        words = f"The loss around {', '.join(map(_called, shown))}: {format_range(marks)} at the members (dots), up to "
        sentence = f"{words}{format_range([max(heights)])} at the edges; all pictures share one scale."
        kind = trees[shown[0]]["kind"]
        return style.finalize(f"landscape_{kind}", "The loss from above", sentence, figure)


def _surface(axes: Any, each: Tree, heights: NDArray[np.float64], scale: tuple[float, float], logs: bool) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    norm = (LogNorm if logs else Normalize)(vmin=scale[0], vmax=scale[1])
    x, y = each["x"], each["y"]
    drawn = axes.imshow(
        heights, extent=(x[0], x[-1], y[0], y[-1]), origin="lower", cmap="viridis", norm=norm, interpolation="bilinear",
        aspect="auto",
    )  # fmt: skip
    for mark in each.get("marks", {}).values():
        axes.plot(mark["x"], mark["y"], "o", color="#fefefe", markeredgecolor="#111111", markersize=5)
    axes.grid(False)
    axes.locator_params(nbins=3)
    return drawn


def _called(name: str) -> str:
    """Return what a picture is of: `surface-2` and `plane-0-1-2` are named by members."""
    kind, *numbers = name.split("-")
    words = {"surface": "member", "plane": "members"}.get(kind, kind)
    return f"{words} {', '.join(numbers)}".strip()


def _numbers(each: Tree) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return _grid(each["at"]), _grid(each["losses"])


def _grid(numbers: Sequence[Any]) -> NDArray[np.float64]:
    """Return numbers as an array; null, which stands for none, is nan."""
    return np.array(numbers, dtype=np.float64)


def _about_lines(kind: str, found: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]) -> str:
    ends = [float(losses[i]) for _, losses in found.values() for i in (0, -1)]
    if kind == "slices":
        middle = format_range([float(losses[len(losses) // 2]) for _, losses in found.values()])
        words = f"{pluralize(len(found), 'member')} along a random direction each: the loss is {middle} in the middle"
        return f"{words} and {format_range(ends)} at the ends, scaled filter by filter."
    rises = [float(np.nanmax(losses) - np.nanmean(losses[[0, -1]])) for _, losses in found.values()]
    words = (
        f"On {pluralize(len(found), 'straight path')} between members the loss rises by {format_range(rises)} above the"
    )
    return f"{words} mean of its ends, which are {format_range(ends)}."
