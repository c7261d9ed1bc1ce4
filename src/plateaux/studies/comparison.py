"""Conditions of a study side by side: means with their intervals, differences from a baseline, equal costs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from plateaux.core.formatting import format_with_stderr
from plateaux.core.row_names import ALL_MEMBERS, MEAN_OF_MEMBERS, MEAN_OF_PAIRS, MEAN_PROBABILITY, RowName, row_name
from plateaux.core.stats.intervals import Cost, CostPoint, Interval, at_equal_cost, paired_t_interval, t_interval
from plateaux.core.text_table import Table
from plateaux.core.types import Estimate
from plateaux.evaluation.splits import is_corrupted_split
from plateaux.studies.results import TRAINING, ResultRow

MAIN = (MEAN_PROBABILITY, ALL_MEMBERS, MEAN_OF_PAIRS, MEAN_OF_MEMBERS, RowName.member(0))
SUMMED = "cACC"
LENGTH = "epochs"  # the factor that makes a course of runs

Column = tuple[str, str, RowName]  # measure, on, row
Condition = Mapping[str, Any]


class Comparison:
    """The findings of a study, by condition and column."""

    def __init__(self, found: Sequence[ResultRow], baseline: Condition | None = None) -> None:
        self.baseline = dict(baseline or {})
        self.conditions: dict[str, Condition] = {}
        self.numbers: dict[tuple[str, Column], dict[int, float]] = {}
        self.facts: dict[Column, ResultRow] = {}
        for each in found:
            name, column = _name(each.condition), (each.metric, each.split, each.row)
            self.conditions.setdefault(name, each.condition)
            self.numbers.setdefault((name, column), {})[each.repetition] = each.value
            self.facts.setdefault(column, each)

    def columns(self) -> list[Column]:
        """Return one column for every measure: the row of the ensemble, of all together, or the members' mean."""
        rows: dict[tuple[str, str], list[RowName]] = {}
        for measure, on, row in self.facts:
            rows.setdefault((measure, on), []).append(row)
        found: list[Column] = []
        for (measure, on), there in rows.items():
            names = [*MAIN, *(row_name(row, SUMMED) for row in MAIN)]
            main = next((row for row in names if row in there), None)
            if main is not None and not is_corrupted_split(on):  # of single corruptions their sum is shown
                found.append((measure, on, main))
        return found

    def mean(self, condition: Condition, column: Column) -> Interval:
        """Return the mean over repetitions."""
        return t_interval(list(self.numbers.get((_name(condition), column), {}).values()))

    def difference(self, condition: Condition, column: Column) -> Interval:
        """Return the difference from the baseline, over the repetitions that both have."""
        mine = self.numbers.get((_name(condition), column), {})
        theirs = self.numbers.get((_name(self.against(condition) or {}), column), {})
        both = sorted(mine.keys() & theirs.keys())
        return paired_t_interval([mine[r] for r in both], [theirs[r] for r in both])

    def against(self, condition: Condition) -> Condition | None:
        """Return what a condition is compared with: a baseline that is the same in all its other factors."""
        for each in self.conditions.values():
            same = all(condition.get(name) == value for name, value in each.items() if name not in self.baseline)
            if same and self.baseline and all(each.get(name) == value for name, value in self.baseline.items()):
                return each
        return None

    def at_equal(self, condition: Condition, column: Column, by: Cost) -> tuple[float, Interval]:
        """Return the difference from the baseline at equal cost, each course made of runs of several lengths."""
        mine, theirs = self._courses(condition, column), self._courses(self.against(condition) or {}, column)
        both = sorted(mine.keys() & theirs.keys())
        if not both:
            return math.nan, paired_t_interval([], [])
        return at_equal_cost([mine[r] for r in both], [theirs[r] for r in both], by)

    def _courses(self, condition: Condition, column: Column) -> dict[int, list[CostPoint]]:
        found: dict[int, list[CostPoint]] = {}
        for name, each in self.conditions.items():
            if _name(_less(each)) != _name(_less(condition)):
                continue
            for repetition, number in self.numbers.get((name, column), {}).items():
                spent = [self.numbers.get((name, (by, TRAINING, MEAN_OF_MEMBERS)), {}) for by in get_args(Cost)]
                if all(repetition in each for each in spent):
                    found.setdefault(repetition, []).append(CostPoint(number, *(each[repetition] for each in spent)))
        return found

    def tables(self) -> list[Table]:
        """Return the tables: means, then differences from the baseline, then those at equal costs."""
        columns = self.columns()
        tables = [self._table("mean over repetitions", columns, list(self.conditions.values()), self.mean)]
        others = [each for each in self.conditions.values() if self.against(each) not in (None, each)]
        if others:
            title = "difference from " + ", ".join(f"{name}={value}" for name, value in self.baseline.items())
            rest = [column for column in columns if column[1] != TRAINING]
            tables.append(self._table(title, rest, others, self.difference))
            tables += self._equal(rest, others) if any(LENGTH in each for each in others) else []
        return tables

    def _table(self, title: str, columns: Sequence[Column], rows: Sequence[Condition], ask: Any) -> Table:
        header = ["", *(self._title(column) for column in columns)]
        cells = [[_words(each), *(self._told(each, column, ask) for column in columns)] for each in rows]
        return Table.from_text(
            title, header, cells, "± half of the 95 % Student-t interval over repetitions; none of a single one"
        )

    def _told(self, condition: Condition, column: Column, ask: Any) -> str:
        """Return a number in words, and how many of its repetitions made it where some have none."""
        made, there = ask(condition, column), len(self.numbers.get((_name(condition), column), {}))
        return self._shown(column, made) + (f" ({made.count} of {there})" if 0 < made.count < there else "")

    def _equal(self, columns: Sequence[Column], others: Sequence[Condition]) -> list[Table]:
        """Return a table for every kind of cost; runs that differ only in length are one course, and one row."""
        found = []
        courses = list({_name(_less(each)): each for each in others}.values())
        for by in get_args(Cost):
            rows = []
            for each in courses:
                there = [self.at_equal(each, column, by) for column in columns]
                cells = [self._shown(column, made) for column, (_, made) in zip(columns, there, strict=True)]
                rows.append([_words(_less(each)), f"{there[0][0]:.4g}" if there else "", *cells])
            header = ["", by, *(self._title(column) for column in columns)]
            found.append(
                Table.from_text(f"difference at equal {by}", header, rows, "at the largest cost that both came to")
            )
        return found

    def _title(self, column: Column) -> str:
        measure, on, _ = column
        return f"{measure}{'' if on == TRAINING else f', {on}'}{' %' if self.facts[column].percent else ''}"

    def _shown(self, column: Column, made: Interval) -> str:
        return (
            ""
            if math.isnan(made.value)
            else format_with_stderr(Estimate(made.value, made.half), self.facts[column].percent)
        )


def _name(condition: Condition) -> str:
    return json.dumps(condition, sort_keys=True, default=str)


def _less(condition: Condition) -> dict[str, Any]:
    return {name: value for name, value in condition.items() if name != LENGTH}


def _words(condition: Condition) -> str:
    return ", ".join(f"{name}={value}" for name, value in condition.items()) or "base"
