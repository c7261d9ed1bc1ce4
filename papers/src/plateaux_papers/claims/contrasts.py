"""Evidence from the results of a study: the difference of two conditions in each repetition, with its interval.

The section `[compare]` of a claim selects the metric and the conditions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from plateaux.errors import RunError
from plateaux.stats import t_interval
from plateaux_papers.claims.claim import Case, Claim, Compare, Evidence, MeasuredValue, Number

Condition = Mapping[str, Any]
DIGITS = 6  # significant digits in stored evidence


class ResultLike(Protocol):
    """One number of one run of a study."""

    @property
    def condition(self) -> Mapping[str, Any]: ...
    @property
    def repetition(self) -> int: ...
    @property
    def metric(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def row(self) -> str: ...
    @property
    def value(self) -> float: ...


def build_evidence(claim: Claim, compare: Compare, results: Sequence[ResultLike]) -> Evidence:
    """Return the evidence for a claim from the results of a study."""
    compared = [compare, *(compare.changed(changes) for changes in compare.also)]
    required = None
    if compare.required_effect is not None:
        required = compare.changed({"difference_from": None, **compare.required_effect})
    cases = {}
    for case in _measured_cases(claim, compare, results):
        first, *others = [mean_with_interval(differences(each, case, results)) for each in compared]
        effect = None if required is None else mean_with_interval(differences(required, case, results))
        cases[case] = Case(primary=(first,), also=tuple(others), required_effect=effect)
    return Evidence(claim=claim.name, precondition=minimum(compare.precondition, results), cases=cases)


def _measured_cases(claim: Claim, compare: Compare, results: Sequence[ResultLike]) -> list[str]:
    """Return the cases with results. Others are not yet run, but one must be."""
    matching = _select(results, compare.metric, compare.split)
    found = [
        case for case in claim.cases if any(_has_factors(each.condition, compare.conditions[case]) for each in matching)
    ]
    return found or list(claim.cases)


def differences(compare: Compare, case: str, results: Sequence[ResultLike]) -> list[float]:
    """Return the differences of a case from its baseline by repetition.

    With `difference_from`, the same difference at those factors is subtracted.
    """
    where = compare.conditions[case]
    here = _difference(compare, where, results)
    if compare.difference_from is None:
        return list(here.values())
    elsewhere = _difference(compare, {**where, **compare.difference_from}, results)
    return list(_subtract(here, elsewhere, compare.metric).values())


def _difference(compare: Compare, where: Condition, results: Sequence[ResultLike]) -> dict[int, float]:
    matching = _select(results, compare.metric, compare.split)
    selected = conditions(matching, where)
    if compare.baseline is None:
        return numbers(compare, selected, matching, results)
    shared = {factor: selected[0].get(factor) for factor in compare.same}
    baseline = conditions(matching, {**compare.baseline, **shared})
    reference = numbers(compare, baseline, matching, results)
    if not compare.minimum:
        return _subtract(numbers(compare, selected, matching, results), reference, compare.metric)
    others = [numbers(compare, [each], matching, results) for each in selected if each not in baseline]
    smallest = {number: min(each[number] for each in others) for number in set.intersection(*map(set, others))}
    return _subtract(smallest, reference, compare.metric)


def _subtract(ours: Mapping[int, float], reference: Mapping[int, float], metric: str) -> dict[int, float]:
    common = sorted(ours.keys() & reference.keys())
    if not common:
        raise RunError(f"No repetition has {metric!r} in both conditions of the comparison. Continue the study.")
    return {number: ours[number] - reference[number] for number in common}


def numbers(
    compare: Compare, selected: Sequence[Condition], matching: Sequence[ResultLike], results: Sequence[ResultLike]
) -> dict[int, float]:
    """Return the number of one condition by repetition, or the slope over several conditions."""
    if compare.slope_over is not None:
        return _slopes(compare, compare.slope_over, selected, matching, results)
    if len(selected) != 1:
        found = [dict(condition) for condition in selected]
        raise RunError(f"{len(selected)} conditions of the study match: {found}. Give more factors to select one.")
    (condition,) = selected
    rows = [by_repetition(matching, row, condition) for row in compare.rows]
    if compare.minus_row:
        subtracted = by_repetition(matching, compare.minus_row, condition)
        rows = [{number: value - subtracted[number] for number, value in row.items()} for row in rows]
    if compare.log10:
        if min(value for row in rows for value in row.values()) <= 0:
            raise RunError(f"{compare.metric!r} in {dict(condition)} is not positive, so it has no logarithm.")
        rows = [{number: float(np.log10(value)) for number, value in row.items()} for row in rows]
    scaled = {number: [compare.times * row[number] for row in rows] for number in rows[0]}
    return {
        number: values[0] if len(values) == 1 else _slope(range(len(values)), values)
        for number, values in scaled.items()
    }


def conditions(results: Sequence[ResultLike], where: Condition) -> list[Condition]:
    """Return all conditions with the given factors."""
    matching: list[Condition] = []
    for result in results:
        condition = result.condition
        if condition not in matching and _has_factors(condition, where):
            matching.append(condition)
    if not matching:
        raise RunError(f"No condition of the study has this metric and {dict(where)}.")
    return matching


def _has_factors(condition: Condition, where: Condition) -> bool:
    """Return whether a condition has the given factors; a list allows any of its values."""
    return all(_is_level(condition.get(name), value) for name, value in where.items())


def _is_level(level: Any, value: Any) -> bool:
    return bool(level == value) or (isinstance(value, list | tuple) and level in value)


def by_repetition(results: Sequence[ResultLike], row: str, condition: Condition) -> dict[int, float]:
    """Return the values of a row in one condition by repetition."""
    values = {each.repetition: each.value for each in results if each.row == row and each.condition == condition}
    if not values:
        raise RunError(f"There is no row {row!r} in {dict(condition)}.")
    for repetition, value in values.items():
        if not math.isfinite(value):
            raise RunError(
                f"{row!r} in {dict(condition)}, repetition {repetition}, is NaN or infinite, so there is no evidence."
            )
    return values


def minimum(number: Number | None, results: Sequence[ResultLike]) -> float | None:
    """Return the minimum of a number over conditions and repetitions."""
    if number is None:
        return None
    matching = _select(results, number.metric, number.split)
    rows = [by_repetition(matching, number.row, condition) for condition in conditions(matching, number.where)]
    return min(value for row in rows for value in row.values())


def _select(results: Sequence[ResultLike], metric: str, split: str) -> list[ResultLike]:
    return [result for result in results if (result.metric, result.split) == (metric, split)]


def _slopes(
    compare: Compare,
    x_axis: Number,
    selected: Sequence[Condition],
    matching: Sequence[ResultLike],
    results: Sequence[ResultLike],
) -> dict[int, float]:
    x_results = _select(results, x_axis.metric, x_axis.split)
    y_values = [by_repetition(matching, compare.rows[0], condition) for condition in selected]
    x_values = [by_repetition(x_results, x_axis.row, condition) for condition in selected]
    common = sorted(set.intersection(*(set(values) for values in (*y_values, *x_values))))
    points: dict[int, list[tuple[float, float]]] = {}
    for number in common:
        used = [i for i, condition in enumerate(selected) if _is_fitted(compare, condition, number, results)]
        points[number] = [(x_values[i][number], y_values[i][number]) for i in used]
    fewest = min((len(several) for several in points.values()), default=0)
    if fewest < 3 or min(min(point) for several in points.values() for point in several) <= 0:
        raise RunError(
            f"A slope needs at least 3 conditions per repetition, with positive numbers; a repetition has {fewest}."
        )
    return {number: _slope(*np.log(several).T) for number, several in points.items()}


def _is_fitted(compare: Compare, condition: Condition, repetition: int, results: Sequence[ResultLike]) -> bool:
    if compare.fitted is None or compare.precondition is None:
        return True
    matching = _select(results, compare.precondition.metric, compare.precondition.split)
    return by_repetition(matching, compare.precondition.row, condition)[repetition] >= compare.fitted


def _slope(x: ArrayLike, y: ArrayLike) -> float:
    return float(np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)[0])


def mean_with_interval(values: Sequence[float], what: str = "") -> MeasuredValue:
    """Return the mean over repetitions with its 95 % t interval; one repetition has no interval."""
    interval = t_interval(values)
    ends = (interval.low, interval.high) if interval.count > 1 else None
    return rounded(interval.value, ends, what).model_copy(update={"repetitions": interval.count})


def rounded(value: float, interval: tuple[float, float] | None, what: str = "") -> MeasuredValue:
    """Return a measured value, rounded to the digits that are stored."""
    low_high = None if interval is None else tuple(float(f"{end:.{DIGITS}g}") for end in interval)
    return MeasuredValue(value=float(f"{value:.{DIGITS}g}"), interval=low_high, what=what)
