"""Evidence from the numbers of a study: in every repetition one condition less another, then a mean with its interval.

A claim says in `[compare]` which numbers of which conditions these are. Numbers are anything with the fields of a
finding: condition, repetition, measure, on, row, number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from plateaux.core.errors import RunError
from plateaux.core.formatting import round_significant
from plateaux.core.stats.intervals import t_interval
from plateaux.studies.claims.claim import Case, Claim, Compare, Evidence, MeasuredValue, Number

Condition = Mapping[str, Any]
DIGITS = 6  # more would be noise, and a diff in every line


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


def build_evidence(claim: Claim, compare: Compare, findings: Sequence[ResultLike]) -> Evidence:
    """Return what a study's numbers say of a claim."""
    others = [Compare.model_validate({**compare.model_dump(), **changes}) for changes in compare.also]
    cases = {}
    for case in claim.cases:
        first, *more = [mean_with_interval(differences(each, case, findings)) for each in (compare, *others)]
        cases[case] = Case(primary=(first,), also=tuple(more))
    return Evidence(claim=claim.name, precondition=minimum(compare.precondition, findings), cases=cases)


def differences(compare: Compare, case: str, findings: Sequence[ResultLike]) -> list[float]:
    """Return the case's number less the other condition's, by repetition; less the same elsewhere where it is asked."""
    wanted = compare.conditions[case]
    here = _difference(compare, wanted, findings)
    if compare.difference_from is None:
        return list(here.values())
    return list(
        _less(here, _difference(compare, {**wanted, **compare.difference_from}, findings), compare.metric).values()
    )


def _difference(compare: Compare, wanted: Condition, findings: Sequence[ResultLike]) -> dict[int, float]:
    mine = [each for each in findings if (each.metric, each.split) == (compare.metric, compare.split)]
    of = conditions(mine, wanted)
    if compare.baseline is None:
        return numbers(compare, of, mine, findings)
    against = conditions(mine, {**compare.baseline, **{factor: of[0].get(factor) for factor in compare.same}})
    theirs = numbers(compare, against, mine, findings)
    if not compare.minimum:
        return _less(numbers(compare, of, mine, findings), theirs, compare.metric)
    others = [numbers(compare, [each], mine, findings) for each in of if each not in against]
    smallest = {at: min(each[at] for each in others) for at in set.intersection(*map(set, others))}
    return _less(smallest, theirs, compare.metric)


def _less(ours: Mapping[int, float], theirs: Mapping[int, float], measure: str) -> dict[int, float]:
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise RunError(f"No repetition has {measure!r} in both of the conditions to be compared; run the study on")
    return {at: ours[at] - theirs[at] for at in both}


def numbers(
    compare: Compare, at: Sequence[Condition], mine: Sequence[ResultLike], findings: Sequence[ResultLike]
) -> dict[int, float]:
    """Return the number of one condition by repetition, or of several the slope over them."""
    if compare.slope_over is not None:
        return _slopes(compare, compare.slope_over, at, mine, findings)
    if len(at) != 1:
        raise RunError(f"{len(at)} conditions of the study are as told: {[dict(each) for each in at]}; tell more")
    table = [by_repetition(mine, row, at[0]) for row in compare.rows]
    if compare.minus_row:
        without = by_repetition(mine, compare.minus_row, at[0])
        table = [{number: value - without[number] for number, value in row.items()} for row in table]
    if compare.log10:
        if min(value for row in table for value in row.values()) <= 0:
            raise RunError(f"{compare.metric!r} where {dict(at[0])} is not above zero, so it has no logarithm")
        table = [{number: float(np.log10(value)) for number, value in row.items()} for row in table]
    found = {number: [compare.times * row[number] for row in table] for number in table[0]}
    return {number: row[0] if len(row) == 1 else _slope(range(len(row)), row) for number, row in found.items()}


def conditions(findings: Sequence[ResultLike], where: Condition) -> list[Condition]:
    """Return the conditions that are as told."""
    found: list[Condition] = []
    for each in findings:
        if each.condition not in found and all(each.condition.get(name) == value for name, value in where.items()):
            found.append(each.condition)
    if not found:
        raise RunError(f"No condition of the study has this measure and {dict(where)}")
    return found


def by_repetition(findings: Sequence[ResultLike], row: str, condition: Condition) -> dict[int, float]:
    """Return the numbers of a row in one condition."""
    found = {each.repetition: each.value for each in findings if each.row == row and each.condition == condition}
    if not found:
        raise RunError(f"There is no row {row!r} where {dict(condition)}")
    for repetition, number in found.items():
        if not math.isfinite(number):
            raise RunError(
                f"{row!r} of repetition {repetition} where {dict(condition)} is no number, so nothing follows"
            )
    return found


def minimum(number: Number | None, findings: Sequence[ResultLike]) -> float | None:
    """Return the lowest of a number over conditions and repetitions."""
    if number is None:
        return None
    mine = [each for each in findings if (each.metric, each.split) == (number.metric, number.split)]
    rows = [by_repetition(mine, number.row, each) for each in conditions(mine, number.where)]
    return min(value for row in rows for value in row.values())


def _slopes(
    compare: Compare, by: Number, at: Sequence[Condition], mine: Sequence[ResultLike], findings: Sequence[ResultLike]
) -> dict[int, float]:
    axis = [each for each in findings if (each.metric, each.split) == (by.metric, by.split)]
    heights = [by_repetition(mine, compare.rows[0], each) for each in at]
    places = [by_repetition(axis, by.row, each) for each in at]
    shared = sorted(set.intersection(*(set(each) for each in (*heights, *places))))
    points: dict[int, list[tuple[float, float]]] = {}
    for number in shared:
        used = [place for place, each in enumerate(at) if _is_fitted(compare, each, number, findings)]
        points[number] = [(places[place][number], heights[place][number]) for place in used]
    least = min((len(each) for each in points.values()), default=0)
    if least < 3 or min(min(point) for each in points.values() for point in each) <= 0:
        raise RunError(f"A slope takes three conditions in one repetition, all numbers above zero; {least} are there")
    return {number: _slope(*np.log(each).T) for number, each in points.items()}


def _is_fitted(compare: Compare, condition: Condition, repetition: int, findings: Sequence[ResultLike]) -> bool:
    if compare.fitted is None or compare.precondition is None:
        return True
    asked = compare.precondition
    mine = [each for each in findings if (each.metric, each.split) == (asked.metric, asked.split)]
    return by_repetition(mine, asked.row, condition)[repetition] >= compare.fitted


def _slope(x: ArrayLike, y: ArrayLike) -> float:
    return float(np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)[0])


def mean_with_interval(values: Sequence[float], what: str = "") -> MeasuredValue:
    """Return the mean of what was repeated, with its 95 % t interval; of one number there is none."""
    found = t_interval(values)
    made = rounded(found.value, (found.low, found.high) if found.count > 1 else None, what)
    return made.model_copy(update={"repetitions": found.count})


def rounded(value: float, around: tuple[float, float] | None, what: str = "") -> MeasuredValue:
    """Return a figure with as many digits as are worth keeping."""
    ends = None if around is None else (round_significant(around[0], DIGITS), round_significant(around[1], DIGITS))
    return MeasuredValue(value=round_significant(value, DIGITS), interval=ends, what=what)
