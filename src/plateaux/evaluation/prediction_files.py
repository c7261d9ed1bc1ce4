"""Predictions as files: CSV, JSON lines, Parquet, and NPZ; parts of a file can be merged without decoding predictions.

Equal predictions give equal bytes. Importing this module does not import torch.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plateaux.core.errors import RecipeError
from plateaux.core.formatting import escape_csv, json_safe
from plateaux.core.optional import optional_import

if TYPE_CHECKING:
    from plateaux.evaluation.prediction_records import Predictions

SET_SEPARATOR = "|"


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
    writer.writerow(name for name in predictions.to_columns() if name != "probabilities")
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
    chances = [None if bad else row for bad, row in zip(failed, columns.pop("probabilities"), strict=True)]
    number, text = arrow.float64(), arrow.string()
    kinds = {
        "label": arrow.int64(),
        "members_queried": arrow.int64(),
        "prediction_set": arrow.list_(text),
        "abstain": arrow.bool_(),
    }
    kinds |= dict.fromkeys(("name", "label_name", "error"), text)
    table = {name: arrow.array([r[name] for r in records], kinds.get(name, number)) for name in columns}
    table["probabilities"] = arrow.array(chances, arrow.list_(number))
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
