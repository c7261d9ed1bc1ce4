"""Figures 1b, 2, 9, 10 and 11 of Lu et al. 2024, drawn anew: simulation and both formulas on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from plateaux.core.optional import optional_import
from plateaux.core.stats.estimates import mean_of_independent
from plateaux.theory.captions import Part, captions, off, percent, said
from plateaux.theory.experiment import FORMULAS, Experiment, FigurePanel, Formula, Point
from plateaux.theory.intervals import around

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart.
BLACK, BLUE, ORANGE, RED = "#000000", "#0072B2", "#E69F00", "#D55E00"
COLOURS: dict[Formula, str] = {"printed": RED, "corrected": BLUE}
STYLES: dict[Formula, dict[str, Any]] = {
    "printed": {"linestyle": (0, (4, 2)), "linewidth": 1.2, "zorder": 3},
    "corrected": {"linestyle": "-", "linewidth": 1.8, "zorder": 2},
}
LOOK = {
    "font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9, "legend.fontsize": 8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.6,
    "legend.frameon": False, "svg.hashsalt": "plateaux", "svg.fonttype": "none", "axes.axisbelow": True,
    "axes.formatter.min_exponent": 4,
}  # fmt: skip


def draw(experiment: Experiment, out: Path) -> list[Path]:
    """Write every figure as PNG and SVG, and return the files."""
    matplotlib, figures = (
        optional_import("matplotlib", extra="report"),
        optional_import("matplotlib.figure", extra="report"),
    )
    words, files = captions(experiment), []
    with matplotlib.rc_context(LOOK):
        for name, panels in experiment.figures.items():
            figure = _figure(name, panels, experiment, figures.Figure)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # once is enough for both kinds
            for kind in ("png", "svg"):
                files.append(out / f"theory-{name}.{kind}")
                dated = {"Date": None} if kind == "svg" else {}  # the same numbers make the same file
                figure.savefig(files[-1], dpi=130, metadata={"Description": words[name], **dated})
    return files


def _figure(name: str, panels: Sequence[FigurePanel], experiment: Experiment, new: type[Figure]) -> Figure:
    if name == "1b":
        return _trade_off(panels, experiment, new)
    if len(panels) < 3:
        return _with_ratios(panels, experiment, new)
    return _grid(panels, experiment, new)


def _trade_off(panels: Sequence[FigurePanel], experiment: Experiment, new: type[Figure]) -> Figure:
    """Draw Figure 1b: both ways of training on one plane."""
    figure = new(figsize=(8.6, 4.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for (name, settings), colour, marker in zip(panel.curves.items(), (BLUE, ORANGE), ("o", "s"), strict=True):
            points = [experiment.points[each] for each in settings]
            for formula in FORMULAS:
                x, y = said(points, formula, "upper"), said(points, formula, "diversity")
                axes.plot(x, y, color=colour, label=f"{name}: bound, {formula}", **STYLES[formula])
            _simulated(axes, points, experiment.matrices, colour=colour, marker=marker, label=f"{name}: simulation")
        axes.set_title(panel.title)
        axes.set_xlabel("sharpness")
        axes.set_ylabel("diversity")
        axes.set_ylim(bottom=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _with_ratios(panels: Sequence[FigurePanel], experiment: Experiment, new: type[Figure]) -> Figure:
    """Draw Figure 2 or 9: the plane above, and below it how far the formulas are from the simulation."""
    figure = new(figsize=(max(5.5, 4.3 * len(panels)), 6.2), layout="constrained")
    above, below = figure.subplots(2, len(panels), squeeze=False, height_ratios=(1.6, 1))
    for top, bottom, panel in zip(above, below, panels, strict=True):
        _plane(top, panel, experiment)
        _ratios(bottom, panel, experiment)
    below[0].set_ylabel("above simulation, %")
    figure.legend(*above[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.legend(*below[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _grid(panels: Sequence[FigurePanel], experiment: Experiment, new: type[Figure]) -> Figure:
    """Draw Figure 10 or 11: nine planes, each with a word on how far the formulas are from the simulation."""
    figure = new(figsize=(8.6, 9.2), layout="constrained")
    for axes, panel in zip(figure.subplots(3, 3).flat, panels, strict=True):
        _plane(axes, panel, experiment, labels=False)
        axes.set_title(panel.title, pad=24)
        axes.text(0.5, 1.015, _words(panel, experiment), transform=axes.transAxes, ha="center", fontsize=7)
    figure.supxlabel("sharpness", fontsize=9)
    figure.supylabel("diversity", fontsize=9)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _plane(axes: Axes, panel: FigurePanel, experiment: Experiment, *, labels: bool = True) -> None:
    """Draw sharpness against diversity: bounds as lines, simulation as points."""
    for name, settings in panel.curves.items():
        points = [experiment.points[each] for each in settings]
        for formula in FORMULAS:
            style = {"color": COLOURS[formula], **STYLES[formula]}
            y = said(points, formula, "diversity")
            axes.plot(said(points, formula, "upper"), y, label=f"upper bound, {formula}", **style)
            lower = said(points, formula, "lower")
            if (lower > 0).all():
                axes.plot(lower, y, label=f"lower bound, {formula}", **{**style, "linewidth": 0.8})
        _simulated(axes, points, experiment.matrices, colour=BLACK, marker="o", label=f"simulation, {name}")
        _scale(axes, "x", [float(point.simulated.sharpness.mean()) for point in points])
        _scale(axes, "y", [float(point.simulated.diversity.mean()) for point in points])
    axes.set_title(panel.title)
    if labels:
        axes.set_xlabel("sharpness")
        axes.set_ylabel("diversity")


def _ratios(axes: Axes, panel: FigurePanel, experiment: Experiment) -> None:
    """Draw how far diversity and upper bound are from the simulation, in per cent, with its interval."""
    (settings,) = panel.curves.values()
    points = [experiment.points[each] for each in settings]
    x = [getattr(each, panel.varies) for each in settings]
    means = [mean_of_independent(point.simulated.diversity.tolist()) for point in points]
    halves = np.array([100 * (around(mean, experiment.matrices)[1] / mean.value - 1) for mean in means])
    axes.fill_between(x, -halves, halves, color="#bbbbbb", alpha=0.6, linewidth=0, label="simulated diversity, 95 %")
    axes.axhline(0, color=BLACK, linewidth=0.8)
    parts: tuple[tuple[Part, str, str], ...] = (("diversity", "diversity", ""), ("upper", "upper bound", "^"))
    for formula in FORMULAS:
        for part, name, marker in parts:
            style = {"color": COLOURS[formula], **STYLES[formula], "marker": marker, "markersize": 3.5}
            axes.plot(x, off(points, formula, part), label=f"{name}, {formula}", **style)
    axes.set_xlabel(panel.varies)


def _simulated(axes: Axes, points: Sequence[Point], count: int, *, colour: str, marker: str, label: str) -> None:
    """Draw the simulated means with their 95 % intervals."""
    middle, halves = [], []
    for values in ([p.simulated.sharpness for p in points], [p.simulated.diversity for p in points]):
        means = [mean_of_independent(each.tolist()) for each in values]
        middle.append([mean.value for mean in means])
        halves.append([around(mean, count)[1] - mean.value for mean in means])
    axes.errorbar(
        middle[0], middle[1], xerr=halves[0], yerr=halves[1], color=colour, marker=marker, markersize=3.5,
        linestyle="none", elinewidth=0.8, label=label, zorder=4,
    )  # fmt: skip


def _scale(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Make an axis logarithmic where numbers span more than a factor of four, with a few ticks that have room."""
    span = max(values) / min(values)
    if span <= 4:
        return
    ticker = optional_import("matplotlib.ticker", extra="report")
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    subs = (1.0, 2.0, 5.0) if span < 10 else (1.0, 3.0) if span < 30 else (1.0,)  # of one tick it would make many
    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=6))
    axis.set_major_formatter(ticker.LogFormatterSciNotation(minor_thresholds=(np.inf, np.inf)))
    axis.set_minor_locator(ticker.NullLocator())


def _words(panel: FigurePanel, experiment: Experiment) -> str:
    (settings,) = panel.curves.values()
    points = [experiment.points[each] for each in settings]
    parts: tuple[tuple[Part, str], ...] = (("diversity", "diversity"), ("upper", "upper bound"))
    said_of = {(formula, part): percent(off(points, formula, part)) for formula in FORMULAS for part, _ in parts}
    lines = (f"{name}: printed {said_of['printed', p]}, corrected {said_of['corrected', p]}" for p, name in parts)
    return "\n".join(lines)
