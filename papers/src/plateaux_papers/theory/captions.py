"""Captions of the figures, generated from their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from plateaux_papers.theory.experiment import FORMULAS, FigurePlot, Formula, Point, TheoryExperiment
from plateaux_papers.theory.phi import Floats

Part = Literal["diversity", "upper", "lower"]


def predicted_values(points: Sequence[Point], formula: Formula, part: Part) -> Floats:
    """Return the prediction of a formula for each setting; NaN if it makes none."""
    values = [getattr(point.predictions[formula], part) for point in points]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def deviation_percent(points: Sequence[Point], formula: Formula, part: Part) -> Floats:
    """Return by how many percent a formula lies above the simulated mean."""
    quantity = "diversity" if part == "diversity" else "sharpness"
    means = np.array([getattr(point.simulated, quantity).mean() for point in points], dtype=np.float64)
    return 100 * (predicted_values(points, formula, part) / means - 1)


def format_largest(values: Floats) -> str:
    """Return the value furthest from zero, formatted as a percentage."""
    value = float(values[np.abs(values).argmax()])
    digits = 0 if abs(value) >= 10 else 1
    rounded = round(value, digits) + 0.0  # + 0.0 turns -0.0 into 0.0
    return f"{rounded:+.{digits}f} %" if rounded else "0 %"


def captions(experiment: TheoryExperiment) -> dict[str, str]:
    """Return the caption of each figure."""
    return {
        name: _trade_off(plots, experiment) if name == "1b" else _deviations(plots, experiment)
        for name, plots in experiment.figures.items()
    }


def _trade_off(plots: Sequence[FigurePlot], experiment: TheoryExperiment) -> str:
    parts = []
    for pairs, regime in (
        ([pair for pair in experiment.pairs if not pair.full.stable], "in the paper's settings, where SAM diverges,"),
        ([pair for pair in experiment.pairs if pair.full.stable], "where SAM converges, with the best k and rho,"),
    ):
        ratios = [
            float(experiment.points[pair.subsets].simulated.diversity.mean())
            / float(experiment.points[pair.full].simulated.diversity.mean())
            for pair in pairs
            if pair.formula == "corrected"
        ]
        if ratios:
            parts.append(f"{regime} subsets are {min(ratios):.1f} to {max(ratios):.1f} times as diverse")
    return f"At equal sharpness bound: {'; '.join(parts)} (simulation of {experiment.matrices} matrices)."


def _deviations(plots: Sequence[FigurePlot], experiment: TheoryExperiment) -> str:
    points = [experiment.points[each] for plot in plots for curve in plot.curves.values() for each in curve]
    diverging = sum(not point.setting.stable for point in points)
    parts: tuple[tuple[Part, str], ...] = (("diversity", "Diversity"), ("upper", "the upper bound of sharpness"))
    texts = []
    for part, name in parts:
        printed, corrected = (format_largest(deviation_percent(points, formula, part)) for formula in FORMULAS)
        texts.append(
            f"{name} differs from the simulated mean by at most {printed} as printed and {corrected} as corrected"
        )
    vacuous = int((predicted_values(points, "printed", "lower") < 0).sum())
    lower = f" The printed lower bound is below zero in {vacuous} of them." if vacuous else ""
    return f"{'; '.join(texts)}. SAM diverges in {diverging} of {len(points)} settings.{lower}"
