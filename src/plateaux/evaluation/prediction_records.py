"""`Predictions`: the answers of an ensemble as NumPy arrays, with conversions to records, tables, and files.

Importing this module does not import torch, so that a service can answer without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.optional import pandas_frame
from plateaux.evaluation.prediction_files import check_suffix, encode
from plateaux.storage.atomic import write_atomic

NOT_CALIBRATED = (
    "not calibrated: probabilities are the mean of the members, there are no prediction sets and no abstention; "
    "run `plateaux calibrate` to fit them"
)


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """How uncertain the ensemble is, in nats."""

    entropy: NDArray[np.float64]  # [N] of the mean probability: total uncertainty
    mutual_information: NDArray[np.float64]  # [N] disagreement of the members: what more data could resolve


@dataclass(frozen=True, slots=True)
class Predictions:
    """The answers of an ensemble for N inputs. What was not calibrated is None, and `remark` says so."""

    label: NDArray[np.int64]  # [N] the most likely class
    probability: NDArray[np.float64]  # [N] of that class
    probabilities: NDArray[np.float64]  # [N, C]
    uncertainty: Uncertainty
    ood_score: NDArray[np.float64]  # [N] larger: more likely out of distribution
    prediction_set: NDArray[np.bool_] | None  # [N, C] classes of the conformal sets
    abstain: NDArray[np.bool_] | None  # [N]
    class_names: tuple[str, ...]  # [C]
    names: tuple[str, ...] = ()  # [N] of the inputs: files, or ids of samples
    ood_score_name: str = "max_probability"
    calibrated: bool = False
    remark: str = ""  # why fields are None
    errors: tuple[str | None, ...] = ()  # [N] why an input has no prediction; its label is -1, other values are NaN
    members_queried: NDArray[np.int64] | None = None  # [N] by a cascade; None: all members, without a cascade

    def __len__(self) -> int:
        return len(self.label)

    @property
    def label_name(self) -> list[str]:
        """The names of the predicted classes; empty for an input without a prediction."""
        return [self.class_names[number] if number >= 0 else "" for number in self.label.tolist()]

    @property
    def prediction_set_names(self) -> list[list[str]] | None:
        """The conformal sets by names of classes, most likely first; None: there are no sets."""
        if self.prediction_set is None:
            return None
        order = np.argsort(-self.probabilities, axis=1, kind="stable")
        return [
            [self.class_names[number] for number in row.tolist() if chosen[number]]
            for row, chosen in zip(order, self.prediction_set, strict=True)
        ]

    def to_records(self, *, probabilities: bool = True) -> list[dict[str, Any]]:
        """Return one dictionary per input, with plain Python values; what was not calibrated is None.

        Of an input without a prediction, everything but its name and error is None.
        """
        columns = self.to_columns()
        chances = columns.pop("probabilities")
        records = []
        for i in range(len(self)):
            record = {name: values[i] for name, values in columns.items()}
            if self.errors and self.errors[i] is not None:
                record = {name: value if name in ("name", "error") else None for name, value in record.items()}
            elif probabilities:
                record["probabilities"] = dict(zip(self.class_names, chances[i], strict=True))
            records.append(record)
        return records

    def to_columns(self) -> dict[str, list[Any]]:
        """Return the columns of a table with plain Python values."""
        columns: dict[str, list[Any]] = {"name": list(self.names)} if self.names else {}
        columns |= {
            "label": self.label.tolist(),
            "label_name": self.label_name,
            "probability": self.probability.tolist(),
            "entropy": self.uncertainty.entropy.tolist(),
            "mutual_information": self.uncertainty.mutual_information.tolist(),
            "ood_score": self.ood_score.tolist(),
            "prediction_set": [None] * len(self)
            if self.prediction_set is None
            else list(self.prediction_set_names or ()),
            "abstain": [None] * len(self) if self.abstain is None else self.abstain.tolist(),
        }
        if self.members_queried is not None:
            columns["members_queried"] = self.members_queried.tolist()
        if self.errors:
            columns["error"] = list(self.errors)
        return columns | {"probabilities": self.probabilities.tolist()}

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the numeric columns as arrays; what was not calibrated is left out."""
        arrays = {name: getattr(self, name) for name in ARRAYS}
        arrays |= {item.name: getattr(self.uncertainty, item.name) for item in fields(Uncertainty)}
        return {name: values for name, values in arrays.items() if values is not None}

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per input."""
        return pandas_frame(self.to_records(probabilities=False))

    def take(self, rows: slice | NDArray[Any]) -> Predictions:
        """Return the predictions of some inputs."""
        # Without `replace` and `getattr`: a service calls this for every request.
        names, errors = (
            tuple(np.array(values, dtype=object)[rows]) if values else () for values in (self.names, self.errors)
        )
        return Predictions(
            self.label[rows],
            self.probability[rows],
            self.probabilities[rows],
            Uncertainty(self.uncertainty.entropy[rows], self.uncertainty.mutual_information[rows]),
            self.ood_score[rows],
            None if self.prediction_set is None else self.prediction_set[rows],
            None if self.abstain is None else self.abstain[rows],
            self.class_names,
            names,
            self.ood_score_name,
            self.calibrated,
            self.remark,
            errors,
            None if self.members_queried is None else self.members_queried[rows],
        )

    def write(self, file: Path) -> None:
        """Write a .csv, .jsonl, .parquet or .npz file atomically."""
        write_atomic(file, encode(self, check_suffix(file)))


ARRAYS = ("label", "probability", "probabilities", "ood_score", "prediction_set", "abstain", "members_queried")


def concatenate(parts: Sequence[Predictions]) -> Predictions:
    """Return the predictions of several batches of one predictor as one record."""
    first = parts[0]
    if len(parts) == 1:
        return first
    joined: dict[str, Any] = {
        name: None if getattr(first, name) is None else np.concatenate([getattr(part, name) for part in parts])
        for name in ARRAYS
    }
    uncertainty = Uncertainty(
        *(np.concatenate([getattr(part.uncertainty, item.name) for part in parts]) for item in fields(Uncertainty))
    )
    names = tuple(name for part in parts for name in part.names)
    errors = tuple(error for part in parts for error in part.errors)
    return replace(first, **joined, uncertainty=uncertainty, names=names, errors=errors)


def with_errors(found: Predictions, errors: Mapping[int, str]) -> Predictions:
    """Return predictions with a row for each input without one; `errors` has their positions among all inputs."""
    total = len(found) + len(errors)
    rows = np.array([position for position in range(total) if position not in errors], dtype=np.int64)

    def spread(values: NDArray[Any] | None, missing: Any) -> NDArray[Any] | None:
        if values is None:
            return None
        result = np.full((total, *values.shape[1:]), missing, dtype=values.dtype)
        result[rows] = values
        return result

    fill: dict[str, Any] = {"label": -1, "prediction_set": False, "abstain": True, "members_queried": 0}
    spreads: dict[str, Any] = {name: spread(getattr(found, name), fill.get(name, np.nan)) for name in ARRAYS}
    parts = [spread(getattr(found.uncertainty, item.name), np.nan) for item in fields(Uncertainty)]
    texts = tuple(errors.get(position) for position in range(total))
    return replace(found, **spreads, uncertainty=Uncertainty(*parts), errors=texts)  # type: ignore[arg-type]


def class_names(labels: Sequence[str], classes: int) -> tuple[str, ...]:
    """Return the names of the classes, or their numbers if they have no names."""
    return tuple(labels) if len(labels) == classes else tuple(str(number) for number in range(classes))
