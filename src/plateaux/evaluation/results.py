"""The values of one metric for one run on one split, with everything needed to interpret them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from plateaux.core.formatting import json_safe
from plateaux.core.row_names import ALL_MEMBERS, MEAN_OF_PAIRS, MEAN_PROBABILITY, RowName
from plateaux.core.types import Estimate


@dataclass(frozen=True, slots=True)
class MetricResult:
    """The values of one metric for one run on one split."""

    metric: str
    split: str
    rows: Mapping[RowName, Estimate]
    higher_is_better: bool | None
    weights: Mapping[str, str]  # which weights each member was evaluated with
    data: Mapping[str, Any]
    hashes: Mapping[str, str] = field(default_factory=dict)  # of those weights
    group: str = "performance"
    percent: bool = False
    definition: str = ""
    code: str = ""  # hash of the metric or probe, if it is code of the user

    def __post_init__(self) -> None:
        """Accept row names as plain strings."""
        object.__setattr__(self, "rows", {RowName.parse(name): value for name, value in self.rows.items()})

    @property
    def ensemble(self) -> Estimate:
        """The value of the ensemble: by mean probability, of all members together, or the mean over pairs.

        A run with one member has that member's value. A metric whose rows have parts (one value per class or bin) has
        no single value; read `rows`.
        """
        for name in (MEAN_PROBABILITY, ALL_MEMBERS, MEAN_OF_PAIRS):
            if name in self.rows:
                return self.rows[name]
        if len(self.members) == 1:
            return next(iter(self.members.values()))
        raise KeyError(f"{self.metric} has no value for the ensemble; it has the rows {[*map(str, self.rows)]}")

    @property
    def members(self) -> dict[int, Estimate]:
        """The value of every member, by its id."""
        rows = self.rows.items()
        return {name.members[0]: value for name, value in rows if name.kind == "member" and not name.part}

    @property
    def value(self) -> float:
        """The value of the ensemble."""
        return self.ensemble.value

    @property
    def stderr(self) -> float | None:
        """The standard error of the ensemble's value."""
        return self.ensemble.stderr

    def to_records(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per row."""
        return list(self._records())

    def _records(self) -> Iterator[dict[str, Any]]:
        for name, estimate in self.rows.items():
            yield {
                "metric": self.metric,
                "split": self.split,
                "row": str(name),
                "kind": name.kind,
                "members": list(name.members),
                "part": list(name.part),
                "value": estimate.value,
                "stderr": estimate.stderr,
                "mc_stderr": estimate.mc_stderr,
                "higher_is_better": self.higher_is_better,
                "group": self.group,
            }

    def to_dict(self) -> dict[str, Any]:
        """Return the result as it is stored in the run folder and printed with --json."""
        return {
            "metric": self.metric,
            "split": self.split,
            "higher_is_better": self.higher_is_better,
            "group": self.group,
            "definition": self.definition,
            "rows": {str(name): _stored_row(name, estimate) for name, estimate in self.rows.items()},
            "weights": dict(self.weights),
            "hashes": dict(self.hashes),
            "data": dict(self.data),
            **({"code": self.code} if self.code else {}),
        }

    def identity(self) -> dict[str, Any]:
        """Return what identifies the result, whether it was computed from cached logits or by forward passes."""
        weights = {"hashes": dict(self.hashes), "weights": dict(self.weights)}
        return {"metric": self.metric, "split": self.split, **weights, "data": _without_origin(self.data)}


def _stored_row(name: RowName, estimate: Estimate) -> dict[str, Any]:
    fields = {"kind": name.kind, "members": list(name.members), "part": list(name.part)}
    return {**fields, **stored_estimate(estimate)}


def stored_estimate(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as it is stored in JSON; NaN and infinity become null."""
    errors = {} if estimate.mc_stderr is None else {"mc_stderr": json_safe(estimate.mc_stderr)}
    return {"value": json_safe(estimate.value), "stderr": json_safe(estimate.stderr), **errors}


def _without_origin(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identifies the samples, without whether logits were cached; a fingerprint contains the size."""
    rest = {name: value for name, value in data.items() if name not in ("logits", "resized")}
    return {name: _without_origin(value) if isinstance(value, Mapping) else value for name, value in rest.items()}
