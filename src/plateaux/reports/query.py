"""Findings picked apart: by condition, by measure, by row; and which of them a figure is about."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from plateaux.core import registry
from plateaux.core.errors import PlateauxError
from plateaux.core.row_names import MEAN_OF_MEMBERS, RowName
from plateaux.core.stats.intervals import Interval, t_interval, t_quantile
from plateaux.core.types import Estimate
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.studies.comparison import MAIN
from plateaux.studies.grid import condition_label
from plateaux.studies.results import TRAINING, ResultRow

SHARPNESS = (  # the first that was asked is shown: those before the others that stay when layers are rescaled
    *("worst_l2", "average_l2", "worst_linf", "average_linf", "fisher_rao", "relative_flatness"),
    *("top_eigenvalue", "trace", "sam_sharpness"),
)
DIVERSITY = ("der", "variance", "kl", "disagreement", "mutual_information", "unique", "pds")
ROWS = (MEAN_OF_MEMBERS, *MAIN)
Column = tuple[str, str, RowName]  # measure, on, row


def result_label(each: ResultRow) -> str:
    """Return what the condition of a finding is called; without factors, its run."""
    return condition_label(each.condition) or PurePath(each.run).name


def bare(measure: str) -> str:
    """Return a measure's name without its options.

    >>> bare("worst_l2(m=128; samples=512)")
    'worst_l2'
    """
    return measure.partition("(")[0].strip()


def by_condition(findings: Iterable[ResultRow], measure: str, on: str, row: str) -> dict[str, list[ResultRow]]:
    """Return the findings of one column by what their condition is called."""
    found: dict[str, list[ResultRow]] = {}
    for each in findings:
        if each.metric == measure and each.split == on and each.row == row:
            found.setdefault(result_label(each), []).append(each)
    return found


def over(several: Sequence[ResultRow]) -> Estimate:
    """Return the mean over repetitions with its standard error; of a single one, its own error."""
    if len(several) == 1:
        return Estimate(several[0].value, several[0].stderr)
    made = t_interval([each.value for each in several])
    return Estimate(made.value, standard_error(made))


def standard_error(made: Interval) -> float | None:
    """Return the standard error that a Student-t interval was made of."""
    return None if math.isnan(made.half) else made.half / t_quantile((1 + made.level) / 2, made.count - 1)


def is_member(row: RowName) -> bool:
    """Return whether a row holds the number of one member."""
    return row.kind == "member" and not row.part


@lru_cache(maxsize=1024)
def metric_question(measure: str, on: str = "") -> str:
    """Return what a measure asks: performance, uncertainty, diversity, sharpness, cost, or other."""
    if on == TRAINING:
        return "cost"
    name = bare(measure.removesuffix(" by size"))
    if name in registry.probe.names():
        return "sharpness"
    if "corruption" in name or name == "mCE":
        return "performance"
    try:
        return get_metrics([measure.removesuffix(" by size")])[measure.removesuffix(" by size")].group
    except PlateauxError:  # a measure from outside
        return "other"


def first_measured(
    findings: Iterable[ResultRow], names: Sequence[str], on: str | None = None
) -> tuple[str, str] | None:
    """Return the first measure, by the order of names, that something was found of, and on which samples."""
    there = dict.fromkeys((each.metric, each.split) for each in findings if on in (None, each.split))
    ranked = [(names.index(bare(measure)), pos) for pos, (measure, _) in enumerate(there) if bare(measure) in names]
    return list(there)[min(ranked)[1]] if ranked else None


def default_split(findings: Iterable[ResultRow], measure: str = "accuracy") -> str:
    """Return the samples that a measure was taken on: the test samples where it was."""
    there = list(dict.fromkeys(each.split for each in findings if each.metric == measure))
    return "test" if "test" in there or not there else there[0]


def headline_row(findings: Iterable[ResultRow], measure: str, on: str, wanted: Sequence[str] = MAIN) -> str | None:
    """Return the row that stands for all: the ensemble's, or the mean of pairs or members."""
    rows = {each.row for each in findings if each.metric == measure and each.split == on}
    return next((row for row in wanted if row in rows), None)


def swept_factor(findings: Iterable[ResultRow], least: int = 3) -> str | None:
    """Return the factor of numbers that takes most values, if it takes three: the one a curve goes along."""
    values: dict[str, set[float]] = {}
    for condition in conditions(findings):
        for name, value in condition.items():
            if is_number(value):
                values.setdefault(name, set()).add(float(value))
    best = max(values, key=lambda name: len(values[name]), default=None)
    return best if best is not None and len(values[best]) >= least else None


def conditions(findings: Iterable[ResultRow]) -> list[Mapping[str, Any]]:
    """Return the conditions there are, in order."""
    known: dict[int, Mapping[str, Any]] = {id(each.condition): each.condition for each in findings}
    return list({condition_label(each): each for each in known.values()}.values())


def is_number(value: object) -> bool:
    """Say whether the value of a factor is a number that a curve can go along."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def without(each: ResultRow, factor: str | None) -> str:
    """Return what a condition is called but for one factor."""
    rest = {name: value for name, value in each.condition.items() if name != factor}
    return condition_label(rest) or ("all runs" if factor in each.condition else result_label(each))
