"""All numbers of the figures and the claims as plain data for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from plateaux.stats import mean_of_independent
from plateaux_papers.theory.captions import captions, deviation_percent, format_largest
from plateaux_papers.theory.experiment import FORMULAS, FigurePlot, Point, TheoryExperiment
from plateaux_papers.theory.phi import Floats
from plateaux_papers.theory.verdicts import judge_claims


def record(experiment: TheoryExperiment) -> dict[str, Any]:
    """Return the contents of theory.json."""
    texts = captions(experiment)
    figures = {
        name: {"caption": texts[name], "panels": [_plot_record(plot, experiment) for plot in plots]}
        for name, plots in experiment.figures.items()
    }
    sizes = {"matrices": experiment.matrices, "starts": experiment.starts, "seed": experiment.seed}
    return {"format": 1, **sizes, "figures": figures, "claims": judge_claims(experiment)}


def deviations(experiment: TheoryExperiment) -> list[list[str]]:
    """Return for each figure the largest deviation of the printed and the corrected formulas from the simulation."""
    rows = []
    for name, plots in experiment.figures.items():
        points = [experiment.points[each] for plot in plots for curve in plot.curves.values() for each in curve]
        diverging = sum(not point.setting.stable for point in points)
        cells = [
            format_largest(deviation_percent(points, formula, part))
            for part in ("diversity", "upper")
            for formula in FORMULAS
        ]
        rows.append([name, str(len(points)), str(diverging), *cells])
    return rows


def _plot_record(plot: FigurePlot, experiment: TheoryExperiment) -> dict[str, Any]:
    curves = {name: [_point(experiment.points[each]) for each in curve] for name, curve in plot.curves.items()}
    return {"title": plot.title, "varies": plot.varies, "curves": curves}


def _point(point: Point) -> dict[str, Any]:
    return {
        **asdict(point.setting),
        "stable": point.setting.stable,
        "simulated": {
            "diversity": _mean(point.simulated.diversity),
            "sharpness": _mean(point.simulated.sharpness),
        },
        **{formula: asdict(point.predictions[formula]) for formula in FORMULAS},
    }


def _mean(values: Floats) -> dict[str, float | None]:
    mean = mean_of_independent(values.tolist())
    return {"mean": mean.value, "error": mean.stderr}
