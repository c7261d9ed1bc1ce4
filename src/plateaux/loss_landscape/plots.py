"""Matplotlib plots of loss landscapes: PNG, SVG, a caption computed from the data, and the data as JSON.

Colors are safe for color-blind readers: the palette of Okabe and Ito for curves, viridis for contours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from plateaux.core.errors import RecipeError
from plateaux.core.formatting import format_range, format_significant, json_safe
from plateaux.loss_landscape.plot_style import COLORS, DASHES, INK, PAPER, RC_PARAMS
from plateaux.loss_landscape.slices import LossCurve, LossGrid, compute_barrier

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATISTICS_TEXT = {
    "none": "",
    "batch": "BatchNorm uses the statistics of each batch",
    "own": "BatchNorm uses the running statistics of the member",
    "recomputed": "BatchNorm statistics are recomputed at every point",
}
_format_range = partial(format_range, digits=3)
LOG_SCALE_RATIO = 20.0  # losses that differ by more than this factor are plotted on a logarithmic scale


@dataclass(frozen=True, slots=True)
class LandscapeFigure:
    """A plot with its name, its caption, and the data in it."""

    name: str
    caption: str
    data: Mapping[str, Any]
    figure: Figure

    def files(self) -> dict[str, bytes]:
        """Return the contents of the files by extension. Equal data give equal bytes."""
        content = {"caption": self.caption, **self.data}
        text = json.dumps(json_safe(content), indent=1) + "\n"
        return {"png": self._render("png"), "svg": self._render("svg"), "json": text.encode()}

    def _render(self, file_format: str) -> bytes:
        buffer = BytesIO()
        metadata = {"Date": None} if file_format == "svg" else {"Software": None}
        with figure_style():
            bounds = self.figure.get_tightbbox().padded(0.08)
            self.figure.savefig(buffer, format=file_format, metadata=metadata, bbox_inches=bounds)
        return buffer.getvalue()


def plot_slices(curves: Mapping[str, LossCurve], metadata: Mapping[str, Any]) -> LandscapeFigure:
    """Plot the loss and the accuracy of members along one random direction each."""
    with figure_style():
        figure, (upper, lower) = _loss_and_accuracy_axes()
        for position, (name, curve) in enumerate(curves.items()):
            _draw_curve(upper, curve, position, name)
            lower.plot(curve.at, [100 * a for a in curve.accuracies], **_line_style(position))
        _set_loss_scale(upper, [loss for curve in curves.values() for loss in curve.losses])
        lower.set_xlabel("distance from the member, in filter norms")
        upper.set_title("Loss along a random direction")
        ends = [curve.losses[i] for curve in curves.values() for i in (0, -1)]
        origins = [curve.losses[len(curve.at) // 2] for curve in curves.values()]
        distance = next(iter(curves.values())).at[-1]
        subject = next(iter(curves)).capitalize() if len(curves) == 1 else f"{len(curves)} members, each"
        caption = (
            f"{subject} along a random direction with filter normalization. The loss is {_format_range(origins)} at "
            f"the member and {_format_range(ends)} at a distance of {distance:g}. {_caption_suffix(curves, metadata)}"
        )
        _add_caption(figure, caption)
    return LandscapeFigure("slices", caption, _make_data("slices", metadata, lines=curves), figure)


def plot_paths(curves: Mapping[str, LossCurve], metadata: Mapping[str, Any]) -> LandscapeFigure:
    """Plot the loss and the accuracy on straight paths between members, with the barriers."""
    loss_barriers = {name: compute_barrier(curve.at, curve.losses) for name, curve in curves.items()}
    error_barriers = {
        name: compute_barrier(curve.at, [1 - a for a in curve.accuracies]) for name, curve in curves.items()
    }
    with figure_style():
        figure, (upper, lower) = _loss_and_accuracy_axes()
        for position, (name, curve) in enumerate(curves.items()):
            _draw_curve(upper, curve, position, f"{name}: barrier {format_significant(loss_barriers[name].above_line)}")
            _draw_barrier(upper, curve, position)
            lower.plot(curve.at, [100 * a for a in curve.accuracies], **_line_style(position))
        upper.set_title("Loss on the straight path between members")
        upper.set_ylabel("loss")
        _legend_above(upper, len(curves))
        lower.set_xlabel("position on the path from the first member (0) to the second (1)")
        above_line = _format_range([barrier.above_line for barrier in loss_barriers.values()])
        above_mean = _format_range([barrier.above_mean for barrier in loss_barriers.values()])
        error = _format_range([100 * barrier.above_line for barrier in error_barriers.values()])
        caption = (
            f"The loss rises by {above_line} above the linear interpolation between the endpoints (dashed) and by "
            f"{above_mean} above their mean; the error rises by {error} percentage points above the linear "
            f"interpolation. {_caption_suffix(curves, metadata)}"
        )
        _add_caption(figure, caption)
    barriers = {name: {"loss": asdict(loss_barriers[name]), "error": asdict(error_barriers[name])} for name in curves}
    return LandscapeFigure("paths", caption, _make_data("paths", metadata, lines=curves, barriers=barriers), figure)


def plot_grid(name: str, member: str, grid: LossGrid, metadata: Mapping[str, Any]) -> LandscapeFigure:
    """Plot the loss over two random directions around a member as filled contours, with the minimum marked."""
    x, y, loss = grid.lowest
    origin = next(iter(grid.marks.values()))
    with figure_style():
        figure, axes = _single_axes()
        _draw_contours(figure, axes, grid)
        axes.plot(origin.x, origin.y, "o", color=PAPER, markeredgecolor=INK, markersize=6, label=member)
        axes.plot(x, y, "x", color=COLORS[3], markersize=7, markeredgewidth=1.8, label="minimum on the grid")
        axes.set_title(f"Loss around {member}")
        axes.set_xlabel("first direction, in filter norms")
        axes.set_ylabel("second direction")
        _legend_on_contours(axes)
        caption = (
            f"{member.capitalize()} over two random directions with filter normalization. The loss is "
            f"{format_significant(origin.loss)} at the member (dot); its minimum is at ({x:.2g}, {y:.2g}): "
            f"{format_significant(loss)} (cross). {_caption_suffix({member: grid}, metadata)}"
        )
        _add_caption(figure, caption)
    return LandscapeFigure(name, caption, _make_data("surface", metadata, surface=grid), figure)


def plot_plane(name: str, grid: LossGrid, metadata: Mapping[str, Any]) -> LandscapeFigure:
    """Plot the loss in the plane through three members, with the members marked."""
    marks = list(grid.marks.items())
    with figure_style():
        figure, axes = _single_axes()
        _draw_contours(figure, axes, grid)
        mean_y = sum(mark.y for _, mark in marks) / len(marks)
        for member, mark in marks:
            axes.plot(mark.x, mark.y, "o", color=PAPER, markeredgecolor=INK, markersize=6)
            _annotate(axes, member, mark.x, mark.y, above=mark.y > mean_y)
        axes.set_title("Loss in the plane through three members")
        axes.set_xlabel("distance in weight space")
        axes.set_ylabel("distance in weight space")
        distances = [math.dist((a.x, a.y), (b.x, b.y)) for i, (_, a) in enumerate(marks) for _, b in marks[:i]]
        center = _nearest_loss(grid, *(sum(getattr(mark, axis) for _, mark in marks) / 3 for axis in ("x", "y")))
        caption = (
            f"{_list_members([member for member, _ in marks])} lie {_format_range(distances)} apart. The loss is "
            f"{_format_range([mark.loss for _, mark in marks])} at the members and {format_significant(center)} "
            f"at their centroid. {_caption_suffix({'plane': grid}, metadata)}"
        )
        _add_caption(figure, caption)
    return LandscapeFigure(name, caption, _make_data("plane", metadata, surface=grid), figure)


# Drawing.


def figure_style() -> Any:
    """Return the context of the figures; raise an error that explains how to install matplotlib if it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise RecipeError(
            'Plots need matplotlib, which is not installed: pip install "plateaux[report]", or leave out --plots'
        ) from None
    return matplotlib.rc_context(RC_PARAMS)


def _loss_and_accuracy_axes() -> tuple[Figure, tuple[Axes, Axes]]:
    """Return a figure with axes for the loss above axes for the accuracy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for axes in (upper, lower):
        axes.grid(True)
        axes.set_axisbelow(True)
    lower.set_ylabel("accuracy %")
    return figure, (upper, lower)


def _single_axes() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 5.2), layout="compressed")
    return figure, figure.subplots()


def _add_caption(figure: Figure, text: str) -> None:
    """Add the caption below the axes and compute the layout once, because layout takes longer than drawing."""
    figure.supxlabel(fill(text, 92), x=0.02, ha="left", fontsize=7.5)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _line_style(position: int) -> dict[str, Any]:
    return {
        "color": COLORS[position % len(COLORS)],
        "linestyle": DASHES[position // len(COLORS) % len(DASHES)],
    }


def _draw_curve(axes: Axes, curve: LossCurve, position: int, label: str) -> None:
    low = [loss - stderr for loss, stderr in zip(curve.losses, curve.stderrs, strict=True)]
    high = [loss + stderr for loss, stderr in zip(curve.losses, curve.stderrs, strict=True)]
    axes.plot(curve.at, curve.losses, label=label, **_line_style(position))
    axes.fill_between(curve.at, low, high, color=_line_style(position)["color"], alpha=0.18, linewidth=0)


def _set_loss_scale(axes: Axes, losses: Sequence[float]) -> None:
    """Use a logarithmic axis if the losses differ by a large factor."""
    if _needs_log_scale(losses):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda loss, _: f"{loss:g}")
    axes.set_ylabel("loss")
    axes.legend(loc="best")


def _draw_barrier(axes: Axes, curve: LossCurve, position: int) -> None:
    """Draw the linear interpolation between the endpoints, and the largest excess of the loss above it."""
    ends = curve.losses[0], curve.losses[-1]
    color = _line_style(position)["color"]
    axes.plot((curve.at[0], curve.at[-1]), ends, color=color, linestyle="--", linewidth=0.8)
    line = [ends[0] + t * (ends[1] - ends[0]) for t in curve.at]
    excess = [loss - base if math.isfinite(loss) else -math.inf for loss, base in zip(curve.losses, line, strict=True)]
    top = max(range(len(excess)), key=lambda i: excess[i])
    if excess[top] > 0:
        at, base = curve.at[top], line[top]
        axes.plot((at, at), (base, curve.losses[top]), color=color, linestyle=":", linewidth=1.2)


def _draw_contours(figure: Figure, axes: Axes, grid: LossGrid) -> None:
    losses = np.array(grid.losses, dtype=float)
    use_log = _needs_log_scale(losses.ravel().tolist())
    # Contours of the logarithm are smooth where the loss is low too.
    values = np.ma.masked_invalid(np.log(losses) if use_log else losses)
    low, high = float(values.min()), float(values.max())
    levels = np.linspace(low, high if high > low else low + 1e-6 * max(abs(low), 1.0), 16)
    axes.set_facecolor("#bbbbbb")  # shows where the loss is NaN or infinite
    contours = axes.contourf(grid.x, grid.y, values, levels=levels, cmap="viridis")
    axes.contour(grid.x, grid.y, values, levels=levels, colors=PAPER, linewidths=0.3, alpha=0.6, linestyles="solid")
    bar = figure.colorbar(contours, ax=axes, ticks=levels[::3])
    bar.set_ticklabels([format_significant(math.exp(level) if use_log else level) for level in levels[::3]])
    bar.set_label("loss")
    axes.locator_params(nbins=6)
    axes.set_aspect("equal")


def _legend_above(axes: Axes, curves: int) -> None:
    """Make room for a legend of two columns above the curves, because their maxima leave no corner free."""
    bottom, top = axes.get_ylim()
    fraction = min(0.02 + 0.08 * math.ceil(curves / 2), 0.8)  # of the height of the axes
    axes.set_ylim(bottom, bottom + (top - bottom) / (1 - fraction))
    axes.legend(loc="upper left", ncols=2)


def _legend_on_contours(axes: Axes) -> None:
    axes.legend(loc="upper right", fontsize=7.5, facecolor="#777777", frameon=True, framealpha=0.75, labelcolor=PAPER)


def _annotate(axes: Axes, text: str, x: float, y: float, *, above: bool) -> None:
    from matplotlib.patheffects import withStroke

    axes.annotate(
        text, (x, y), xytext=(0, 8 if above else -8), textcoords="offset points", ha="center",
        va="bottom" if above else "top", fontsize=8.5, path_effects=[withStroke(linewidth=2.2, foreground=PAPER)],
    )  # fmt: skip


# Captions and data.


def _caption_suffix(evaluated: Mapping[str, LossCurve | LossGrid], metadata: Mapping[str, Any]) -> str:
    """Return the end of every caption: the samples, the BatchNorm statistics, and the meaning of the shading."""
    first = next(iter(evaluated.values()))
    samples = f"Evaluated on {metadata['samples']:,} {metadata['split']} samples of {metadata['name']}"
    shading = "shaded: one standard error over samples" if isinstance(first, LossCurve) else ""
    return "; ".join(text for text in (samples, STATISTICS_TEXT[first.statistics], shading) if text) + "."


def _make_data(kind: str, metadata: Mapping[str, Any], **contents: Any) -> dict[str, Any]:
    return {"kind": kind, "about": dict(metadata), **{name: _as_dict(value) for name, value in contents.items()}}


def _as_dict(value: Any) -> Any:
    if isinstance(value, LossCurve | LossGrid):
        return asdict(value)
    return {name: _as_dict(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _needs_log_scale(losses: Sequence[float]) -> bool:
    finite = [loss for loss in losses if math.isfinite(loss)]
    return bool(finite) and min(finite) > 0 and max(finite) > LOG_SCALE_RATIO * min(finite)


def _list_members(names: Sequence[str]) -> str:
    numbers = [name.removeprefix("member ") for name in names]
    return f"Members {', '.join(numbers[:-1])} and {numbers[-1]}"


def _nearest_loss(grid: LossGrid, x: float, y: float) -> float:
    i = min(range(len(grid.y)), key=lambda row: abs(grid.y[row] - y))
    j = min(range(len(grid.x)), key=lambda column: abs(grid.x[column] - x))
    return grid.losses[i][j]
