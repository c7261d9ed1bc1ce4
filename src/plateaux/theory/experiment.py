"""What Figures 1b, 2, 9, 10 and 11 of Lu et al. 2024 show, and what the claims need beside it: settings and numbers.

Settings are the paper's where it tells them (sizes, starts, k, eta, rho and the parts of Figures 10 and 11; the ranges
of rho and k of Figures 2 and 9), and those of the notebook released with it elsewhere (Figure 1b, and eta = 0.01,
k = 3, variance 0.1, radius 0.01, teachers of squared length 15). The rho of Figure 9b is told by neither; it is 0.5.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from plateaux.theory.frontier import STEPS, most_diverse
from plateaux.theory.setting import Setting, Unstable
from plateaux.theory.simulate import Simulated, simulate
from plateaux.theory.theorems import Prediction, theorem1, theorem2

PARTS = 10
BOUNDS = (0.2, 0.3, 0.4, 0.5)
Formula = Literal["printed", "corrected"]
FORMULAS: tuple[Formula, ...] = ("printed", "corrected")


@dataclass(frozen=True, slots=True)
class FigurePanel:
    """One plot: curves by name, each of settings in which one thing varies."""

    title: str
    varies: Literal["rho", "k", "bound"]
    curves: Mapping[str, Sequence[Setting]]


@dataclass(frozen=True, slots=True)
class Point:
    """One setting: what happened, and what the formulas say."""

    setting: Setting
    simulated: Simulated
    says: Mapping[Formula, Prediction]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two settings whose bounds of sharpness are equal by one formula: all data, and parts."""

    formula: Formula
    bound: float
    whole: Setting
    parts: Setting


@dataclass(frozen=True, slots=True)
class Experiment:
    """Every setting that is drawn or judged, simulated on the same random data."""

    figures: Mapping[str, Sequence[FigurePanel]]
    pairs: Sequence[Pair]
    points: Mapping[Setting, Point]
    matrices: int
    starts: int
    seed: int


def run(
    *,
    matrices: int = 50,
    starts: int = 50,
    seed: int = 0,
    density: int = 9,
    steps: int = STEPS,
    base: Setting | None = None,
    parts: int = PARTS,
    seen: Callable[[int, int], None] | None = None,
) -> Experiment:
    """Simulate and compute everything; a curve has `density` settings, `base` is another size than the paper's.

    The most diverse settings at each bound are looked for up to `steps` steps.
    """
    like = base or Setting()
    figures = layout(like, parts, density)
    pairs = [*equal_bounds(like, parts, steps), *plotted_bounds(figures)]
    drawn = [
        each for panels in figures.values() for panel in panels for curve in panel.curves.values() for each in curve
    ]
    both = [each for pair in pairs for each in (pair.whole, pair.parts)]
    settings = list(dict.fromkeys([*drawn, *converging(like), *both]))
    found = simulate(settings, matrices=matrices, starts=starts, seed=seed, seen=seen)
    points = {each: Point(each, what, predictions(each)) for each, what in zip(settings, found, strict=True)}
    stable = FigurePanel("SAM converges, best k and rho", "bound", _curves(pairs))
    figures = {**figures, "1b": [*figures["1b"], stable]}
    return Experiment(figures, pairs, points, matrices, starts, seed)


def layout(like: Setting, parts: int, density: int) -> dict[str, list[FigurePanel]]:
    """Return the panels of the figures, but the one of Figure 1b that is found by search."""

    def over(low: float, high: float, setting: Setting, count: int = density) -> list[Setting]:
        return [replace(setting, rho=float(rho)) for rho in np.linspace(low, high, count).round(6)]

    subsets = replace(like, parts=parts)
    many = [replace(subsets, rho=0.5, k=k) for k in range(1, 16)]
    return {
        "1b": [
            FigurePanel(
                "as in the paper: SAM diverges",
                "rho",
                {"SAM": over(0.24, 0.255, like), "subsets": over(0.01, 1.5, subsets)},
            )
        ],
        "2": [FigurePanel("k = 3, eta = 0.01, rho from 0.3 to 0.5", "rho", {"SAM": over(0.3, 0.5, like)})],
        "9": [
            FigurePanel("k = 3, eta = 0.01, rho from 0.4 to 1", "rho", {"subsets": over(0.4, 1.0, subsets)}),
            FigurePanel("eta = 0.01, rho = 0.5, k from 1 to 15", "k", {"subsets": many}),
        ],
        "10": [
            FigurePanel(f"k = {k}, eta = {eta:g}", "rho", {"SAM": over(0.3, 0.5, replace(like, k=k, eta=eta))})
            for k in (2, 4, 8)
            for eta in (0.1, 0.05, 0.01)
        ],
        "11": [
            FigurePanel(f"k = {k}, eta = {eta:g}", "rho", {"subsets": over(0.3, 0.5, replace(subsets, k=k, eta=eta))})
            for k in (4, 8, 12)
            for eta in (0.5, 0.3, 0.1)
        ],
    }


def converging(like: Setting) -> list[Setting]:
    """Return settings of SAM on all data that converge; of the paper's own, none does."""
    return [replace(like, k=k, rho=rho) for k in (1, 3, 6) for rho in (0.0, 0.05, 0.1, 0.15)]


def predictions(setting: Setting) -> dict[Formula, Prediction]:
    """Return what the formulas say, printed and corrected, without a warning where SAM diverges."""
    theorem = theorem1 if setting.parts == 1 else theorem2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Unstable)
        return {"printed": theorem(setting, paper=True), "corrected": theorem(setting)}


def equal_bounds(like: Setting, parts: int, steps: int) -> list[Pair]:
    """Return the most diverse converging settings at equal bounds, by both formulas."""
    found = []
    for formula in FORMULAS:
        for bound in BOUNDS:
            whole, some = (
                most_diverse(bound, replace(like, parts=count), paper=formula == "printed", steps=steps).setting
                for count in (1, parts)
            )
            found.append(Pair(formula, bound, whole, some))
    return found


def plotted_bounds(figures: Mapping[str, Sequence[FigurePanel]]) -> list[Pair]:
    """Return settings of Figure 1b and those of its other curve at the same bound, where there is one."""
    whole, some = (figures["1b"][0].curves[name] for name in ("SAM", "subsets"))
    found = []
    for formula in FORMULAS:
        for setting in (whole[0], whole[len(whole) // 2], whole[-1]):
            bound = predictions(setting)[formula].upper
            other = _with_bound(bound, some[0], some[-1], formula)
            if other is not None:
                found.append(Pair(formula, bound, setting, other))
    return found


def _with_bound(bound: float, steep: Setting, flat: Setting, formula: Formula) -> Setting | None:
    """Return the setting between two whose bound is that; the bound falls from the first to the second."""
    if not predictions(flat)[formula].upper <= bound <= predictions(steep)[formula].upper:
        return None
    low, high = steep.rho, flat.rho
    for _ in range(30):
        middle = (low + high) / 2
        above = predictions(replace(steep, rho=middle))[formula].upper > bound
        low, high = (middle, high) if above else (low, middle)
    return replace(steep, rho=high)


def _curves(pairs: Sequence[Pair]) -> dict[str, list[Setting]]:
    mine = [pair for pair in pairs if pair.formula == "corrected" and pair.bound in BOUNDS]
    return {"SAM": [pair.whole for pair in mine], "subsets": [pair.parts for pair in mine]}
