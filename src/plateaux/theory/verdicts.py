"""What the simulation says of four claims of Lu et al. 2024, for the formulas as printed and as corrected.

Every answer is a dict that JSON can hold: the claim, the criterion, and for each formula a verdict (`reproduced`,
`not reproduced`, `inconclusive`) with the figures behind it, apart for settings in which SAM converges and diverges.
Intervals are Student's t over data matrices; where many settings are judged at once, all of them hold at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from plateaux.core.stats.estimates import mean_of_independent
from plateaux.theory.experiment import FORMULAS, Experiment, Formula, Pair, Point
from plateaux.theory.intervals import interval
from plateaux.theory.phi import Floats

Verdict = Literal["reproduced", "not reproduced", "inconclusive"]
PRECISION = 0.05  # the mean over settings must be known so well before an equality counts as seen
CLOSE = 0.9  # of a bound: what counts as near
REGIMES = ("converging", "diverging")

EQUALITY = (
    "the formula lies in the interval of the simulated mean in every setting, all intervals holding at once with 95 %,"
    f" and the ratio of simulation to formula, averaged over the settings, is known to {100 * PRECISION:g} %"
)
BOUND = "in no setting does the interval of the simulated mean, all holding at once with 95 %, lie beyond a bound"


def judge(experiment: Experiment) -> list[dict[str, Any]]:
    """Return the answers to all four claims."""
    return [diversity_of_sam(experiment), bounds_of_sam(experiment), parts(experiment), trade_off(experiment)]


def diversity_of_sam(experiment: Experiment) -> dict[str, Any]:
    """Claim 14: on the quadratic, SAM's diversity is phi(2k, 0) sigma^2."""
    answers = _by_formula(_points(experiment, False), _equality)
    return _answer(14, "SAM's diversity on the quadratic is phi(2k, 0) sigma^2", EQUALITY, answers)


def bounds_of_sam(experiment: Experiment) -> dict[str, Any]:
    """Claim 15: Theorem 1's bounds hold, and the simulation lies close to the upper one."""

    def both(points: Sequence[Point], formula: Formula) -> dict[str, Any]:
        found = _bounded(points, formula)
        low, high = found["simulation / upper bound"]["interval"]
        near: Verdict = "reproduced" if low > CLOSE else "not reproduced" if high < CLOSE else "inconclusive"
        return {**found, "verdict": _worst([found["verdict"], near])}

    answers = _by_formula(_points(experiment, False), both)
    criterion = f"{BOUND}; and simulation / upper bound, averaged over the settings, is above {CLOSE:g} with 95 %"
    return _answer(15, "Theorem 1's bounds hold, and simulation lies close to the upper one", criterion, answers)


def parts(experiment: Experiment) -> dict[str, Any]:
    """Claim 16: Theorem 2's diversity and bound hold."""

    def both(points: Sequence[Point], formula: Formula) -> dict[str, Any]:
        equal, bounded = _equality(points, formula), _bounded(points, formula)
        return {**bounded, **equal, "verdict": _worst([equal["verdict"], bounded["verdict"]])}

    answers = _by_formula(_points(experiment, True), both)
    return _answer(16, "Theorem 2's diversity and bound hold", f"diversity: {EQUALITY}; sharpness: {BOUND}", answers)


def trade_off(experiment: Experiment) -> dict[str, Any]:
    """Claim 17: at equal sharpness bound, training on subsets gives more diversity."""

    def compared(formula: Formula) -> dict[str, Any]:
        pairs = [pair for pair in experiment.pairs if pair.formula == formula]
        stable = [pair for pair in pairs if pair.whole.stable and pair.parts.stable]
        groups = {"converging": stable, "diverging": [pair for pair in pairs if pair not in stable]}
        found = {name: _differences(experiment, group) for name, group in groups.items() if group}
        return {"verdict": _worst([each["verdict"] for each in found.values()]), **found}

    criterion = (
        "simulated diversity on subsets less that on all data, on the same matrices at equal sharpness bound by the"
        " formula, has an interval above zero at every bound, all intervals holding at once with 95 %; converging: the"
        " most diverse k and rho at each bound; diverging: settings of Figure 1b"
    )
    claim = "at equal sharpness bound, training on subsets gives more diversity, in the stable regime too"
    return _answer(17, claim, criterion, {formula: compared(formula) for formula in FORMULAS})


def _points(experiment: Experiment, cut: bool) -> list[Point]:
    return [point for point in experiment.points.values() if (point.setting.parts > 1) is cut]


def _answer(number: int, claim: str, criterion: str, answers: dict[str, Any]) -> dict[str, Any]:
    return {"claim": number, "statement": claim, "criterion": criterion, **answers}


def _by_formula(
    points: Sequence[Point], judged: Callable[[Sequence[Point], Formula], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Judge the settings that converge and those that do not, by both formulas."""
    answers: dict[str, dict[str, Any]] = {}
    groups = [[point for point in points if point.setting.stable is stable] for stable in (True, False)]
    for formula in FORMULAS:
        found = {name: judged(group, formula) for name, group in zip(REGIMES, groups, strict=True) if group}
        answers[formula] = {"verdict": _worst([each["verdict"] for each in found.values()]), **found}
    return answers


def _equality(points: Sequence[Point], formula: Formula) -> dict[str, Any]:
    """Say whether the formula's diversity is the simulated one."""
    off = [point.simulated.diversity / point.says[formula].diversity - 1 for point in points]
    ranges = [interval(each, among=len(off)) for each in off]
    outside = [at for at, (low, high) in enumerate(ranges) if not low <= 0 <= high]
    worst = max(outside or range(len(off)), key=lambda at: abs(float(off[at].mean())))
    pooled = np.mean(off, 0)
    low, high = interval(pooled)
    verdict: Verdict = "not reproduced" if outside else "reproduced" if high - low < 2 * PRECISION else "inconclusive"
    return {
        "verdict": verdict,
        "settings": len(points),
        "settings whose interval excludes the formula": len(outside),
        "simulation / formula - 1": _number(pooled),
        "largest": {**_where(points[worst]), "mean": float(off[worst].mean()), "interval": list(ranges[worst])},
    }


def _bounded(points: Sequence[Point], formula: Formula) -> dict[str, Any]:
    """Say whether simulated sharpness stays within the formula's bounds."""
    ranges = [interval(point.simulated.sharpness, among=len(points)) for point in points]
    says = [point.says[formula] for point in points]
    above = [at for at, (low, _) in enumerate(ranges) if low > says[at].upper]
    below = [at for at, (_, high) in enumerate(ranges) if high < (says[at].lower or -np.inf)]
    shares = [point.simulated.sharpness / each.upper for point, each in zip(points, says, strict=True)]
    steepest = max(range(len(points)), key=lambda at: float(shares[at].mean()))
    found: dict[str, Any] = {
        "verdict": "not reproduced" if above or below else "reproduced",
        "settings": len(points),
        "settings above the upper bound": len(above),
        "simulation / upper bound": _number(np.mean(shares, 0)),
        "largest share of the upper bound": {**_where(points[steepest]), **_number(shares[steepest], len(points))},
    }
    if says[0].lower is not None:
        found["settings below the lower bound"] = len(below)
        found["settings whose lower bound is below zero"] = sum((each.lower or 0.0) < 0 for each in says)
    return found


def _differences(experiment: Experiment, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Say whether subsets are more diverse at each bound."""
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        whole, some = (experiment.points[each] for each in (pair.whole, pair.parts))
        more = some.simulated.diversity - whole.simulated.diversity
        sides = {"SAM": _both(whole, pair.formula), "subsets": _both(some, pair.formula)}
        rows.append({"bound": pair.bound, "more diversity": _number(more, len(pairs)), **sides})
    ranges = [row["more diversity"]["interval"] for row in rows]
    verdict: Verdict = "inconclusive"
    if all(low > 0 for low, _ in ranges):
        verdict = "reproduced"
    elif any(high < 0 for _, high in ranges):
        verdict = "not reproduced"
    return {"verdict": verdict, "bounds": rows}


def _both(point: Point, formula: Formula) -> dict[str, Any]:
    return {
        **_where(point),
        "diversity by the formula": point.says[formula].diversity,
        "diversity": _number(point.simulated.diversity),
        "sharpness": _number(point.simulated.sharpness),
    }


def _where(point: Point) -> dict[str, float]:
    return {"k": point.setting.k, "eta": point.setting.eta, "rho": point.setting.rho}


def _number(values: Floats, among: int = 1) -> dict[str, Any]:
    return {"mean": mean_of_independent(values.tolist()).value, "interval": list(interval(values, among=among))}


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    order: tuple[Verdict, ...] = ("not reproduced", "inconclusive", "reproduced")
    return min(verdicts, key=order.index)
