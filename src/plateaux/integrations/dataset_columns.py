"""Hugging Face `datasets`: the columns of a `Dataset` as inputs and labels in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import DataError, first_line, suggest
from plateaux.data.images import to_eight_bits

LABEL_NAMES = ("label", "labels")
TOKEN_COLUMNS = ("input_ids", "attention_mask", "token_type_ids")
NUMBERS = ("int", "uint", "float", "bool")

Inputs = NDArray[Any] | dict[str, NDArray[Any]]


def is_hugging_face(value: Any) -> bool:
    """Return whether a value is a `datasets.Dataset` or `DatasetDict`, without importing the library."""
    return type(value).__module__.partition(".")[0] == "datasets" and type(value).__name__ in ("Dataset", "DatasetDict")


def train_and_test(dataset: Any) -> tuple[Any, Any]:
    """Return the splits "train" and "test" of a `DatasetDict`; a `Dataset` has no test split (None)."""
    if not isinstance(dataset, Mapping):
        return dataset, None
    if "train" not in dataset:
        raise DataError(f"The DatasetDict has the splits {sorted(dataset)}: pass one of them, as in dataset['train'].")
    return dataset["train"], dataset.get("test")


def find_columns(dataset: Any, inputs: str | Sequence[str] | None, label: str | None) -> tuple[list[str], str]:
    """Return the names of the input columns and of the label column."""
    label = _check_name(dataset, label) if label is not None else _find_label(dataset)
    others = {name: feature for name, feature in dataset.features.items() if name != label}
    names = _find_inputs(others) if inputs is None else [inputs] if isinstance(inputs, str) else list(inputs)
    return [_check_name(dataset, name) for name in names], label


def read_columns(
    dataset: Any, inputs: str | Sequence[str] | None, label: str | None
) -> tuple[Inputs, list[Any], tuple[str, ...]]:
    """Return the inputs, the labels, and the class names of a `datasets.Dataset`.

    The label is the column `label` or `labels`, or the only one of type `ClassLabel`. The inputs are the tokens
    (`input_ids`, `attention_mask`, `token_type_ids`), or the only image column, or all columns of numbers as a table.
    """
    names, label = find_columns(dataset, inputs, label)
    plain = dataset.with_format(None)
    is_token = len(names) == 1 and names[0] in TOKEN_COLUMNS
    if not is_token and all(_is_number(dataset.features[name]) for name in names):
        columns = [np.asarray(plain[name][:], dtype=np.float32) for name in names]
        x: Inputs = np.stack(columns, 1)
    elif len(names) == 1 and not is_token:
        x = _read_column(plain, names[0])
    else:
        x = {name: _read_column(plain, name) for name in names}
    classes = tuple(getattr(dataset.features[label], "names", None) or ())
    return x, list(plain[label][:]), classes


def match_classes(labels: list[Any], names: Sequence[str], train_names: Sequence[str]) -> list[Any]:
    """Return class numbers of a test set as those of the training set, whose classes may have another order."""
    if any(_is_numbered(each) for each in (names, train_names)) or tuple(names) == tuple(train_names):
        return labels
    numbers = {name: number for number, name in enumerate(train_names)}
    used = {label for label in labels if label is not None and 0 <= label < len(names)}
    unknown = sorted(names[label] for label in used if names[label] not in numbers)
    if unknown:
        raise DataError(
            f"The test set has samples of {len(unknown)} classes that the training set does not name, such as "
            f"{unknown[0]!r}: remove these samples, or cast the label columns to the same datasets.ClassLabel."
        )
    return [numbers[names[label]] if label in used else label for label in labels]


def _is_numbered(names: Sequence[str]) -> bool:
    """Return whether a label column has numbers only: no names, or those of `ClassLabel(num_classes=...)`."""
    return all(name == str(number) for number, name in enumerate(names))


def _find_label(dataset: Any) -> str:
    named = [name for name in LABEL_NAMES if name in dataset.features]
    typed = [name for name, feature in dataset.features.items() if type(feature).__name__ == "ClassLabel"]
    found = named or typed
    if len(found) != 1:
        raise DataError(
            f"The label column is not clear among {dataset.column_names}: name it, as in "
            "plateaux.from_arrays(dataset, label='...')."
        )
    return found[0]


def _find_inputs(features: Mapping[str, Any]) -> list[str]:
    tokens = [name for name in TOKEN_COLUMNS if name in features]
    images = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    numbers = [name for name, feature in features.items() if _is_number(feature)]
    arrays = [name for name, feature in features.items() if type(feature).__name__.startswith("Array")]
    for found in (tokens, images, arrays, numbers):
        if found and (found in (tokens, numbers) or len(found) == 1):
            return found
    raise DataError(
        f"The input columns are not clear among {list(features)}: name them, as in plateaux.from_arrays(dataset, "
        "inputs=['...']); tokenize text first, as in dataset.map(lambda rows: tokenizer(rows['text'], truncation=True, "
        "padding='max_length', max_length=128), batched=True)."
    )


def _read_column(dataset: Any, name: str) -> NDArray[Any]:
    feature = dataset.features[name]
    if type(feature).__name__ == "Image":
        images = (to_eight_bits(image, name=f"Image {i} of {name!r}") for i, image in enumerate(dataset[name]))
        rows = [np.asarray(each if each.mode in ("L", "RGB") else each.convert("RGB")) for each in images]
    elif getattr(feature, "dtype", None) in ("string", "large_string"):
        raise DataError(
            f"The column {name!r} is text: tokenize it first, as in dataset.map(lambda rows: "
            f"tokenizer(rows[{name!r}], truncation=True, padding='max_length', max_length=128), batched=True)."
        )
    else:
        rows = _read_rows(dataset[name], None if name in TOKEN_COLUMNS else _find_dtype(feature), name)
    shapes = sorted({row.shape for row in rows})
    if len(shapes) != 1:
        raise DataError(
            f"The column {name!r} has samples of {len(shapes)} shapes, such as {list(shapes[0])} and "
            f"{list(shapes[-1])}: pad or resize them to one shape first, with dataset.map."
        )
    return np.stack(rows) if rows[0].ndim else np.stack(rows)[:, None]


def _read_rows(values: Iterable[Any], dtype: str | None, name: str) -> list[NDArray[Any]]:
    try:
        return [np.asarray(row, dtype=dtype) for row in values]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"The column {name!r} has a sample that is no array of {dtype or 'numbers'} ({first_line(error)}). The "
            f"usual cause is a missing value: remove these samples, as in dataset.filter(lambda row: row[{name!r}] is "
            "not None)."
        ) from error


def _find_dtype(feature: Any) -> str | None:
    """Return the type of the numbers in an array or a list; as Python numbers, all integers would become int64."""
    while isinstance(feature, list) or hasattr(feature, "feature"):
        feature = feature[0] if isinstance(feature, list) else feature.feature
    dtype = str(getattr(feature, "dtype", None))
    return dtype if dtype.startswith(NUMBERS) else None


def _check_name(dataset: Any, name: str) -> str:
    if name not in dataset.column_names:
        raise DataError(f"The dataset has no column {name!r}; {suggest(name, dataset.column_names)}")
    return name


def _is_number(feature: Any) -> bool:
    is_value = type(feature).__name__ == "Value"
    return is_value and str(feature.dtype).startswith(NUMBERS)
