"""One measure's numbers about one run on one set of samples, with all that must be known to trust them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plateaux.core.formatting import json_safe
from plateaux.core.types import Estimate


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One measure's numbers about one run on one set of samples."""

    metric: str
    split: str
    rows: Mapping[str, Estimate]
    higher_is_better: bool | None
    weights: Mapping[str, str]  # which weights each member's numbers are from
    data: Mapping[str, Any]
    hashes: Mapping[str, str] = field(default_factory=dict)  # of those weights
    group: str = "performance"
    percent: bool = False
    definition: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "split": self.split,
            "higher_is_better": self.higher_is_better,
            "group": self.group,
            "definition": self.definition,
            "rows": {name: _row(value) for name, value in self.rows.items()},
            "weights": dict(self.weights),
            "hashes": dict(self.hashes),
            "data": dict(self.data),
        }

    def question(self) -> dict[str, Any]:
        """Return what was asked: the same question has the same answer, from kept logits or fresh ones."""
        asked = {"metric": self.metric, "split": self.split, "hashes": dict(self.hashes), "weights": dict(self.weights)}
        return {**asked, "data": _without_origin(self.data)}


def _row(value: Estimate) -> dict[str, float | None]:
    drawn = {} if value.mc_stderr is None else {"mc_stderr": json_safe(value.mc_stderr)}
    return {"value": json_safe(value.value), "stderr": json_safe(value.stderr), **drawn}


def _without_origin(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells samples apart, and not whether logits were kept or fresh."""
    plain = {name: value for name, value in data.items() if name != "logits"}
    return {name: _without_origin(value) if isinstance(value, Mapping) else value for name, value in plain.items()}
