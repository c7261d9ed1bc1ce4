"""Robustness: accuracy under corruption, summarized as cACC and mean corruption error (mCE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plateaux.core.errors import DataError
from plateaux.core.ranges import Finite
from plateaux.core.row_names import RowName
from plateaux.core.stats.estimates import mean_of_paired
from plateaux.core.types import Estimate
from plateaux.evaluation.results import MetricResult
from plateaux.storage.json_shapes import parse_json, read_shape

Baseline = Mapping[str, Sequence[float]]
"""Errors of the baseline network: five numbers, one per severity, for each corruption."""

SHARED_SAMPLES = "standard error: the mean of the parts' errors, an upper bound, because the parts share their samples"


def robustness(results: Sequence[MetricResult], baseline: Baseline | None = None) -> list[MetricResult]:
    """Return the mean accuracy under corruption by corruption, by severity, and over all (cACC), and the mCE.

    Of other metrics on corrupted splits, return the mean over all corruptions and severities, and by severity.

    Args:
        results: Results of `evaluate` on corrupted splits.
        baseline: Errors of a baseline by corruption. Without it, the mean corruption error is not normalized.
    """
    corrupted = [result for result in results if "corruption" in result.data]
    others = dict.fromkeys(result.metric for result in corrupted if result.metric != "accuracy")
    means = [_mean_over_corruptions([each for each in corrupted if each.metric == name]) for name in others]
    parts = [result for result in corrupted if result.metric == "accuracy"]
    if not parts:
        return means
    accuracies = {(str(part.data["corruption"]), int(part.data["severity"])): part.rows for part in parts}
    kinds = list(dict.fromkeys(kind for kind, _ in accuracies))
    severities = sorted({severity for _, severity in accuracies})
    rows: dict[RowName, Estimate] = {}
    for row in parts[0].rows:
        values = {split: accuracy[row] for split, accuracy in accuracies.items()}
        rows[row.with_part("cACC")] = mean_of_paired(list(values.values()))
        for severity in severities:
            at_severity = [value for (_, level), value in values.items() if level == severity]
            rows[row.with_part(f"severity {severity}")] = mean_of_paired(at_severity)
        for kind in kinds:
            rows[row.with_part(kind)] = mean_of_paired([value for (name, _), value in values.items() if name == kind])
    data = _shared_data(parts, kinds, severities)
    definition = f"mean accuracy over {len(kinds)} corruptions x {len(severities)} severities; {SHARED_SAMPLES}"
    summary = replace(parts[0], metric="accuracy under corruption", split="corrupted", rows=rows, data=data,
                      definition=definition, percent=True)  # fmt: skip
    return [summary, _mean_error(summary, accuracies, baseline), *means]


def _mean_over_corruptions(parts: Sequence[MetricResult]) -> MetricResult:
    """Return the mean of a metric over corrupted splits, of rows without parts such as classes and bins."""
    levels = [int(part.data["severity"]) for part in parts]
    kinds = list(dict.fromkeys(str(part.data["corruption"]) for part in parts))
    rows: dict[RowName, Estimate] = {}
    for row in (row for row in parts[0].rows if not row.part):
        values = [part.rows[row] for part in parts]
        rows[row] = mean_of_paired(values)
        for severity in sorted(set(levels)):
            at_severity = [value for value, level in zip(values, levels, strict=True) if level == severity]
            rows[row.with_part(f"severity {severity}")] = mean_of_paired(at_severity)
    data = _shared_data(parts, kinds, sorted(set(levels)))
    definition = f"mean over {len(kinds)} corruptions x {len(set(levels))} severities; {SHARED_SAMPLES}"
    name = f"{parts[0].metric} under corruption"
    return replace(parts[0], metric=name, split="corrupted", rows=rows, data=data, definition=definition)


def _shared_data(parts: Sequence[MetricResult], kinds: list[str], severities: list[int]) -> dict[str, Any]:
    """Return what a mean says about its data, with all sources: images may be published for some corruptions only."""
    metadata = {key: value for key, value in parts[0].data.items() if key not in ("corruption", "severity")}
    sources = sorted({str(part.data["source"]) for part in parts})
    return {**metadata, "corruptions": kinds, "severities": severities, "source": ", ".join(sources)}


def read_baseline(file: Path) -> Baseline:
    """Return the errors in a JSON file: {"fog": [0.18, 0.25, ...], ...}, as fractions and not in percent."""
    try:
        table = read_shape(dict[str, list[Finite]], parse_json(file.read_bytes(), file, "fix it"), file, "fix it")
    except OSError as problem:  # also StorageError
        raise DataError(f"{file} cannot be read as a table of errors ({problem}); " + _EXPECTED) from None
    if any(len(values) != 5 or not all(0 < value <= 1 for value in values) for values in table.values()):
        raise DataError(f"{file}: every corruption needs five errors above 0 and at most 1; " + _EXPECTED)
    return table


_EXPECTED = 'expected {"fog": [0.18, 0.25, 0.31, 0.36, 0.47], ...}: the errors of the baseline at severities 1 to 5'


def _mean_error(
    summary: MetricResult, accuracies: Mapping[tuple[str, int], Mapping[RowName, Estimate]], baseline: Baseline | None
) -> MetricResult:
    kinds = list(dict.fromkeys(kind for kind, _ in accuracies))
    if baseline is not None and (missing := [kind for kind in kinds if kind not in baseline]):
        raise DataError(f"The baseline has no errors for {', '.join(missing)}; {_EXPECTED}")
    name = "mean corruption error (not normalized)" if baseline is None else "mCE"
    names = dict.fromkeys(row for accuracy in accuracies.values() for row in accuracy)
    rows = {
        row: mean_of_paired([_corruption_error(kind, row, accuracies, baseline) for kind in kinds]) for row in names
    }
    plain = "mean error over corruptions and severities"
    normalized = "mean over corruptions of the summed error over severities divided by that of the baseline"
    definition = f"{plain if baseline is None else normalized}; {SHARED_SAMPLES}"
    return replace(summary, metric=name, rows=rows, higher_is_better=False, definition=definition)


def _corruption_error(
    kind: str, row: RowName, accuracies: Mapping[tuple[str, int], Mapping[RowName, Estimate]], baseline: Baseline | None
) -> Estimate:
    values = {severity: accuracy[row] for (name, severity), accuracy in accuracies.items() if name == kind}
    scale = float(len(values)) if baseline is None else sum(baseline[kind][severity - 1] for severity in values)
    errors = [value.stderr for value in values.values()]
    stderr = None if any(error is None for error in errors) else sum(error or 0.0 for error in errors) / scale
    return Estimate(sum(1 - value.value for value in values.values()) / scale, stderr)
