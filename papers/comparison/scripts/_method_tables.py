# A record, not run at HEAD. A part of the scripts of commit a9af4e490407: `git checkout a9af4e490407`, studies/_method_tables.py.
"""Tables of methods on the pages *Does it work?* and *Which method should I use?*, from results of studies.

A cell is the mean over repetitions with half of its 95 % Student-t interval; differences are paired by repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plateaux.core.stats.intervals import Interval, paired_t_interval, t_interval
from plateaux.studies.claims.contrasts import ResultLike

ENSEMBLE, MEMBERS, TOGETHER = "ensemble (mean probability)", "mean of members", "members together"
Condition = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A number of every run: the first of `metrics` and `rows` that a run has."""

    title: str
    metric: str
    split: str
    row: str
    times: float = 100.0
    digits: int = 2
    higher_is_better: bool | None = True


def under_corruption(title: str, row: str = ENSEMBLE, part: str = "cACC") -> Column:
    return Column(title, "accuracy under corruption", "corrupted", f"{row} · {part}")


ACCURACY = Column("accuracy %", "accuracy", "test", ENSEMBLE)
MEMBER_ACCURACY = Column("members %", "accuracy", "test", MEMBERS)
CORRUPTED = under_corruption("under corruption %")
CORRUPTED_MEMBERS = under_corruption("members under corruption %", MEMBERS)
NLL = Column("NLL", "nll", "test", ENSEMBLE, times=1, digits=3, higher_is_better=False)
ECE = Column("ECE %", "ece", "test", ENSEMBLE, higher_is_better=False)
PASSES = Column("passes per member", "passes", "training", MEMBERS, times=1, digits=0, higher_is_better=None)


def auroc(title: str, name: str, score: str = "max_probability") -> Column:
    return Column(title, "ood", f"{name} ({name})", f"{TOGETHER} · {score} · auroc")


@dataclass(frozen=True, slots=True)
class Measured:
    """One number of one run, of a study that stores no rows."""

    condition: Condition
    repetition: int
    metric: str
    split: str
    row: str
    value: float


class Numbers:
    """Results of studies whose repetitions have equal seeds, by condition."""

    def __init__(self, results: Sequence[ResultLike]) -> None:
        self.values: dict[tuple[str, str, str], list[tuple[Condition, int, float]]] = {}
        for each in results:
            key = (each.metric, each.split, str(each.row))
            self.values.setdefault(key, []).append((each.condition, each.repetition, each.value))

    def by_repetition(self, condition: Condition, column: Column) -> dict[int, float]:
        """Return the numbers of one condition by repetition."""
        found = self.values.get((column.metric, column.split, column.row), [])
        return {number: column.times * value for own, number, value in found if dict(own) == dict(condition)}

    def only(self, repetitions: Container[int]) -> Numbers:
        """Return the numbers of some repetitions."""
        kept = Numbers([])
        for key, found in self.values.items():
            kept.values[key] = [each for each in found if each[1] in repetitions]
        return kept

    def mean(self, condition: Condition, column: Column) -> Interval | None:
        numbers = list(self.by_repetition(condition, column).values())
        return t_interval(numbers) if numbers else None

    def difference(self, condition: Condition, baseline: Condition, column: Column) -> Interval | None:
        """Return the mean paired difference from a baseline, over the repetitions that both have."""
        ours, theirs = self.by_repetition(condition, column), self.by_repetition(baseline, column)
        both = sorted(ours.keys() & theirs.keys())
        return paired_t_interval([ours[each] for each in both], [theirs[each] for each in both]) if both else None


def table(
    numbers: Numbers,
    conditions: Mapping[str, Condition],
    columns: Sequence[Column],
    baseline: Condition | None = None,
    *,
    extra: Mapping[str, Callable[[str], str]] | None = None,
) -> str:
    """Return a Markdown table of means, or of differences from a baseline; bold are those that exclude zero."""
    extra = extra or {}
    head = ["method", *(each.title for each in columns), *extra]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for label, condition in conditions.items():
        if baseline is not None and dict(condition) == dict(baseline):
            continue
        cells = [_cell(numbers, condition, baseline, column) for column in columns]
        lines.append(f"| {' | '.join([label, *cells, *(compute(label) for compute in extra.values())])} |")
    return "\n".join(lines)


def _cell(numbers: Numbers, condition: Condition, baseline: Condition | None, column: Column) -> str:
    if baseline is None:
        found = numbers.mean(condition, column)
        return "" if found is None else format_interval(found, column)
    found = numbers.difference(condition, baseline, column)
    if found is None:
        return ""
    text = format_interval(found, column, sign="+")
    return f"**{text}**" if found.excludes_zero else text


def format_interval(found: Interval, column: Column, sign: str = "") -> str:
    """Return the mean and half of its interval; the interval is left out where it rounds to no width."""
    value = f"{found.value:{sign}.{column.digits}f}"
    half = f"{found.half:.{column.digits}f}"
    return f"{value} ± {half}" if float(half) > 0 else value  # NaN with one repetition


def repetitions(results: Sequence[ResultLike]) -> int:
    return len({each.repetition for each in results})
