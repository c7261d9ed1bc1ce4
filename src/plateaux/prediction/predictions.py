"""`Predictions`: the answers of an ensemble as NumPy arrays, and their files: CSV, JSON lines, Parquet, and NPZ.

Equal predictions give equal bytes, and parts of a file can be merged without decoding predictions. Importing this
module does not import torch, so that a service can answer without it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import RecipeError
from plateaux.core.formatting import escape_csv, json_safe
from plateaux.core.imports import optional_import, pandas_frame
from plateaux.storage.atomic import write_atomic

SET_SEPARATOR = "|"
NOT_CALIBRATED = (
    "not calibrated: probabilities are the mean of the members; no prediction sets, no abstention, and no OOD alarm; "
    "run `plateaux calibrate` to fit them"
)


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """How uncertain the ensemble is, in nats."""

    entropy: NDArray[np.float64]  # [N] of the probabilities: total uncertainty
    mutual_information: NDArray[np.float64]  # [N] disagreement of the members: what more data could resolve


@dataclass(frozen=True, slots=True)
class Predictions:
    """The answers of an ensemble for N inputs, all from `probabilities`. What was not calibrated is None."""

    label: NDArray[np.int64]  # [N] the most likely class
    probability: NDArray[np.float64]  # [N] of that class
    probabilities: NDArray[np.float64]  # [N, C]
    uncertainty: Uncertainty
    ood_score: NDArray[np.float64]  # [N] larger: more likely out of distribution
    prediction_set: NDArray[np.bool_] | None  # [N, C] classes of the conformal sets
    abstain: NDArray[np.bool_] | None  # [N]
    is_ood: NDArray[np.bool_] | None  # [N] whether the OOD score is above the threshold of the alarm
    class_names: tuple[str, ...]  # [C]
    names: tuple[str, ...] = ()  # [N] of the inputs: files, or ids of samples
    ood_score_name: str = "max_probability"
    calibrated: bool = False
    remark: str = ""  # why fields are None
    errors: tuple[str | None, ...] = ()  # [N] why an input has no prediction; its label is -1, other values are NaN
    members_queried: NDArray[np.int64] | None = None  # [N] by a cascade; None: all members, without a cascade
    raw: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # without the calibration, by name, on request

    @classmethod
    def from_answers(
        cls,
        answers: Mapping[str, NDArray[Any]],
        class_names: tuple[str, ...],
        ood_score_name: str,
        calibrated: bool,
        remark: str,
        names: tuple[str, ...] = (),
        errors: tuple[str | None, ...] = (),
    ) -> Predictions:
        """Return predictions from their arrays by name, as a graph computes them.

        Args:
            answers: The arrays; those that are not calibrated are missing.
            class_names, ood_score_name, calibrated, remark, names, errors: The fields of the same name.
        """
        arrays: dict[str, Any] = {
            name: answers[name].astype(dtype, copy=False) if name in answers else None for name, dtype in DTYPES.items()
        }
        uncertainty = Uncertainty(arrays.pop("entropy"), arrays.pop("mutual_information"))
        raw = {name: values for name in RAW if (values := arrays.pop(name)) is not None}
        return cls(
            **arrays,
            uncertainty=uncertainty,
            class_names=class_names,
            names=names,
            ood_score_name=ood_score_name,
            calibrated=calibrated,
            remark=remark,
            errors=errors,
            raw=raw,
        )

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
        chances = {name: columns.pop(name) for name in CHANCES if name in columns}
        records = []
        for i in range(len(self)):
            record = {name: values[i] for name, values in columns.items()}
            if self.errors and self.errors[i] is not None:
                record = {name: value if name in ("name", "error") else None for name, value in record.items()}
            elif probabilities:
                record |= {name: dict(zip(self.class_names, rows[i], strict=True)) for name, rows in chances.items()}
            records.append(record)
        return records

    def to_columns(self) -> dict[str, list[Any]]:
        """Return the columns of a table with plain Python values."""
        columns: dict[str, list[Any]] = {"name": list(self.names)} if self.names else {}
        missing: list[Any] = [None] * len(self)
        columns |= {
            "label": self.label.tolist(),
            "label_name": self.label_name,
            "probability": self.probability.tolist(),
            "entropy": self.uncertainty.entropy.tolist(),
            "mutual_information": self.uncertainty.mutual_information.tolist(),
            "ood_score": self.ood_score.tolist(),
            "is_ood": missing if self.is_ood is None else self.is_ood.tolist(),
            "prediction_set": self.prediction_set_names or missing,
            "abstain": missing if self.abstain is None else self.abstain.tolist(),
        }
        if self.members_queried is not None:
            columns["members_queried"] = self.members_queried.tolist()
        columns |= {name: values.tolist() for name, values in self.raw.items()}
        if self.errors:
            columns["error"] = list(self.errors)
        return columns | {"probabilities": self.probabilities.tolist()}

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the numeric columns as arrays; what was not calibrated is left out."""
        names = (name for name in DTYPES if name not in RAW)
        arrays = {name: getattr(self.uncertainty if name in UNCERTAINTY else self, name) for name in names}
        return {**{name: values for name, values in arrays.items() if values is not None}, **self.raw}

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per input."""
        return pandas_frame(self.to_records(probabilities=False))

    def take(self, rows: slice | NDArray[Any]) -> Predictions:
        """Return the predictions of some inputs."""
        texts = (self.names, self.errors)
        names, errors = (tuple(np.array(each, dtype=object)[rows]) if each else () for each in texts)
        return self._replaced({name: values[rows] for name, values in self.to_arrays().items()}, names, errors)

    def _replaced(
        self, arrays: Mapping[str, NDArray[Any]], names: tuple[str, ...], errors: tuple[str | None, ...]
    ) -> Predictions:
        """Return predictions of the same predictor for other inputs, from the arrays that `to_arrays` returns."""
        about = self.class_names, self.ood_score_name, self.calibrated, self.remark
        return self.from_answers(arrays, *about, names, errors)

    def write(self, file: Path) -> None:
        """Write a .csv, .jsonl, .parquet or .npz file atomically."""
        write_atomic(file, encode(self, check_suffix(file)))


UNCERTAINTY = ("entropy", "mutual_information")
NUMBERS = ("probability", *UNCERTAINTY, "ood_score")
RAW = tuple(f"raw_{name}" for name in ("label", "probabilities", *NUMBERS))
CHANCES = ("probabilities", "raw_probabilities")
BY_CLASS = (*CHANCES, "prediction_set")  # arrays with one value per class
DTYPES: Mapping[str, Any] = {  # of the arrays, by name
    **dict.fromkeys(("label", "members_queried", "raw_label"), np.int64),
    **dict.fromkeys(("prediction_set", "abstain", "is_ood"), np.bool_),
    **dict.fromkeys(("probabilities", *NUMBERS, *RAW[1:]), np.float64),
}
# Of inputs without a prediction; all others: NaN.
MISSING = {"label": -1, "raw_label": -1, "prediction_set": False, "abstain": True, "is_ood": True, "members_queried": 0}


def concatenate(parts: Sequence[Predictions]) -> Predictions:
    """Return the predictions of several batches of one predictor as one record."""
    if len(parts) == 1:
        return parts[0]
    arrays = [part.to_arrays() for part in parts]
    joined = {name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]}
    names = tuple(name for part in parts for name in part.names)
    return parts[0]._replaced(joined, names, tuple(error for part in parts for error in part.errors))


def with_errors(found: Predictions, errors: Mapping[int, str]) -> Predictions:
    """Return predictions with a row for each input without one; `errors` has their positions among all inputs."""
    total = len(found) + len(errors)
    rows = [position for position in range(total) if position not in errors]
    arrays = {}
    for name, values in found.to_arrays().items():
        arrays[name] = np.full((total, *values.shape[1:]), MISSING.get(name, np.nan), dtype=values.dtype)
        arrays[name][rows] = values
    return found._replaced(arrays, found.names, tuple(errors.get(position) for position in range(total)))


def check_suffix(file: Path) -> str:
    """Return the suffix of a file of predictions if its format is supported."""
    if file.suffix not in ENCODERS:
        raise RecipeError(
            f"{file}: predictions are written as {', '.join(ENCODERS)}; end the file name in one of these"
        )
    if file.suffix == ".parquet":
        _parquet()
    return file.suffix


def encode(predictions: Predictions, suffix: str) -> bytes:
    """Return the content of a file."""
    return ENCODERS[suffix](predictions)


def merge(parts: Sequence[Path], suffix: str) -> Iterator[bytes]:
    """Yield the content of one file with the predictions of several files of the same format, in order."""
    if suffix == ".parquet":
        yield _merge_parquet(parts)
    elif suffix == ".npz":
        yield _merge_npz(parts)
    else:
        for number, part in enumerate(parts):
            content = part.read_bytes()
            # The header ends at the first line break: names of columns contain none.
            yield content if suffix == ".jsonl" or number == 0 else content[content.index(b"\n") + 1 :]


def _encode_csv(predictions: Predictions) -> bytes:
    """Return a table; the classes of a prediction set are separated by `|`, what is missing is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(name for name in predictions.to_columns() if name not in CHANCES)
    for record in predictions.to_records(probabilities=False):
        classes = record["prediction_set"]
        record["prediction_set"] = None if classes is None else SET_SEPARATOR.join(classes)
        writer.writerow([escape_csv(value) for value in record.values()])
    return text.getvalue().encode()


def _encode_jsonl(predictions: Predictions) -> bytes:
    return "".join(json.dumps(json_safe(row), allow_nan=False) + "\n" for row in predictions.to_records()).encode()


def _encode_npz(predictions: Predictions) -> bytes:
    arrays: dict[str, Any] = predictions.to_arrays()
    texts = {"name": predictions.names, "error": [error or "" for error in predictions.errors]}
    arrays |= {name: np.array(values) for name, values in texts.items() if values}
    return _savez({**arrays, "class_names": np.array(predictions.class_names)})


def _savez(arrays: Mapping[str, Any]) -> bytes:
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    return content.getvalue()


def _merge_npz(parts: Sequence[Path]) -> bytes:
    loaded = []
    for part in parts:
        with np.load(part, allow_pickle=False) as arrays:
            loaded.append({name: arrays[name] for name in arrays.files})
    first = loaded[0]
    return _savez(
        {
            name: values if name == "class_names" else np.concatenate([arrays[name] for arrays in loaded])
            for name, values in first.items()
        }
    )


def _encode_parquet(predictions: Predictions) -> bytes:
    arrow = _parquet()
    records = predictions.to_records(probabilities=False)
    columns = predictions.to_columns()
    failed = [error is not None for error in predictions.errors] or [False] * len(predictions)
    chances = {name: columns.pop(name) for name in CHANCES if name in columns}
    number, text = arrow.float64(), arrow.string()
    kinds = {
        name: {np.int64: arrow.int64(), np.bool_: arrow.bool_()}.get(dtype, number) for name, dtype in DTYPES.items()
    }
    kinds |= {**dict.fromkeys(("name", "label_name", "error"), text), "prediction_set": arrow.list_(text)}
    table = {name: arrow.array([r[name] for r in records], kinds[name]) for name in columns}
    for name, rows in chances.items():
        values = [None if bad else row for bad, row in zip(failed, rows, strict=True)]
        table[name] = arrow.array(values, arrow.list_(number))
    names = {"class_names": json.dumps(predictions.class_names)}
    return _write_parquet(arrow.table(table).replace_schema_metadata(names))


def _write_parquet(table: Any) -> bytes:
    content = io.BytesIO()
    optional_import("pyarrow.parquet", extra="parquet").write_table(table, content)
    return content.getvalue()


def _merge_parquet(parts: Sequence[Path]) -> bytes:
    read = optional_import("pyarrow.parquet", extra="parquet").read_table
    return _write_parquet(_parquet().concat_tables([read(part) for part in parts]))


def _parquet() -> Any:
    optional_import("pyarrow.parquet", extra="parquet")
    return optional_import("pyarrow", extra="parquet")


ENCODERS: Mapping[str, Callable[[Predictions], bytes]] = {
    ".csv": _encode_csv,
    ".jsonl": _encode_jsonl,
    ".parquet": _encode_parquet,
    ".npz": _encode_npz,
}
