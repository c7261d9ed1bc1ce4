"""How robust: what measurements under corruptions come to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from plateaux.core.errors import DataError
from plateaux.core.row_names import RowName
from plateaux.core.stats.estimates import mean_of_paired
from plateaux.core.types import Estimate
from plateaux.evaluation.results import MetricResult

Baseline = Mapping[str, Sequence[float]]
"""Errors of the network that counts as 1: five numbers, one a severity, for each corruption."""

SHARED_SAMPLES = "error: the mean of the parts' errors, an upper bound, for all parts share their samples"


def robustness(found: Sequence[MetricResult], baseline: Baseline | None = None) -> list[MetricResult]:
    """Return accuracies under corruption summed up: by kind, by severity, over all (cACC), and as mCE.

    Without a baseline the mean corruption error is not normalized, and is called so.
    """
    parts = [each for each in found if each.metric == "accuracy" and "corruption" in each.data]
    if not parts:
        return []
    accuracies = {(str(each.data["corruption"]), int(each.data["severity"])): each.rows for each in parts}
    kinds = list(dict.fromkeys(kind for kind, _ in accuracies))
    levels = sorted({level for _, level in accuracies})
    sources = sorted({str(each.data["source"]) for each in parts})
    rows: dict[RowName, Estimate] = {}
    for row in parts[0].rows:
        table = {where: each[row] for where, each in accuracies.items()}
        rows[row.with_part("cACC")] = mean_of_paired(list(table.values()))
        for level in levels:
            rows[row.with_part(f"severity {level}")] = mean_of_paired(
                [v for (_, at), v in table.items() if at == level]
            )
        for kind in kinds:
            rows[row.with_part(kind)] = mean_of_paired([v for (each, _), v in table.items() if each == kind])
    about = {key: value for key, value in parts[0].data.items() if key not in ("corruption", "severity", "source")}
    data = {**about, "corruptions": kinds, "severities": levels, "source": ", ".join(sources)}
    convention = f"mean accuracy over {len(kinds)} corruptions x {len(levels)} severities; {SHARED_SAMPLES}"
    summary = replace(parts[0], metric="accuracy under corruption", split="corrupted", rows=rows, data=data,
                      definition=convention, percent=True)  # fmt: skip
    return [summary, _mean_error(summary, accuracies, baseline)]


def read_baseline(file: Path) -> Baseline:
    """Return the errors in a JSON file: {"fog": [0.18, 0.25, ...], ...}, as shares and not in percent."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        table = {str(kind): [float(value) for value in values] for kind, values in tree.items()}
    except (OSError, ValueError, TypeError, AttributeError) as problem:
        raise DataError(f"{file} is no table of errors ({problem}); " + _WANTED) from None
    if any(len(values) != 5 or not all(0 < value <= 1 for value in values) for values in table.values()):
        raise DataError(f"{file}: every corruption needs five errors above 0 and at most 1; " + _WANTED)
    return table


_WANTED = 'it must read {"fog": [0.18, 0.25, 0.31, 0.36, 0.47], ...}, the baseline\'s errors at severities 1 to 5'


def _mean_error(
    summary: MetricResult, accuracies: Mapping[tuple[str, int], Mapping[RowName, Estimate]], baseline: Baseline | None
) -> MetricResult:
    kinds = list(dict.fromkeys(kind for kind, _ in accuracies))
    if baseline is not None and (missing := [kind for kind in kinds if kind not in baseline]):
        raise DataError(f"The baseline says nothing about {', '.join(missing)}; {_WANTED}")
    name = "mean corruption error (not normalized)" if baseline is None else "mCE"
    names = dict.fromkeys(row for each in accuracies.values() for row in each)
    rows = {
        row: mean_of_paired([_corruption_error(kind, row, accuracies, baseline) for kind in kinds]) for row in names
    }
    words = "mean error over kinds and severities" if baseline is None else (
        "mean over kinds of the error summed over severities over the baseline's"
    )  # fmt: skip
    return replace(summary, metric=name, rows=rows, higher_is_better=False, definition=f"{words}; {SHARED_SAMPLES}")


def _corruption_error(
    kind: str, row: RowName, accuracies: Mapping[tuple[str, int], Mapping[RowName, Estimate]], baseline: Baseline | None
) -> Estimate:
    here = {level: each[row] for (name, level), each in accuracies.items() if name == kind}
    below = float(len(here)) if baseline is None else sum(baseline[kind][level - 1] for level in here)
    errors = [value.stderr for value in here.values()]
    whole = None if any(error is None for error in errors) else sum(error or 0.0 for error in errors) / below
    return Estimate(sum(1 - value.value for value in here.values()) / below, whole)
