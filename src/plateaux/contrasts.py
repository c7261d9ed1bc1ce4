"""Evidence from the numbers of a study: in every repetition one condition less another, then a mean with its interval.

A claim says in `[compare]` which numbers of which conditions these are. Numbers are anything with the fields of a
finding: condition, repetition, measure, on, row, number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from plateaux.errors import RunError
from plateaux.ledger import Case, Claim, Compare, Evidence, Figure
from plateaux.theory.intervals import interval

Condition = Mapping[str, Any]
DIGITS = 6  # more would be noise, and a diff in every line


class Found(Protocol):
    """One number of one run of a study."""

    @property
    def condition(self) -> Mapping[str, Any]: ...
    @property
    def repetition(self) -> int: ...
    @property
    def measure(self) -> str: ...
    @property
    def on(self) -> str: ...
    @property
    def row(self) -> str: ...
    @property
    def number(self) -> float: ...


def evidence_of(claim: Claim, compare: Compare, findings: Sequence[Found]) -> Evidence:
    """Return what a study's numbers say of a claim."""
    mine = [each for each in findings if (each.measure, each.on) == (compare.measure, compare.on)]
    cases = {}
    for case in claim.cases:
        of = only(mine, compare.of[case])
        against = only(mine, {**compare.against, **{factor: of.get(factor) for factor in compare.same}})
        cases[case] = Case(primary=(repeated(differences(compare, of, against, mine)),))
    return Evidence(claim=claim.name, cases=cases)


def only(findings: Sequence[Found], where: Condition) -> Condition:
    """Return the one condition that is as told."""
    found: list[Condition] = []
    for each in findings:
        if each.condition not in found and all(each.condition.get(name) == value for name, value in where.items()):
            found.append(each.condition)
    if len(found) != 1:
        raise RunError(f"{len(found)} conditions of the study have this measure and {dict(where)}; it takes one")
    return found[0]


def differences(compare: Compare, of: Condition, against: Condition, findings: Sequence[Found]) -> list[float]:
    """Return the paired differences by repetition; of several rows, the slopes of the differences over them."""
    table = []
    for row in compare.rows:
        ours, theirs = (_by_repetition(findings, row, condition) for condition in (of, against))
        table.append([compare.times * (ours[at] - theirs[at]) for at in sorted(ours.keys() & theirs.keys())])
    if not all(table):
        raise RunError(f"No repetition has {compare.rows[0]!r} in both {dict(of)} and {dict(against)}")
    if len(table) == 1:
        return table[0]
    return [float(each) for each in np.polyfit(np.arange(len(table)), np.array(table), 1)[0]]


def repeated(values: Sequence[float], what: str = "") -> Figure:
    """Return the mean of what was repeated, with its 95 % t interval; of one number there is none."""
    found = np.asarray(values, float)
    return figure(float(found.mean()), interval(found) if len(found) > 1 else None, what)


def figure(value: float, around: tuple[float, float] | None, what: str = "") -> Figure:
    """Return a figure with as many digits as are worth keeping."""
    ends = None if around is None else (_short(around[0]), _short(around[1]))
    return Figure(value=_short(value), interval=ends, what=what)


def _by_repetition(findings: Sequence[Found], row: str, condition: Condition) -> dict[int, float]:
    return {each.repetition: each.number for each in findings if each.row == row and each.condition == condition}


def _short(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
