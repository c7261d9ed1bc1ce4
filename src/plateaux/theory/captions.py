"""A sentence for each figure, made from its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from plateaux.theory.experiment import Experiment, FigurePanel, Formula, Point
from plateaux.theory.phi import Floats

Part = Literal["diversity", "upper", "lower"]


def said(points: Sequence[Point], formula: Formula, part: Part) -> Floats:
    """Return what a formula says of each setting; nan where it says nothing."""
    values = [getattr(point.says[formula], part) for point in points]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def off(points: Sequence[Point], formula: Formula, part: Part) -> Floats:
    """Return by how many per cent a formula lies above the simulated mean."""
    seen = "diversity" if part == "diversity" else "sharpness"
    means = np.array([getattr(point.simulated, seen).mean() for point in points], dtype=np.float64)
    return 100 * (said(points, formula, part) / means - 1)


def percent(values: Floats) -> str:
    """Return the value furthest from zero, as words."""
    value = float(values[np.abs(values).argmax()])
    digits = 0 if abs(value) >= 10 else 1
    rounded = round(value, digits) + 0.0  # never a negative zero
    return f"{rounded:+.{digits}f} %" if rounded else "0 %"


def captions(experiment: Experiment) -> dict[str, str]:
    """Return what every figure shows, in a sentence or two."""
    return {
        name: _trade_off(panels, experiment) if name == "1b" else _deviations(panels, experiment)
        for name, panels in experiment.figures.items()
    }


def _trade_off(panels: Sequence[FigurePanel], experiment: Experiment) -> str:
    words = []
    for pairs, when in (
        ([pair for pair in experiment.pairs if not pair.whole.stable], "in the paper's settings, where SAM diverges,"),
        ([pair for pair in experiment.pairs if pair.whole.stable], "where SAM converges, with the best k and rho,"),
    ):
        ratios = [
            float(experiment.points[pair.parts].simulated.diversity.mean())
            / float(experiment.points[pair.whole].simulated.diversity.mean())
            for pair in pairs
            if pair.formula == "corrected"
        ]
        if ratios:
            words.append(f"{when} subsets are {min(ratios):.1f} to {max(ratios):.1f} times as diverse")
    return f"At equal sharpness bound: {'; '.join(words)} (simulation of {experiment.matrices} matrices)."


def _deviations(panels: Sequence[FigurePanel], experiment: Experiment) -> str:
    points = [experiment.points[each] for panel in panels for curve in panel.curves.values() for each in curve]
    diverging = sum(not point.setting.stable for point in points)
    parts: tuple[tuple[Part, str], ...] = (("diversity", "Diversity"), ("upper", "the upper bound of sharpness"))
    words = [
        f"{name} is off the simulated mean by at most {percent(off(points, 'printed', part))} as printed and"
        f" {percent(off(points, 'corrected', part))} as corrected"
        for part, name in parts
    ]
    useless = int((said(points, "printed", "lower") < 0).sum())
    lower = f" The printed lower bound is below zero in {useless} of them." if useless else ""
    return f"{'; '.join(words)}. SAM diverges in {diverging} of {len(points)} settings.{lower}"
