"""Pictures of landscapes with matplotlib, in one look: PNG and SVG, a sentence made from the numbers, and the numbers.

Colours are safe for colour-blind eyes: Okabe and Ito's for curves, viridis for heights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from plateaux.core.errors import RecipeError
from plateaux.core.formatting import format_range, format_significant, json_safe
from plateaux.core.plot_style import COLORS, DASHES, INK, PAPER, RC_PARAMS
from plateaux.loss_landscape.slices import Line, Surface, barrier

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATISTICS = {
    "none": "",
    "batch": "BatchNorm by the statistics of every batch",
    "own": "BatchNorm by the member's own statistics",
    "mixed": "BatchNorm by statistics mixed as the weights are",
    "anew": "BatchNorm's statistics taken anew at every point",
}
WIDE = 20.0  # heights that differ by more than this factor are drawn on a logarithmic scale


@dataclass(frozen=True, slots=True)
class LandscapeFigure:
    """A picture under a name, the sentence below it, and the numbers in it."""

    name: str
    caption: str
    numbers: Mapping[str, Any]
    figure: Figure

    def files(self) -> dict[str, bytes]:
        """Return the contents of its files by their endings; the same numbers give the same bytes."""
        said = {"caption": self.caption, **self.numbers}
        text = json.dumps(json_safe(said), indent=1) + "\n"
        return {"png": self._as("png"), "svg": self._as("svg"), "json": text.encode()}

    def _as(self, kind: str) -> bytes:
        made = BytesIO()
        facts = {"Date": None} if kind == "svg" else {"Software": None}
        with _look():
            self.figure.savefig(made, format=kind, metadata=facts, bbox_inches=self.figure.get_tightbbox().padded(0.08))
        return made.getvalue()


def slices(found: Mapping[str, Line], about: Mapping[str, Any]) -> LandscapeFigure:
    """Draw the loss and the accuracy of members along one direction each."""
    with _look():
        figure, (high, low) = _two_storeys()
        for position, (name, each) in enumerate(found.items()):
            _curve(high, each, position, name)
            low.plot(each.at, [100 * a for a in each.accuracies], **_pen(position))
        _heights(high, [loss for each in found.values() for loss in each.losses])
        low.set_xlabel("distance from the member, in norms of its filters")
        high.set_title("Loss along a random direction")
        ends = [each.losses[i] for each in found.values() for i in (0, -1)]
        home = [each.losses[len(each.at) // 2] for each in found.values()]
        far = next(iter(found.values())).at[-1]
        who = next(iter(found)).capitalize() if len(found) == 1 else f"{len(found)} members, each"
        caption = (
            f"{who} along a random direction, scaled filter by filter. The loss is "
            f"{format_range(home, digits=3)} in the middle and {format_range(ends, digits=3)} at a distance of "
            f"{far:g}. {_below(found, about)}"
        )
        _caption(figure, caption)
    return LandscapeFigure("slices", caption, _numbers("slices", about, lines=found), figure)


def paths(found: Mapping[str, Line], about: Mapping[str, Any]) -> LandscapeFigure:
    """Draw the loss and the accuracy between members, and how high the loss rises."""
    rises = {name: barrier(each.at, each.losses) for name, each in found.items()}
    falls = {name: barrier(each.at, [1 - a for a in each.accuracies]) for name, each in found.items()}
    with _look():
        figure, (high, low) = _two_storeys()
        for position, (name, each) in enumerate(found.items()):
            _curve(high, each, position, f"{name}: barrier {format_significant(rises[name].above_line)}")
            _rise(high, each, position)
            low.plot(each.at, [100 * a for a in each.accuracies], **_pen(position))
        high.set_title("Loss on the straight path between members")
        high.set_ylabel("loss")
        _legend_above(high, len(found))
        low.set_xlabel("from the one member (0) to the other (1)")
        caption = (
            f"The loss rises by {format_range([r.above_line for r in rises.values()], digits=3)} above the straight "
            f"line between its ends (dashed) and by {format_range([r.above_mean for r in rises.values()], digits=3)} "
            f"above their mean; the error by "
            f"{format_range([100 * f.above_line for f in falls.values()], digits=3)} points above its line. "
            f"{_below(found, about)}"
        )
        _caption(figure, caption)
    both = {name: {"loss": asdict(rises[name]), "error": asdict(falls[name])} for name in found}
    return LandscapeFigure("paths", caption, _numbers("paths", about, lines=found, barriers=both), figure)


def surface(name: str, member: str, found: Surface, about: Mapping[str, Any]) -> LandscapeFigure:
    """Draw the loss over two random directions around a member as filled contours, its lowest point marked."""
    x, y, loss = found.lowest
    home = next(iter(found.marks.values()))
    with _look():
        figure, axes = _one_storey()
        _contours(figure, axes, found)
        axes.plot(home.x, home.y, "o", color=PAPER, markeredgecolor=INK, markersize=6, label=member)
        axes.plot(x, y, "x", color=COLORS[3], markersize=7, markeredgewidth=1.8, label="lowest on the grid")
        axes.set_title(f"Loss around {member}")
        axes.set_xlabel("first direction, in norms of filters")
        axes.set_ylabel("second direction")
        _legend_below(axes)
        caption = (
            f"{member.capitalize()} over two random directions, scaled filter by filter. The loss is "
            f"{format_significant(home.loss)} at the member (dot) and lowest at ({x:.2g}, {y:.2g}): "
            f"{format_significant(loss)} (cross). "
            f"{_below({member: found}, about)}"
        )
        _caption(figure, caption)
    return LandscapeFigure(name, caption, _numbers("surface", about, surface=found), figure)


def plane(name: str, found: Surface, about: Mapping[str, Any]) -> LandscapeFigure:
    """Draw the loss in the plane through three members, the members marked."""
    marks = list(found.marks.items())
    with _look():
        figure, axes = _one_storey()
        _contours(figure, axes, found)
        middle = sum(mark.y for _, mark in marks) / len(marks)
        for who, mark in marks:
            axes.plot(mark.x, mark.y, "o", color=PAPER, markeredgecolor=INK, markersize=6)
            _name(axes, who, mark.x, mark.y, above=mark.y > middle)
        axes.set_title("Loss in the plane through three members")
        axes.set_xlabel("distance in weights")
        axes.set_ylabel("distance in weights")
        gaps = [math.dist((a.x, a.y), (b.x, b.y)) for i, (_, a) in enumerate(marks) for _, b in marks[:i]]
        centre = _nearest(found, *(sum(getattr(mark, axis) for _, mark in marks) / 3 for axis in ("x", "y")))
        caption = (
            f"{_listed([who for who, _ in marks])} lie {format_range(gaps, digits=3)} apart. The loss is "
            f"{format_range([mark.loss for _, mark in marks], digits=3)} at the members and "
            f"{format_significant(centre)} amid them. {_below({'plane': found}, about)}"
        )
        _caption(figure, caption)
    return LandscapeFigure(name, caption, _numbers("plane", about, surface=found), figure)


# The look.


def check_matplotlib() -> None:
    """Say how to install matplotlib where there is none."""
    _look()


def _look() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise RecipeError('Pictures need matplotlib: pip install "plateaux[report]", or leave out --draw') from None
    return matplotlib.rc_context(RC_PARAMS)


def _two_storeys() -> tuple[Figure, tuple[Axes, Axes]]:
    """Return a figure with the loss above and the accuracy below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.8), layout="constrained")
    high, low = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for axes in (high, low):
        axes.grid(True)
        axes.set_axisbelow(True)
    low.set_ylabel("accuracy %")
    return figure, (high, low)


def _one_storey() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 5.2), layout="compressed")
    return figure, figure.subplots()


def _caption(figure: Figure, words: str) -> None:
    """Write the sentence below, and lay everything out once: it takes longer than drawing."""
    figure.supxlabel(fill(words, 92), x=0.02, ha="left", fontsize=7.5)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _pen(position: int) -> dict[str, Any]:
    return {
        "color": COLORS[position % len(COLORS)],
        "linestyle": DASHES[position // len(COLORS) % len(DASHES)],
    }


def _curve(axes: Axes, found: Line, position: int, name: str) -> None:
    low = [loss - error for loss, error in zip(found.losses, found.errors, strict=True)]
    high = [loss + error for loss, error in zip(found.losses, found.errors, strict=True)]
    axes.plot(found.at, found.losses, label=name, **_pen(position))
    axes.fill_between(found.at, low, high, color=_pen(position)["color"], alpha=0.18, linewidth=0)


def _heights(axes: Axes, losses: Sequence[float]) -> None:
    """Set the scale of the losses: logarithmic where they differ much."""
    if _is_wide(losses):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda height, _: f"{height:g}")
    axes.set_ylabel("loss")
    axes.legend(loc="best")


def _rise(axes: Axes, found: Line, position: int) -> None:
    """Draw the straight line between the ends, and from it up to where the loss is furthest above."""
    ends = found.losses[0], found.losses[-1]
    axes.plot((found.at[0], found.at[-1]), ends, color=_pen(position)["color"], linestyle="--", linewidth=0.8)
    line = [ends[0] + t * (ends[1] - ends[0]) for t in found.at]
    excess = [
        loss - under if math.isfinite(loss) else -math.inf for loss, under in zip(found.losses, line, strict=True)
    ]
    top = max(range(len(excess)), key=lambda i: excess[i])
    if excess[top] > 0:
        at, under = found.at[top], line[top]
        axes.plot((at, at), (under, found.losses[top]), color=_pen(position)["color"], linestyle=":", linewidth=1.2)


def _contours(figure: Figure, axes: Axes, found: Surface) -> None:
    heights = np.array(found.losses, dtype=float)
    wide = _is_wide(heights.ravel().tolist())
    # Of logarithms, so that contours are smooth where the loss is low too.
    seen = np.ma.masked_invalid(np.log(heights) if wide else heights)
    low, high = float(seen.min()), float(seen.max())
    levels = np.linspace(low, high if high > low else low + 1e-6 * max(abs(low), 1.0), 16)
    axes.set_facecolor("#bbbbbb")  # where the loss is no number
    drawn = axes.contourf(found.x, found.y, seen, levels=levels, cmap="viridis")
    axes.contour(found.x, found.y, seen, levels=levels, colors=PAPER, linewidths=0.3, alpha=0.6, linestyles="solid")
    bar = figure.colorbar(drawn, ax=axes, ticks=levels[::3])
    bar.set_ticklabels([format_significant(math.exp(level) if wide else level) for level in levels[::3]])
    bar.set_label("loss")
    axes.locator_params(nbins=6)
    axes.set_aspect("equal")


def _legend_above(axes: Axes, lines: int) -> None:
    """Put a legend of two columns over curves that rise in the middle, where any corner may be too small for it."""
    bottom, top = axes.get_ylim()
    share = min(0.02 + 0.08 * math.ceil(lines / 2), 0.8)  # of the height, for so many rows
    axes.set_ylim(bottom, bottom + (top - bottom) / (1 - share))
    axes.legend(loc="upper left", ncols=2)


def _legend_below(axes: Axes) -> None:
    axes.legend(loc="upper right", fontsize=7.5, facecolor="#777777", frameon=True, framealpha=0.75, labelcolor=PAPER)


def _name(axes: Axes, words: str, x: float, y: float, *, above: bool) -> None:
    from matplotlib.patheffects import withStroke

    axes.annotate(
        words, (x, y), xytext=(0, 8 if above else -8), textcoords="offset points", ha="center",
        va="bottom" if above else "top", fontsize=8.5, path_effects=[withStroke(linewidth=2.2, foreground=PAPER)],
    )  # fmt: skip


# The words and the numbers.


def _below(found: Mapping[str, Line | Surface], about: Mapping[str, Any]) -> str:
    """Return what every caption ends with: on what it was seen."""
    statistics = STATISTICS[next(iter(found.values())).statistics]
    samples = f"Seen on {about['samples']:,} {about['split']} samples of {about['name']}"
    shaded = "shaded: one standard error over samples" if isinstance(next(iter(found.values())), Line) else ""
    return "; ".join(words for words in (samples, statistics, shaded) if words) + "."


def _numbers(kind: str, about: Mapping[str, Any], **found: Any) -> dict[str, Any]:
    return {"kind": kind, "about": dict(about), **{name: _as_dict(each) for name, each in found.items()}}


def _as_dict(found: Any) -> Any:
    if isinstance(found, Line | Surface):
        return found.to_dict()
    return {name: _as_dict(each) for name, each in found.items()} if isinstance(found, Mapping) else found


def _is_wide(heights: Sequence[float]) -> bool:
    fine = [height for height in heights if math.isfinite(height)]
    return bool(fine) and min(fine) > 0 and max(fine) > WIDE * min(fine)


def _listed(words: Sequence[str]) -> str:
    numbers = [word.removeprefix("member ") for word in words]
    return f"Members {', '.join(numbers[:-1])} and {numbers[-1]}"


def _nearest(found: Surface, x: float, y: float) -> float:
    i = min(range(len(found.y)), key=lambda row: abs(found.y[row] - y))
    j = min(range(len(found.x)), key=lambda column: abs(found.x[column] - x))
    return found.losses[i][j]
