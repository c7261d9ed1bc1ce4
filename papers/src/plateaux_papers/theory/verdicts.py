"""Verdicts on four claims of Lu et al. 2024 by simulation, for the formulas as printed and as corrected.

Each answer is plain data for JSON: the claim, the criterion, and for each formula a verdict (`reproduced`,
`not reproduced`, `inconclusive`) with its numbers, separately for settings in which SAM converges and diverges.
Intervals are Student's t over data matrices; intervals of several settings hold simultaneously.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from plateaux.stats import interval_from_stderr, mean_of_independent
from plateaux_papers.theory.experiment import FORMULAS, Formula, Pair, Point, TheoryExperiment
from plateaux_papers.theory.phi import Floats

Verdict = Literal["reproduced", "not reproduced", "inconclusive"]
PRECISION = 0.05  # half-width of the mean over settings that an equality needs
CLOSE = 0.9  # fraction of a bound that counts as close to it
REGIMES = ("converging", "diverging")

EQUALITY = (
    "the formula lies in the interval of the simulated mean in every setting, all intervals holding at once with 95 %,"
    f" and the ratio of simulation to formula, averaged over the settings, is known to {100 * PRECISION:g} %"
)
BOUND = "in no setting does the interval of the simulated mean, all holding at once with 95 %, lie beyond a bound"


def judge_claims(experiment: TheoryExperiment) -> list[dict[str, Any]]:
    """Return the answers to all four claims."""
    judges = (judge_sam_diversity, judge_sam_bounds, judge_subsets, judge_trade_off)
    return [judge_claim(experiment) for judge_claim in judges]


def judge_sam_diversity(experiment: TheoryExperiment) -> dict[str, Any]:
    """Claim 14: on the quadratic, SAM's diversity is phi(2k, 0) sigma^2."""
    answers = _by_formula(_points(experiment, False), _judge_equality)
    return _answer(14, "SAM's diversity on the quadratic is phi(2k, 0) sigma^2", EQUALITY, answers)


def judge_sam_bounds(experiment: TheoryExperiment) -> dict[str, Any]:
    """Claim 15: Theorem 1's bounds hold, and the simulation lies close to the upper one."""

    def judge_both(points: Sequence[Point], formula: Formula) -> dict[str, Any]:
        bounds = _judge_bounds(points, formula)
        low, high = bounds["simulation / upper bound"]["interval"]
        near: Verdict = "reproduced" if low > CLOSE else "not reproduced" if high < CLOSE else "inconclusive"
        return {**bounds, "verdict": _weakest([bounds["verdict"], near])}

    answers = _by_formula(_points(experiment, False), judge_both)
    criterion = f"{BOUND}; and simulation / upper bound, averaged over the settings, is above {CLOSE:g} with 95 %"
    return _answer(15, "Theorem 1's bounds hold, and simulation lies close to the upper one", criterion, answers)


def judge_subsets(experiment: TheoryExperiment) -> dict[str, Any]:
    """Claim 16: Theorem 2's diversity and bound hold."""

    def judge_both(points: Sequence[Point], formula: Formula) -> dict[str, Any]:
        equality, bounds = _judge_equality(points, formula), _judge_bounds(points, formula)
        return {**bounds, **equality, "verdict": _weakest([equality["verdict"], bounds["verdict"]])}

    answers = _by_formula(_points(experiment, True), judge_both)
    return _answer(16, "Theorem 2's diversity and bound hold", f"diversity: {EQUALITY}; sharpness: {BOUND}", answers)


def judge_trade_off(experiment: TheoryExperiment) -> dict[str, Any]:
    """Claim 17: at equal sharpness bound, training on subsets gives more diversity."""

    def judge_pairs(formula: Formula) -> dict[str, Any]:
        pairs = [pair for pair in experiment.pairs if pair.formula == formula]
        stable = [pair for pair in pairs if pair.full.stable and pair.subsets.stable]
        groups = {"converging": stable, "diverging": [pair for pair in pairs if pair not in stable]}
        answers = {name: _judge_differences(experiment, group) for name, group in groups.items() if group}
        return {"verdict": _weakest([each["verdict"] for each in answers.values()]), **answers}

    criterion = (
        "simulated diversity on subsets less that on all data, on the same matrices at equal sharpness bound by the"
        " formula, has an interval above zero at every bound, all intervals holding at once with 95 %; converging: the"
        " most diverse k and rho at each bound; diverging: settings of Figure 1b"
    )
    claim = "at equal sharpness bound, training on subsets gives more diversity, in the stable regime too"
    return _answer(17, claim, criterion, {formula: judge_pairs(formula) for formula in FORMULAS})


def _points(experiment: TheoryExperiment, on_subsets: bool) -> list[Point]:
    return [point for point in experiment.points.values() if (point.setting.parts > 1) is on_subsets]


def _answer(number: int, claim: str, criterion: str, answers: dict[str, Any]) -> dict[str, Any]:
    return {"claim": number, "statement": claim, "criterion": criterion, **answers}


def _by_formula(
    points: Sequence[Point], judge_group: Callable[[Sequence[Point], Formula], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Judge the converging and the diverging settings by both formulas."""
    answers: dict[str, dict[str, Any]] = {}
    groups = [[point for point in points if point.setting.stable is stable] for stable in (True, False)]
    for formula in FORMULAS:
        regimes = {name: judge_group(group, formula) for name, group in zip(REGIMES, groups, strict=True) if group}
        answers[formula] = {"verdict": _weakest([each["verdict"] for each in regimes.values()]), **regimes}
    return answers


def _judge_equality(points: Sequence[Point], formula: Formula) -> dict[str, Any]:
    """Judge whether the predicted diversity equals the simulated one."""
    deviations = [point.simulated.diversity / point.predictions[formula].diversity - 1 for point in points]
    ranges = [_interval(each, simultaneous=len(deviations)) for each in deviations]
    outside = [at for at, (low, high) in enumerate(ranges) if not low <= 0 <= high]
    largest = max(outside or range(len(deviations)), key=lambda at: abs(float(deviations[at].mean())))
    pooled = np.mean(deviations, 0)
    low, high = _interval(pooled)
    verdict: Verdict = "not reproduced" if outside else "reproduced" if high - low < 2 * PRECISION else "inconclusive"
    return {
        "verdict": verdict,
        "settings": len(points),
        "settings whose interval excludes the formula": len(outside),
        "simulation / formula - 1": _mean_and_interval(pooled),
        "largest": {
            **_parameters(points[largest]),
            "mean": float(deviations[largest].mean()),
            "interval": list(ranges[largest]),
        },
    }


def _judge_bounds(points: Sequence[Point], formula: Formula) -> dict[str, Any]:
    """Judge whether the simulated sharpness stays within the predicted bounds."""
    ranges = [_interval(point.simulated.sharpness, simultaneous=len(points)) for point in points]
    predicted = [point.predictions[formula] for point in points]
    above = [at for at, (low, _) in enumerate(ranges) if low > predicted[at].upper]
    below = [at for at, (_, high) in enumerate(ranges) if high < (predicted[at].lower or -np.inf)]
    shares = [point.simulated.sharpness / each.upper for point, each in zip(points, predicted, strict=True)]
    sharpest = max(range(len(points)), key=lambda at: float(shares[at].mean()))
    answer: dict[str, Any] = {
        "verdict": "not reproduced" if above or below else "reproduced",
        "settings": len(points),
        "settings above the upper bound": len(above),
        "simulation / upper bound": _mean_and_interval(np.mean(shares, 0)),
        "largest share of the upper bound": {
            **_parameters(points[sharpest]),
            **_mean_and_interval(shares[sharpest], len(points)),
        },
    }
    if predicted[0].lower is not None:
        answer["settings below the lower bound"] = len(below)
        answer["settings whose lower bound is below zero"] = sum((each.lower or 0.0) < 0 for each in predicted)
    return answer


def _judge_differences(experiment: TheoryExperiment, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Judge whether training on subsets is more diverse at each sharpness bound."""
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        full, subsets = (experiment.points[each] for each in (pair.full, pair.subsets))
        more = subsets.simulated.diversity - full.simulated.diversity
        sides = {"SAM": _describe(full, pair.formula), "subsets": _describe(subsets, pair.formula)}
        rows.append({"bound": pair.bound, "more diversity": _mean_and_interval(more, len(pairs)), **sides})
    ranges = [row["more diversity"]["interval"] for row in rows]
    verdict: Verdict = "inconclusive"
    if all(low > 0 for low, _ in ranges):
        verdict = "reproduced"
    elif any(high < 0 for _, high in ranges):
        verdict = "not reproduced"
    return {"verdict": verdict, "bounds": rows}


def _describe(point: Point, formula: Formula) -> dict[str, Any]:
    return {
        **_parameters(point),
        "diversity by the formula": point.predictions[formula].diversity,
        "diversity": _mean_and_interval(point.simulated.diversity),
        "sharpness": _mean_and_interval(point.simulated.sharpness),
    }


def _parameters(point: Point) -> dict[str, float]:
    return {"k": point.setting.k, "eta": point.setting.eta, "rho": point.setting.rho}


def _mean_and_interval(values: Floats, simultaneous: int = 1) -> dict[str, Any]:
    mean = mean_of_independent(values.tolist()).value
    return {"mean": mean, "interval": list(_interval(values, simultaneous=simultaneous))}


def _interval(values: Floats, *, simultaneous: int = 1) -> tuple[float, float]:
    interval = interval_from_stderr(
        mean_of_independent(values.tolist()), len(values), over="data matrices", simultaneous=simultaneous
    )
    return interval.low, interval.high


def _weakest(verdicts: Sequence[Verdict]) -> Verdict:
    order: tuple[Verdict, ...] = ("not reproduced", "inconclusive", "reproduced")
    return min(verdicts, key=order.index)
