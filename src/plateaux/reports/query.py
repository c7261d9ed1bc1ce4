"""Queries on result rows: by condition, metric, split, and row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any, TypeVar

from plateaux.core import registry
from plateaux.core.errors import PlateauxError
from plateaux.core.row_names import MEAN_OF_MEMBERS, RowName
from plateaux.core.stats.comparisons import DEFAULT, Inference
from plateaux.core.stats.intervals import Interval, interval_from_stderr, t_interval
from plateaux.core.types import Estimate
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.studies.comparison import MAIN
from plateaux.studies.grid import condition_label
from plateaux.studies.result_rows import TRAINING, ResultRow

SHARPNESS = (  # reports show the first that was measured; scale-invariant measures come first
    *("worst_l2", "average_l2", "worst_linf", "average_linf", "fisher_rao", "relative_flatness"),
    *("top_eigenvalue", "trace", "sam_sharpness"),
)
CORRUPTED = "accuracy under corruption"
DIVERSITY = ("der", "variance", "kl", "disagreement", "mutual_information", "unique", "pds")
ROWS = (MEAN_OF_MEMBERS, *MAIN)
MANY = 10_000  # samples of a split: their t quantile is that of the normal distribution
Column = tuple[str, str, RowName]  # metric, split, row
Key = TypeVar("Key")


def result_label(result: ResultRow) -> str:
    """Return the label of a result's condition, or the name of its run if it has no factors."""
    return condition_label(result.condition) or PurePath(result.run).name


def base_name(metric: str) -> str:
    """Return the name of a metric without its options.

    >>> base_name("worst_l2(m=128; samples=512)")
    'worst_l2'
    """
    return metric.partition("(")[0].strip()


def by_condition(results: Iterable[ResultRow], metric: str, split: str, row: str) -> dict[str, list[ResultRow]]:
    """Return the results of one column by condition label."""
    by_label: dict[str, list[ResultRow]] = {}
    for result in results:
        if result.metric == metric and result.split == split and result.row == row:
            by_label.setdefault(result_label(result), []).append(result)
    return by_label


def mean_over_repetitions(repetitions: Sequence[ResultRow]) -> Interval:
    """Return the mean over repetitions; the interval of a single result is over its samples, or its members."""
    if len(repetitions) > 1:
        return t_interval([result.value for result in repetitions])
    (one,) = repetitions
    if one.stderr is None:
        return t_interval([one.value])
    over, count = ("members", one.members) if one.members > 1 else ("samples", MANY)
    return interval_from_stderr(Estimate(one.value, one.stderr), count, over=over)


def find_best(
    groups: Mapping[Key, Sequence[ResultRow]], *, higher_is_better: bool, inference: Inference = DEFAULT
) -> Key | None:
    """Return the group that is distinguished as the best over paired repetitions, if there is one."""
    numbers = [{result.repetition: result.value for result in several} for several in groups.values()]
    position = inference.find_best(numbers, higher_is_better=higher_is_better)
    return None if position is None else list(groups)[position]


def is_member(row: RowName) -> bool:
    """Return whether a row belongs to a single member."""
    return row.kind == "member" and not row.part


@lru_cache(maxsize=1024)
def metric_group(metric: str, split: str = "") -> str:
    """Return the group of a metric: performance, uncertainty, diversity, sharpness, cost, or other."""
    if split == TRAINING:
        return "cost"
    metric = metric.removesuffix(" by size")
    if metric != CORRUPTED:
        metric = metric.removesuffix(" under corruption")
    name = base_name(metric)
    if name in registry.probe.names():
        return "sharpness"
    if "corruption" in name or name == "mCE":
        return "performance"
    try:
        return get_metrics([metric])[metric].group
    except PlateauxError:  # an external metric
        return "other"


def first_measured(
    results: Iterable[ResultRow], names: Sequence[str], split: str | None = None
) -> tuple[str, str] | None:
    """Return the first metric, in the order of `names`, that has results, and its split."""
    measured = dict.fromkeys((result.metric, result.split) for result in results if split in (None, result.split))
    ranked = [
        (names.index(base_name(metric)), pos) for pos, (metric, _) in enumerate(measured) if base_name(metric) in names
    ]
    return list(measured)[min(ranked)[1]] if ranked else None


def default_split(results: Iterable[ResultRow], metric: str = "accuracy") -> str:
    """Return the split on which a metric was measured; `test` if it is among them."""
    measured = list(dict.fromkeys(result.split for result in results if result.metric == metric))
    return "test" if "test" in measured or not measured else measured[0]


def headline_row(results: Iterable[ResultRow], metric: str, split: str, wanted: Sequence[str] = MAIN) -> str | None:
    """Return the row that summarizes a run: the ensemble, or the mean of pairs or members."""
    rows = {result.row for result in results if result.metric == metric and result.split == split}
    return next((row for row in wanted if row in rows), None)


def swept_factor(results: Iterable[ResultRow], min_values: int = 3) -> str | None:
    """Return the numeric factor with the most values, if there are at least `min_values`: the x axis of curves."""
    values: dict[str, set[float]] = {}
    for condition in conditions(results):
        for name, value in condition.items():
            if is_number(value):
                values.setdefault(name, set()).add(float(value))
    best = max(values, key=lambda name: len(values[name]), default=None)
    return best if best is not None and len(values[best]) >= min_values else None


def conditions(results: Iterable[ResultRow]) -> list[Mapping[str, Any]]:
    """Return all distinct conditions, in order."""
    known: dict[int, Mapping[str, Any]] = {id(result.condition): result.condition for result in results}
    return list({condition_label(condition): condition for condition in known.values()}.values())


def is_number(value: object) -> bool:
    """Return whether the value of a factor is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def label_without(result: ResultRow, factor: str | None) -> str:
    """Return the label of a condition without one factor."""
    rest = {name: value for name, value in result.condition.items() if name != factor}
    return condition_label(rest) or ("all runs" if factor in result.condition else result_label(result))
