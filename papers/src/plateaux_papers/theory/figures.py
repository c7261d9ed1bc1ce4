"""Figures 1b, 2, 9, 10, and 11 of Lu et al. 2024 with the simulation and both formulas on the same axes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from plateaux.commands import COLORS, RC_PARAMS, optional_import
from plateaux.stats import interval_from_stderr, mean_of_independent
from plateaux_papers.theory.captions import Part, captions, deviation_percent, format_largest, predicted_values
from plateaux_papers.theory.experiment import FORMULAS, FigurePlot, Formula, Point, TheoryExperiment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, VERMILION, BLACK = COLORS[0], COLORS[1], COLORS[3], COLORS[-1]
FORMULA_COLORS: dict[Formula, str] = {"printed": VERMILION, "corrected": BLUE}
STYLES: dict[Formula, dict[str, Any]] = {
    "printed": {"linestyle": (0, (4, 2)), "linewidth": 1.2, "zorder": 3},
    "corrected": {"linestyle": "-", "linewidth": 1.8, "zorder": 2},
}
THEORY_STYLE = {
    **RC_PARAMS, "axes.titlelocation": "center", "axes.grid": True, "axes.axisbelow": True,
    "axes.formatter.min_exponent": 4,
}  # fmt: skip


def draw_figures(experiment: TheoryExperiment) -> dict[str, bytes]:
    """Draw every figure as PNG and SVG, and return the contents by file name."""
    matplotlib, figures = (
        optional_import("matplotlib", extra="report"),
        optional_import("matplotlib.figure", extra="report"),
    )
    texts, files = captions(experiment), dict[str, bytes]()
    with matplotlib.rc_context(THEORY_STYLE):
        for name, plots in experiment.figures.items():
            figure = _figure(name, plots, experiment, figures.Figure)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # keeps the layout for the second file
            for kind in ("png", "svg"):
                dated = {"Date": None} if kind == "svg" else {}  # equal numbers give equal files
                content = io.BytesIO()
                figure.savefig(content, format=kind, dpi=130, metadata={"Description": texts[name], **dated})
                files[f"theory-{name}.{kind}"] = content.getvalue()
    return files


def _figure(name: str, plots: Sequence[FigurePlot], experiment: TheoryExperiment, new: type[Figure]) -> Figure:
    if name == "1b":
        return _trade_off(plots, experiment, new)
    if len(plots) < 3:
        return _with_ratios(plots, experiment, new)
    return _grid(plots, experiment, new)


def _trade_off(plots: Sequence[FigurePlot], experiment: TheoryExperiment, new: type[Figure]) -> Figure:
    """Draw Figure 1b: training on all data and on subsets in one plane of sharpness and diversity."""
    figure = new(figsize=(8.6, 4.2), layout="constrained")
    for axes, plot in zip(figure.subplots(1, len(plots)), plots, strict=True):
        for (name, settings), color, marker in zip(plot.curves.items(), (BLUE, ORANGE), ("o", "s"), strict=True):
            points = [experiment.points[each] for each in settings]
            for formula in FORMULAS:
                x, y = predicted_values(points, formula, "upper"), predicted_values(points, formula, "diversity")
                axes.plot(x, y, color=color, label=f"{name}: bound, {formula}", **STYLES[formula])
            _simulated(axes, points, experiment.matrices, color=color, marker=marker, label=f"{name}: simulation")
        axes.set_title(plot.title)
        axes.set_xlabel("sharpness")
        axes.set_ylabel("diversity")
        axes.set_ylim(bottom=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _with_ratios(plots: Sequence[FigurePlot], experiment: TheoryExperiment, new: type[Figure]) -> Figure:
    """Draw Figure 2 or 9: the plane above, and the deviation of the formulas from the simulation below."""
    figure = new(figsize=(max(5.5, 4.3 * len(plots)), 6.2), layout="constrained")
    above, below = figure.subplots(2, len(plots), squeeze=False, height_ratios=(1.6, 1))
    for top, bottom, plot in zip(above, below, plots, strict=True):
        _plane(top, plot, experiment)
        _ratios(bottom, plot, experiment)
    below[0].set_ylabel("deviation from simulation, %")
    figure.legend(*above[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.legend(*below[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _grid(plots: Sequence[FigurePlot], experiment: TheoryExperiment, new: type[Figure]) -> Figure:
    """Draw Figure 10 or 11: nine planes, each with the largest deviation of the formulas from the simulation."""
    figure = new(figsize=(8.6, 9.2), layout="constrained")
    for axes, plot in zip(figure.subplots(3, 3).flat, plots, strict=True):
        _plane(axes, plot, experiment, labels=False)
        axes.set_title(plot.title, pad=24)
        axes.text(0.5, 1.015, _deviation_text(plot, experiment), transform=axes.transAxes, ha="center", fontsize=7)
    figure.supxlabel("sharpness", fontsize=9)
    figure.supylabel("diversity", fontsize=9)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _plane(axes: Axes, plot: FigurePlot, experiment: TheoryExperiment, *, labels: bool = True) -> None:
    """Draw diversity against sharpness: bounds as lines, simulation as points."""
    for name, settings in plot.curves.items():
        points = [experiment.points[each] for each in settings]
        for formula in FORMULAS:
            style = {"color": FORMULA_COLORS[formula], **STYLES[formula]}
            y = predicted_values(points, formula, "diversity")
            axes.plot(predicted_values(points, formula, "upper"), y, label=f"upper bound, {formula}", **style)
            lower = predicted_values(points, formula, "lower")
            if (lower > 0).all():
                axes.plot(lower, y, label=f"lower bound, {formula}", **{**style, "linewidth": 0.8})
        _simulated(axes, points, experiment.matrices, color=BLACK, marker="o", label=f"simulation, {name}")
        _scale(axes, "x", [float(point.simulated.sharpness.mean()) for point in points])
        _scale(axes, "y", [float(point.simulated.diversity.mean()) for point in points])
    axes.set_title(plot.title)
    if labels:
        axes.set_xlabel("sharpness")
        axes.set_ylabel("diversity")


def _ratios(axes: Axes, plot: FigurePlot, experiment: TheoryExperiment) -> None:
    """Draw the deviation of diversity and upper bound from the simulation, in percent, with its 95 % interval."""
    (settings,) = plot.curves.values()
    points = [experiment.points[each] for each in settings]
    x = [getattr(each, plot.varies) for each in settings]
    means = [mean_of_independent(point.simulated.diversity.tolist()) for point in points]
    halves = np.array([100 * (interval_from_stderr(mean, experiment.matrices).high / mean.value - 1) for mean in means])
    axes.fill_between(x, -halves, halves, color="#bbbbbb", alpha=0.6, linewidth=0, label="simulated diversity, 95 %")
    axes.axhline(0, color=BLACK, linewidth=0.8)
    parts: tuple[tuple[Part, str, str], ...] = (("diversity", "diversity", ""), ("upper", "upper bound", "^"))
    for formula in FORMULAS:
        for part, name, marker in parts:
            style = {"color": FORMULA_COLORS[formula], **STYLES[formula], "marker": marker, "markersize": 3.5}
            axes.plot(x, deviation_percent(points, formula, part), label=f"{name}, {formula}", **style)
    axes.set_xlabel(plot.varies)


def _simulated(axes: Axes, points: Sequence[Point], count: int, *, color: str, marker: str, label: str) -> None:
    """Draw the simulated means with their 95 % intervals."""
    middle, halves = [], []
    for values in ([p.simulated.sharpness for p in points], [p.simulated.diversity for p in points]):
        means = [mean_of_independent(each.tolist()) for each in values]
        middle.append([mean.value for mean in means])
        halves.append([interval_from_stderr(mean, count).high - mean.value for mean in means])
    axes.errorbar(
        middle[0], middle[1], xerr=halves[0], yerr=halves[1], color=color, marker=marker, markersize=3.5,
        linestyle="none", elinewidth=0.8, label=label, zorder=4,
    )  # fmt: skip


def _scale(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Use a logarithmic axis if values differ by more than a factor of four, with few ticks."""
    factor = max(values) / min(values)
    if factor <= 4:
        return
    ticker = optional_import("matplotlib.ticker", extra="report")
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    subs = (1.0, 2.0, 5.0) if factor < 10 else (1.0, 3.0) if factor < 30 else (1.0,)
    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=6))
    axis.set_major_formatter(ticker.LogFormatterSciNotation(minor_thresholds=(np.inf, np.inf)))
    axis.set_minor_locator(ticker.NullLocator())


def _deviation_text(plot: FigurePlot, experiment: TheoryExperiment) -> str:
    (settings,) = plot.curves.values()
    points = [experiment.points[each] for each in settings]
    parts: tuple[tuple[Part, str], ...] = (("diversity", "diversity"), ("upper", "upper bound"))
    deviations = {
        (formula, part): format_largest(deviation_percent(points, formula, part))
        for formula in FORMULAS
        for part, _ in parts
    }
    lines = (f"{name}: printed {deviations['printed', p]}, corrected {deviations['corrected', p]}" for p, name in parts)
    return "\n".join(lines)
