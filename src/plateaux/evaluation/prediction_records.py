"""`Predictions`: the answers of an ensemble as NumPy arrays, with conversions to records, tables, and files.

Importing this module does not import torch, so that a service can answer without it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import RecipeError
from plateaux.core.formatting import escape_csv, json_safe
from plateaux.core.optional import pandas_frame
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
    members_queried: NDArray[np.int64] | None = None  # [N] by a cascade; None: all members, without a cascade

    def __len__(self) -> int:
        return len(self.label)

    @property
    def label_name(self) -> list[str]:
        """The names of the predicted classes."""
        return [self.class_names[number] for number in self.label.tolist()]

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
        """Return one dictionary per input, with plain Python values; what was not calibrated is None."""
        sets, records = self.prediction_set_names, []
        for i, (number, name) in enumerate(zip(self.label.tolist(), self.label_name, strict=True)):
            record: dict[str, Any] = {"name": self.names[i]} if self.names else {}
            record |= {"label": number, "label_name": name, "probability": float(self.probability[i])}
            if probabilities:
                record["probabilities"] = dict(zip(self.class_names, self.probabilities[i].tolist(), strict=True))
            record["entropy"] = float(self.uncertainty.entropy[i])
            record["mutual_information"] = float(self.uncertainty.mutual_information[i])
            record["ood_score"] = float(self.ood_score[i])
            record["prediction_set"] = None if sets is None else sets[i]
            record["abstain"] = None if self.abstain is None else bool(self.abstain[i])
            if self.members_queried is not None:
                record["members_queried"] = int(self.members_queried[i])
            records.append(record)
        return records

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per input."""
        return pandas_frame(self.to_records(probabilities=False))

    def take(self, rows: slice | NDArray[Any]) -> Predictions:
        """Return the predictions of some inputs."""
        kept: dict[str, Any] = {
            name: None if (values := getattr(self, name)) is None else values[rows] for name in ARRAYS
        }
        parts = (self.uncertainty.entropy[rows], self.uncertainty.mutual_information[rows])
        names = tuple(np.array(self.names, dtype=object)[rows]) if self.names else ()
        return replace(self, **kept, uncertainty=Uncertainty(*parts), names=names)

    def write(self, file: Path) -> None:
        """Write a .csv, .jsonl or .npz file atomically."""
        kinds: dict[str, Callable[[], bytes]] = {".csv": self.to_csv, ".jsonl": self.to_jsonl, ".npz": self.to_npz}
        if file.suffix not in kinds:
            raise RecipeError(
                f"{file}: predictions are written as {', '.join(kinds)}; end the file name in one of these"
            )
        write_atomic(file, kinds[file.suffix]())

    def to_csv(self) -> bytes:
        """Return a table; the classes of a prediction set are separated by `|`, what is None is empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for number, row in enumerate(self._flat_records()):
            if not number:
                writer.writerow(row)
            writer.writerow([escape_csv(value) for value in row.values()])
        return text.getvalue().encode()

    def to_jsonl(self) -> bytes:
        """Return one JSON object per line."""
        return "".join(json.dumps(json_safe(row), allow_nan=False) + "\n" for row in self.to_records()).encode()

    def to_npz(self) -> bytes:
        """Return the arrays as an .npz file."""
        columns = {name: getattr(self, name) for name in ARRAYS}
        columns |= {item.name: getattr(self.uncertainty, item.name) for item in fields(Uncertainty)}
        columns |= {"class_names": np.array(self.class_names), "name": np.array(self.names) if self.names else None}
        content = io.BytesIO()
        np.savez_compressed(content, **{name: values for name, values in columns.items() if values is not None})
        return content.getvalue()

    def _flat_records(self) -> Iterator[dict[str, Any]]:
        for record in self.to_records(probabilities=False):
            classes = record["prediction_set"]
            yield record | {"prediction_set": None if classes is None else "|".join(classes)}


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
    return replace(first, **joined, uncertainty=uncertainty, names=names)


def class_names(labels: Sequence[str], classes: int) -> tuple[str, ...]:
    """Return the names of the classes, or their numbers if they have no names."""
    return tuple(labels) if len(labels) == classes else tuple(str(number) for number in range(classes))
