"""The numbers of a run that its bundle reports: results on the test split that are stored in the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from plateaux.config.specs import user_code
from plateaux.core.ranges import Finite, StoredInt
from plateaux.core.row_names import ALL_MEMBERS, MEAN_PROBABILITY, RowName
from plateaux.deploy.manifest import MeasuredNumber
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.run import Run

ADVICE = "delete it and evaluate again"


@dataclass(frozen=True, slots=True)
class _StoredEstimate:
    value: Finite | None
    stderr: Finite | None


@dataclass(frozen=True, slots=True)
class _StoredSamples:
    name: str = ""
    fingerprint: str = ""
    samples: StoredInt | None = None


@dataclass(frozen=True, slots=True)
class _StoredResult:
    metric: str
    split: str
    rows: dict[str, _StoredEstimate]
    hashes: dict[str, str]
    data: _StoredSamples = field(default_factory=_StoredSamples)
    code: str = ""


def measured_numbers(run: Run) -> tuple[MeasuredNumber, ...]:
    """Return the stored results of the whole ensemble on the test split, for the weights that the run has now."""
    hashes = {str(RowName.member(number)): run.weights_hash(number) for number in run.trained_members()}
    return tuple(number for name in run.store.names("metrics") for number in _read(run, name, hashes))


def _read(run: Run, name: str, hashes: Mapping[str, str]) -> Iterator[MeasuredNumber]:
    tree: Any = run.store.get_json(name)
    result = read_shape(_StoredResult, tree, run.store.root / name, ADVICE)
    if result.split != "test" or result.hashes != hashes:
        return
    if result.code and result.code != (user_code(result.metric, run.components.trust) or result.code):
        return  # another version of the metric
    for text, estimate in result.rows.items():
        row = RowName.parse(text)
        is_whole = row in (MEAN_PROBABILITY, ALL_MEMBERS) or (len(hashes) == 1 and row.kind == "member")
        is_whole = is_whole and not row.part
        if estimate.value is not None and (is_whole or (result.metric == "calibrated" and row.kind == "ensemble")):
            data = result.data
            yield MeasuredNumber(
                result.metric,
                str(row),
                estimate.value,
                estimate.stderr,
                "test",
                data.name,
                data.samples,
                data.fingerprint,
            )
