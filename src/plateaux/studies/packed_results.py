"""The stored form of a study's results: what the metrics of many runs have in common is stored once.

A metric of format 2 repeats its definition, its data, and the names of its rows in every run. In format 3, it has
indices into the list `shared` instead, and only its values are its own:

    {"facts": 0, "hashes": 1, "rows": 2, "values": [[0.91, 0.003], [0.92, 0.003]]}

`rows` are the names and kinds of its rows, in the order of `values`: `[value, stderr]` or `[value, stderr, mc_stderr]`.
`facts` is everything else about the metric, such as its definition and data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plateaux.core.errors import StorageError
from plateaux.core.ranges import Finite, StoredInt
from plateaux.storage.json_shapes import read_shape

FORMAT = 3
UNPACKED_FORMAT = 2
PARTS = ("value", "stderr", "mc_stderr")
MAX_GROWTH = 100  # unpacked descriptions compared with packed ones; studies have about 5
METRIC_CHARACTERS = 60  # of a packed metric without its values


@dataclass(frozen=True, slots=True)
class PackedMetric:
    """A metric whose description is stored once for all runs."""

    facts: StoredInt
    hashes: StoredInt
    rows: StoredInt
    values: tuple[tuple[Finite | None, ...], ...]


@dataclass(frozen=True, slots=True)
class _PackedRun:
    metrics: tuple[PackedMetric, ...]


@dataclass(frozen=True, slots=True)
class _PackedResults:
    shared: tuple[Any, ...]
    runs: dict[str, _PackedRun]


def pack(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return results in the stored form."""
    shared: dict[str, int] = {}
    runs = {
        name: {**run, "metrics": [_pack_metric(metric, shared) for metric in run["metrics"]]}
        for name, run in results["runs"].items()
    }
    others = {name: part for name, part in results.items() if name not in ("format", "runs")}
    return {"format": FORMAT, **others, "shared": [json.loads(text) for text in shared], "runs": runs}


def unpack(results: Mapping[str, Any], file: object, advice: str) -> dict[str, Any]:
    """Return stored results with every metric complete, as `StudyResults` reads them."""
    packed = read_shape(_PackedResults, results, file, advice)
    _check_growth(packed, file, advice)
    runs: dict[str, Any] = {}
    for name, run in packed.runs.items():
        try:
            metrics = [_unpack_metric(metric, packed.shared) for metric in run.metrics]
        except (IndexError, TypeError, ValueError) as problem:
            message = f"{file}: a metric of run {name!r} does not match the list `shared` ({problem}); {advice}"
            raise StorageError(message) from None
        runs[name] = {**results["runs"][name], "metrics": metrics}
    return {**{name: part for name, part in results.items() if name != "shared"}, "runs": runs}


def _check_growth(packed: _PackedResults, file: object, advice: str) -> None:
    """Refuse a small file whose metrics would fill the memory, because all of them refer to a large description."""
    sizes = dict(enumerate(len(_dump(part)) for part in packed.shared))
    metrics = [metric for run in packed.runs.values() for metric in run.metrics]
    unpacked = sum(sizes.get(metric.facts, 0) + sizes.get(metric.hashes, 0) for metric in metrics)
    if unpacked > MAX_GROWTH * (sum(sizes.values()) + METRIC_CHARACTERS * len(metrics)):
        raise StorageError(f"{file} would have {unpacked:,} characters of descriptions when it is unpacked; {advice}")


def encode_results(results: Mapping[str, Any]) -> bytes:
    """Return results as the content of a results file: packed, without spaces, one run per line."""
    packed = pack(results)
    runs = ",\n".join(f"{_dump(name)}:{_dump(run)}" for name, run in packed.pop("runs").items())
    return (_dump(packed).removesuffix("}") + ',"runs":{\n' + runs + "\n}}\n").encode()


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _pack_metric(metric: Mapping[str, Any], shared: dict[str, int]) -> dict[str, Any]:
    facts = {name: part for name, part in metric.items() if name not in ("hashes", "rows")}
    rows = {
        row: {name: part for name, part in fields.items() if name not in PARTS}
        for row, fields in metric["rows"].items()
    }
    described = {"facts": facts, "hashes": metric.get("hashes", {}), "rows": rows}
    indices = {name: shared.setdefault(_dump(part), len(shared)) for name, part in described.items()}
    return {**indices, "values": [[row[part] for part in PARTS if part in row] for row in metric["rows"].values()]}


def _unpack_metric(metric: PackedMetric, shared: Sequence[Any]) -> dict[str, Any]:
    described = zip(dict(shared[metric.rows]).items(), metric.values, strict=True)
    rows = {row: {**fields, **dict(zip(PARTS, values, strict=False))} for (row, fields), values in described}
    return {**shared[metric.facts], "hashes": shared[metric.hashes], "rows": rows}
