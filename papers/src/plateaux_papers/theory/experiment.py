"""Settings and results of Figures 1b, 2, 9, 10, and 11 of Lu et al. 2024, and of the claims about them.

The settings are those of the paper where it states them (sizes, starts, k, eta, rho, and the subsets of Figures 10 and
11; the ranges of rho and k in Figures 2 and 9), otherwise those of the released notebook (Figure 1b, eta = 0.01, k = 3,
variance 0.1, radius 0.01, teachers of squared length 15). Neither states the rho of Figure 9b; it is 0.5 here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from plateaux.commands import Progress, log_messages
from plateaux_papers.theory.frontier import MAX_STEPS, most_diverse
from plateaux_papers.theory.setting import Setting, UnstableWarning
from plateaux_papers.theory.simulate import SimulationResult, simulate
from plateaux_papers.theory.theorems import Prediction, theorem1, theorem2

PARTS = 10
BOUNDS = (0.2, 0.3, 0.4, 0.5)
Formula = Literal["printed", "corrected"]
FORMULAS: tuple[Formula, ...] = ("printed", "corrected")


@dataclass(frozen=True, slots=True)
class FigurePlot:
    """One plot of a figure: named curves, each a list of settings in which one quantity varies."""

    title: str
    varies: Literal["rho", "k", "bound"]
    curves: Mapping[str, Sequence[Setting]]


@dataclass(frozen=True, slots=True)
class Point:
    """One setting with its simulation and the predictions of both formulas."""

    setting: Setting
    simulated: SimulationResult
    predictions: Mapping[Formula, Prediction]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two settings with equal sharpness bounds by one formula: training on all data, and on subsets."""

    formula: Formula
    bound: float
    full: Setting
    subsets: Setting


@dataclass(frozen=True, slots=True)
class TheoryExperiment:
    """All settings that are drawn or judged, simulated on the same random data."""

    figures: Mapping[str, Sequence[FigurePlot]]
    pairs: Sequence[Pair]
    points: Mapping[Setting, Point]
    matrices: int
    starts: int
    seed: int


def run_experiment(
    *,
    matrices: int = 50,
    starts: int = 50,
    seed: int = 0,
    density: int = 9,
    steps: int = MAX_STEPS,
    base: Setting | None = None,
    parts: int = PARTS,
    progress: Progress = log_messages,
) -> TheoryExperiment:
    """Simulate all settings and compute both predictions for each.

    A curve has `density` settings; `base` replaces the size of the paper. The search for the most diverse setting at
    each sharpness bound tries up to `steps` steps of SAM.
    """
    like = base or Setting()
    figures = figure_settings(like, parts, density)
    pairs = [*equal_bounds(like, parts, steps), *plotted_bounds(figures)]
    plotted = [each for plots in figures.values() for plot in plots for curve in plot.curves.values() for each in curve]
    paired = [each for pair in pairs for each in (pair.full, pair.subsets)]
    settings = list(dict.fromkeys([*plotted, *converging_settings(like), *paired]))
    results = simulate(settings, matrices=matrices, starts=starts, seed=seed, progress=progress)
    points = {each: Point(each, result, predict(each)) for each, result in zip(settings, results, strict=True)}
    stable = FigurePlot("SAM converges, best k and rho", "bound", _pair_curves(pairs))
    figures = {**figures, "1b": [*figures["1b"], stable]}
    return TheoryExperiment(figures, pairs, points, matrices, starts, seed)


def figure_settings(like: Setting, parts: int, density: int) -> dict[str, list[FigurePlot]]:
    """Return the plots of all figures, except the one of Figure 1b that needs a search."""

    def vary_rho(low: float, high: float, setting: Setting, count: int = density) -> list[Setting]:
        return [replace(setting, rho=float(rho)) for rho in np.linspace(low, high, count).round(6)]

    subsets = replace(like, parts=parts)
    many_steps = [replace(subsets, rho=0.5, k=k) for k in range(1, 16)]
    return {
        "1b": [
            FigurePlot(
                "as in the paper: SAM diverges",
                "rho",
                {"SAM": vary_rho(0.24, 0.255, like), "subsets": vary_rho(0.01, 1.5, subsets)},
            )
        ],
        "2": [FigurePlot("k = 3, eta = 0.01, rho from 0.3 to 0.5", "rho", {"SAM": vary_rho(0.3, 0.5, like)})],
        "9": [
            FigurePlot("k = 3, eta = 0.01, rho from 0.4 to 1", "rho", {"subsets": vary_rho(0.4, 1.0, subsets)}),
            FigurePlot("eta = 0.01, rho = 0.5, k from 1 to 15", "k", {"subsets": many_steps}),
        ],
        "10": [
            FigurePlot(f"k = {k}, eta = {eta:g}", "rho", {"SAM": vary_rho(0.3, 0.5, replace(like, k=k, eta=eta))})
            for k in (2, 4, 8)
            for eta in (0.1, 0.05, 0.01)
        ],
        "11": [
            FigurePlot(
                f"k = {k}, eta = {eta:g}", "rho", {"subsets": vary_rho(0.3, 0.5, replace(subsets, k=k, eta=eta))}
            )
            for k in (4, 8, 12)
            for eta in (0.5, 0.3, 0.1)
        ],
    }


def converging_settings(like: Setting) -> list[Setting]:
    """Return settings in which SAM on all data converges; it diverges in all settings of the paper."""
    return [replace(like, k=k, rho=rho) for k in (1, 3, 6) for rho in (0.0, 0.05, 0.1, 0.15)]


def predict(setting: Setting) -> dict[Formula, Prediction]:
    """Return the predictions of the printed and the corrected formulas, without a warning if SAM diverges."""
    theorem = theorem1 if setting.parts == 1 else theorem2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnstableWarning)
        return {"printed": theorem(setting, paper=True), "corrected": theorem(setting)}


def equal_bounds(like: Setting, parts: int, steps: int) -> list[Pair]:
    """Return the most diverse converging settings at equal sharpness bounds, by both formulas."""
    pairs = []
    for formula in FORMULAS:
        for bound in BOUNDS:
            full, subsets = (
                most_diverse(bound, replace(like, parts=count), paper=formula == "printed", steps=steps).setting
                for count in (1, parts)
            )
            pairs.append(Pair(formula, bound, full, subsets))
    return pairs


def plotted_bounds(figures: Mapping[str, Sequence[FigurePlot]]) -> list[Pair]:
    """Return settings of Figure 1b paired with settings of its other curve at the same bound, where one exists."""
    full, subsets = (figures["1b"][0].curves[name] for name in ("SAM", "subsets"))
    pairs = []
    for formula in FORMULAS:
        for setting in (full[0], full[len(full) // 2], full[-1]):
            bound = predict(setting)[formula].upper
            other = _find_bound(bound, subsets[0], subsets[-1], formula)
            if other is not None:
                pairs.append(Pair(formula, bound, setting, other))
    return pairs


def _find_bound(bound: float, sharp: Setting, flat: Setting, formula: Formula) -> Setting | None:
    """Return the setting between two with the given bound; the bound decreases from the first to the second."""
    if not predict(flat)[formula].upper <= bound <= predict(sharp)[formula].upper:
        return None
    low, high = sharp.rho, flat.rho
    for _ in range(30):
        middle = (low + high) / 2
        above = predict(replace(sharp, rho=middle))[formula].upper > bound
        low, high = (middle, high) if above else (low, middle)
    return replace(sharp, rho=high)


def _pair_curves(pairs: Sequence[Pair]) -> dict[str, list[Setting]]:
    corrected = [pair for pair in pairs if pair.formula == "corrected" and pair.bound in BOUNDS]
    return {"SAM": [pair.full for pair in corrected], "subsets": [pair.subsets for pair in corrected]}
