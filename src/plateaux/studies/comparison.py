"""Comparison of the conditions of a study: means, differences from a baseline, and differences at equal cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from plateaux.core.row_names import ALL_MEMBERS, MEAN_OF_MEMBERS, MEAN_OF_PAIRS, MEAN_PROBABILITY, RowName, row_name
from plateaux.core.stats.comparisons import DEFAULT, Inference, paired_difference
from plateaux.core.stats.intervals import Cost, CostPoint, Interval, at_equal_cost, paired_t_interval, t_interval
from plateaux.core.text_table import Cell, Table
from plateaux.evaluation.splits import is_corrupted_split
from plateaux.studies.grid import condition_label
from plateaux.studies.result_rows import TRAINING, ResultRow

MAIN = (MEAN_PROBABILITY, ALL_MEMBERS, MEAN_OF_PAIRS, MEAN_OF_MEMBERS, RowName.member(0))
SUMMED = "cACC"
LENGTH = "epochs"  # runs that differ only in this factor form a cost curve

Column = tuple[str, str, RowName]  # metric, split, row
Condition = Mapping[str, Any]
ComputeFn = Callable[[Condition, Column], Interval]


class Comparison:
    """The results of a study by condition and column."""

    def __init__(
        self, results: Sequence[ResultRow], baseline: Condition | None = None, inference: Inference = DEFAULT
    ) -> None:
        self.inference = inference
        self.baseline = dict(baseline or {})
        self.conditions: dict[str, Condition] = {}
        self.numbers: dict[tuple[str, Column], dict[int, float]] = {}
        self.examples: dict[Column, ResultRow] = {}
        for result in results:
            name, column = _key(result.condition), (result.metric, result.split, result.row)
            self.conditions.setdefault(name, result.condition)
            self.numbers.setdefault((name, column), {})[result.repetition] = result.value
            self.examples.setdefault(column, result)

    def columns(self) -> list[Column]:
        """Return one column per metric and split: the row of the ensemble, or the mean of pairs or members."""
        rows: dict[tuple[str, str], list[RowName]] = {}
        for metric, split, row in self.examples:
            rows.setdefault((metric, split), []).append(row)
        columns: list[Column] = []
        for (metric, split), available in rows.items():
            main = main_row(available)
            if main is not None and not is_corrupted_split(split):  # single corruptions are part of cACC
                columns.append((metric, split, main))
        return columns

    def mean(self, condition: Condition, column: Column) -> Interval:
        """Return the mean over repetitions."""
        return t_interval(list(self.numbers.get((_key(condition), column), {}).values()))

    def difference(self, condition: Condition, column: Column) -> Interval:
        """Return the difference from the baseline over the common repetitions."""
        ours = self.numbers.get((_key(condition), column), {})
        theirs = self.numbers.get((_key(self.baseline_for(condition) or {}), column), {})
        return paired_difference(ours, theirs)

    def baseline_for(self, condition: Condition) -> Condition | None:
        """Return the baseline of a condition: it has the same values in all other factors."""
        for each in self.conditions.values():
            same = all(condition.get(name) == value for name, value in each.items() if name not in self.baseline)
            if same and self.baseline and all(each.get(name) == value for name, value in self.baseline.items()):
                return each
        return None

    def at_equal_cost(self, condition: Condition, column: Column, by: Cost) -> tuple[float, Interval]:
        """Return the difference from the baseline at equal cost, from cost curves over runs of several lengths."""
        ours, theirs = (
            self._cost_curves(condition, column),
            self._cost_curves(self.baseline_for(condition) or {}, column),
        )
        both = sorted(ours.keys() & theirs.keys())
        if not both:
            return math.nan, paired_t_interval([], [])
        return at_equal_cost([ours[r] for r in both], [theirs[r] for r in both], by)

    def _cost_curves(self, condition: Condition, column: Column) -> dict[int, list[CostPoint]]:
        curves: dict[int, list[CostPoint]] = {}
        for name, each in self.conditions.items():
            if _key(_without_length(each)) != _key(_without_length(condition)):
                continue
            for repetition, number in self.numbers.get((name, column), {}).items():
                costs = [self.numbers.get((name, (by, TRAINING, MEAN_OF_MEMBERS)), {}) for by in get_args(Cost)]
                if all(repetition in cost for cost in costs):
                    point = CostPoint(number, *(cost[repetition] for cost in costs))
                    curves.setdefault(repetition, []).append(point)
        return curves

    def tables(self) -> list[Table]:
        """Return the tables of means, of differences from the baseline, and of differences at equal cost."""
        columns = self.columns()
        tables = [self._table("mean over repetitions", columns, list(self.conditions.values()), self.mean)]
        others = [each for each in self.conditions.values() if self.baseline_for(each) not in (None, each)]
        if others:
            title = f"difference from {condition_label(self.baseline)}"
            rest = [column for column in columns if column[1] != TRAINING]
            note = f" Bold: differs from the baseline: {self.inference.criterion}."
            tables.append(self._table(title, rest, others, self.difference, note))
            tables += self._equal_cost_tables(rest, others, note) if any(LENGTH in each for each in others) else []
        return tables

    def _table(
        self, title: str, columns: Sequence[Column], rows: Sequence[Condition], compute: ComputeFn, note: str = ""
    ) -> Table:
        header = ["", *(self._column_title(column) for column in columns)]
        cells = [self._cells(column, rows, [compute(each, column) for each in rows], bool(note)) for column in columns]
        lines = [[Cell(_label(each)), *(column[i] for column in cells)] for i, each in enumerate(rows)]
        caption = f"± is {self.inference.meaning} over repetitions; a single repetition has none.{note}"
        return Table(title, header, lines, caption)

    def _cells(
        self, column: Column, rows: Sequence[Condition], intervals: Sequence[Interval], are_differences: bool
    ) -> list[Cell]:
        """Return numbers with their errors, and the number of finite repetitions if some are not.

        Differences that are distinguished from zero are marked.
        """
        marks = self.inference.distinguished(intervals) if are_differences else [False] * len(rows)
        cells = []
        for condition, interval, mark in zip(rows, intervals, marks, strict=True):
            count, percent = len(self.numbers.get((_key(condition), column), {})), self.examples[column].percent
            text = "" if math.isnan(interval.value) else self.inference.format(interval, percent)
            cells.append(Cell(text + (f" ({interval.count} of {count})" if 0 < interval.count < count else ""), mark))
        return cells

    def _equal_cost_tables(self, columns: Sequence[Column], others: Sequence[Condition], note: str) -> list[Table]:
        """Return one table per kind of cost; runs that differ only in length form one cost curve and one row."""
        tables = []
        curves = list({_key(_without_length(each)): each for each in others}.values())
        for by in get_args(Cost):
            found = [[self.at_equal_cost(condition, column, by) for condition in curves] for column in columns]
            cells = [
                self._cells(column, curves, [interval for _, interval in each], are_differences=True)
                for column, each in zip(columns, found, strict=True)
            ]
            rows = []
            for i, condition in enumerate(curves):
                cost = f"{found[0][i][0]:.4g}" if found else ""
                rows.append([Cell(_label(_without_length(condition))), Cell(cost), *(column[i] for column in cells)])
            header = ["", by, *(self._column_title(column) for column in columns)]
            tables.append(
                Table(f"difference at equal {by}", header, rows, f"At the largest cost that both reach.{note}")
            )
        return tables

    def _column_title(self, column: Column) -> str:
        metric, split, _ = column
        return f"{metric}{'' if split == TRAINING else f', {split}'}{' %' if self.examples[column].percent else ''}"


def main_row(available: Sequence[RowName]) -> RowName | None:
    """Return the row that stands for a metric: that of the ensemble, or the mean of pairs or members."""
    names = [*MAIN, *(row_name(row, SUMMED) for row in MAIN)]
    return next((row for row in names if row in available), None)


def _key(condition: Condition) -> str:
    return json.dumps(condition, sort_keys=True, default=str)


def _without_length(condition: Condition) -> dict[str, Any]:
    return {name: value for name, value in condition.items() if name != LENGTH}


def _label(condition: Condition) -> str:
    return condition_label(condition) or "base"
