"""Every number of the figures and the claims, as data that JSON can hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from plateaux.core.stats.estimates import mean_of_independent
from plateaux.theory.captions import captions, off, percent
from plateaux.theory.experiment import FORMULAS, Experiment, FigurePanel, Point
from plateaux.theory.phi import Floats
from plateaux.theory.verdicts import judge


def record(experiment: Experiment) -> dict[str, Any]:
    """Return what is written as theory.json."""
    words = captions(experiment)
    figures = {
        name: {"caption": words[name], "panels": [_panel(panel, experiment) for panel in panels]}
        for name, panels in experiment.figures.items()
    }
    sizes = {"matrices": experiment.matrices, "starts": experiment.starts, "seed": experiment.seed}
    return {"format": 1, **sizes, "figures": figures, "claims": judge(experiment)}


def deviations(experiment: Experiment) -> list[list[str]]:
    """Return for each figure how far the formulas are from the simulation at most: printed, then corrected."""
    rows = []
    for name, panels in experiment.figures.items():
        points = [experiment.points[each] for panel in panels for curve in panel.curves.values() for each in curve]
        diverging = sum(not point.setting.stable for point in points)
        cells = [percent(off(points, formula, part)) for part in ("diversity", "upper") for formula in FORMULAS]
        rows.append([name, str(len(points)), str(diverging), *cells])
    return rows


def _panel(panel: FigurePanel, experiment: Experiment) -> dict[str, Any]:
    curves = {name: [_point(experiment.points[each]) for each in curve] for name, curve in panel.curves.items()}
    return {"title": panel.title, "varies": panel.varies, "curves": curves}


def _point(point: Point) -> dict[str, Any]:
    return {
        **asdict(point.setting),
        "stable": point.setting.stable,
        "simulated": {
            "diversity": _mean(point.simulated.diversity),
            "sharpness": _mean(point.simulated.sharpness),
        },
        **{formula: asdict(point.says[formula]) for formula in FORMULAS},
    }


def _mean(values: Floats) -> dict[str, float | None]:
    mean = mean_of_independent(values.tolist())
    return {"mean": mean.value, "error": mean.stderr}
