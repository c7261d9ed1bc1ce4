"""Turn anything that a user passes to a predictor into arrays, and reject what violates the input contract.

Arrays of the model's dtype and shape are the last step: images are decoded, resized as in training, and scaled to
[0, 1]; texts are tokenized. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import DataError
from plateaux.data.data_summary import TensorSummary
from plateaux.data.images import decode_image, to_pixels
from plateaux.data.preprocessing import Tokenizer
from plateaux.integrations.pandas_tables import is_pandas, read_table, select_columns
from plateaux.prediction.contract import InputContract, allowed_range, describe_tensor

Array = NDArray[Any]

RANGE_TOLERANCE = 1e-3  # above 1 or below 0, for floats of images: resizing with overshoot
MAX_NAMES = 100  # that an error lists
UNSCALED = 100.0  # training inputs that reach this were probably pixels from 0 to 255


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """Arrays as the ensemble takes them, one row per input."""

    arrays: Mapping[str, Array]
    names: tuple[str, ...] = ()  # of the inputs, if they are files

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))


def prepare(x: Any, contract: InputContract, *, paths: bool = True) -> PreparedInputs:
    """Return the arrays of one input or of a batch: array, tensor, DataFrame, image, path, bytes, text, or a list.

    With `paths=False`, for inputs of others, no text is opened as a file of this machine.
    """
    if isinstance(x, Mapping):
        return PreparedInputs(_prepare_mapping(x, contract))
    if is_pandas(x) and _is_table(contract):
        return PreparedInputs({"x": _prepare_table(x, contract)})
    is_text = contract.preprocessing.tokenizer is not None
    is_nested = isinstance(x, list | tuple) and bool(x) and isinstance(x[0], int | float | list)  # an array as lists
    if isinstance(x, list | tuple) and (is_text or not is_nested):
        return _prepare_list(x, contract, paths=paths)
    if contract.preprocessing.tokenizer is not None:
        return PreparedInputs(_tokenize([x], contract.preprocessing.tokenizer))
    if set(contract.inputs) != {"x"}:
        raise DataError(f"The input is {_kind(x)}. Expected: a dictionary of {contract.describe()}")
    if isinstance(x, str | Path) and not paths:
        raise DataError("An input is text. Expected: numbers, or an image file as the body or in a form")
    if _is_raw_image(x):
        return PreparedInputs({"x": _prepare_image(x, contract)[None]}, _names([x]))
    return PreparedInputs({"x": _prepare_array(x, contract.inputs["x"], "x")})


def _prepare_list(x: Sequence[Any], contract: InputContract, *, paths: bool) -> PreparedInputs:
    if not x:
        raise DataError(f"The list of inputs is empty. Expected: at least one input, {contract.describe()}")
    tokenizer = contract.preprocessing.tokenizer
    if tokenizer is not None and all(isinstance(item, str | tuple | list) for item in x):
        is_pair = isinstance(x, tuple) and len(x) == len(tokenizer.texts) and all(isinstance(t, str) for t in x)
        return PreparedInputs(_tokenize([x] if is_pair and len(x) > 1 else x, tokenizer))
    return replace(concatenate_inputs([prepare(item, contract, paths=paths) for item in x]), names=_names(x))


def concatenate_inputs(parts: Sequence[PreparedInputs]) -> PreparedInputs:
    """Return several inputs as one batch, without names."""
    return PreparedInputs({name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays})


def _names(items: Sequence[Any]) -> tuple[str, ...]:
    is_file = [isinstance(item, str | Path) for item in items]
    return tuple(str(item) for item in items) if all(is_file) else ()


def _is_raw_image(x: Any) -> bool:
    return isinstance(x, str | Path | bytes) or _is_pillow(x)


def _is_pillow(x: Any) -> bool:
    return hasattr(x, "convert") and hasattr(x, "getbands")


def _prepare_image(x: Any, contract: InputContract) -> Array:
    """Return one image `[C, H, W]` from a path, the bytes of a file, or a Pillow image."""
    if not contract.is_image:
        raise DataError(f"The input is {_kind(x)}, an image or a path. Expected: {contract.describe()}")
    shape, size, channels = contract.inputs["x"].shape, contract.preprocessing.resize, contract.image_channels or 3
    name = str(x) if isinstance(x, str | Path) else "The image"
    if _is_pillow(x):
        pixels = to_pixels(x, size=size, channels=channels)
    else:
        source = Path(x) if isinstance(x, str) else x
        pixels = decode_image(source, size=size, channels=channels, name=name)
    if pixels.shape != shape:
        height, width = pixels.shape[1:]
        raise DataError(
            f"{name} has {width} x {height} pixels. Expected: {shape[2]} x {shape[1]}, as in training; the training "
            "data record no resizing, so resize it in the same way as they were"
        )
    return _scale(pixels, contract.inputs["x"], name)


def _scale(pixels: NDArray[np.uint8], summary: TensorSummary, name: str) -> Array:
    """Return decoded pixels as the model takes them."""
    if summary.dtype == "uint8" or _is_unit_range(summary):
        return pixels.astype(np.float32) / np.float32(255)
    if summary.low is not None and summary.low >= 0 and UNSCALED <= (summary.high or 0) <= 255:
        return pixels.astype(np.float32)
    raise DataError(
        f"{name} has pixels from 0 to 255, but the model was trained on {describe_tensor('x', summary)}. Convert it in "
        "the same way as the training data, and pass an array"
    )


def _is_unit_range(summary: TensorSummary) -> bool:
    is_float = summary.dtype.startswith(("float", "bfloat"))
    return is_float and summary.low is not None and summary.low >= 0 and (summary.high or 0) <= 1


def _is_table(contract: InputContract) -> bool:
    summary = contract.inputs.get("x")
    return summary is not None and len(summary.shape) == 1 and summary.dtype.startswith(("float", "bfloat"))


def _prepare_table(x: Any, contract: InputContract) -> Array:
    summary, table = contract.inputs["x"], select_columns(x, contract.preprocessing.columns, "The input")
    is_row = table.ndim == 1 and tuple(summary.shape) != (1,)  # a Series of another index
    return _prepare_array(table.to_numpy() if is_row else read_table(table, "The input"), summary, "x")


def _prepare_columns(x: Mapping[str, Any], contract: InputContract) -> Array:
    """Return the rows of a table from its columns by name: a number of each, or arrays of one length."""
    names = contract.preprocessing.columns
    if missing := [name for name in names if name not in x]:
        lacks = f"lacks the column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing[:MAX_NAMES]))}"
        given = ", ".join(map(repr, map(str, list(x)[:MAX_NAMES]))) or "no columns"
        raise DataError(f"The input has {given}, but {lacks}. Expected: all columns, or x: {contract.describe()}")
    values = [_to_numpy(x[name]) for name in names]
    is_row = all(not column.ndim for column in values)
    values = [column.reshape(-1) for column in values]
    if len({len(column) for column in values}) != 1:
        raise DataError(
            f"The columns have {sorted({len(column) for column in values})} values. Expected: equal numbers"
        )
    table = np.stack(values, 1)
    return _prepare_array(table[0] if is_row else table, contract.inputs["x"], "x")


def _prepare_mapping(x: Mapping[str, Any], contract: InputContract) -> dict[str, Array]:
    if contract.preprocessing.columns and "x" in contract.inputs and set(x) != {"x"}:
        return {"x": _prepare_columns(x, contract)}
    tokenizer = contract.preprocessing.tokenizer
    if tokenizer is not None and set(x) == set(tokenizer.texts):
        columns = [[x[name]] if isinstance(x[name], str) else list(x[name]) for name in tokenizer.texts]
        if len({len(column) for column in columns}) != 1:
            counts = ", ".join(
                f"{len(column)} of {name!r}" for name, column in zip(tokenizer.texts, columns, strict=True)
            )
            raise DataError(f"The texts have different counts: {counts}. Expected: one of each for every input")
        return _tokenize(list(zip(*columns, strict=True)), tokenizer)
    if set(x) != set(contract.inputs):
        raise DataError(f"The inputs are named {sorted(map(str, x))}. Expected: {contract.describe()}")
    summaries = dict(contract.inputs)
    if tokenizer is not None and "input_ids" in summaries:  # not all tokens occur in the training data
        summaries["input_ids"] = replace(summaries["input_ids"], low=0, high=tokenizer.tokens() - 1)
    arrays = {name: _prepare_array(x[name], summary, name) for name, summary in summaries.items()}
    rows = {len(values) for values in arrays.values()}
    if len(rows) != 1:
        raise DataError(f"The inputs have {sorted(rows)} rows. Expected: the same number of rows in each")
    return arrays


def _tokenize(rows: Sequence[Any], tokenizer: Tokenizer) -> dict[str, Array]:
    texts = [
        (row,) if isinstance(row, str) else tuple(row) if isinstance(row, tuple | list) else (row,) for row in rows
    ]
    for row in texts:
        if len(row) != len(tokenizer.texts) or not all(isinstance(text, str) for text in row):
            found = f"{len(row)} texts" if all(isinstance(t, str) for t in row) else _kind(row[0])
            names = ", ".join(repr(name) for name in tokenizer.texts)
            raise DataError(f"An input is {found}. Expected: {len(tokenizer.texts)} texts, {names}")
    return {**tokenizer.encode(texts)} if texts else {}


def _prepare_array(x: Any, summary: TensorSummary, name: str) -> Array:
    """Return one input or a batch as an array `[N, ...]` of the model's dtype, after checking shape and values."""
    values = _to_numpy(x)
    shape = tuple(summary.shape)
    is_gray = len(shape) == 3 and shape[0] == 1 and 2 <= values.ndim <= 3
    if is_gray and values.shape[-2:] == shape[1:]:  # without a channel axis: [H, W] or [N, H, W]
        values = values.reshape(-1, *shape)
    if values.shape == shape:
        values = values[None]
    if values.shape[1:] != shape or not len(values):
        raise DataError(_shape_error(values, shape, name))
    is_float, wants_float = values.dtype.kind == "f", summary.dtype.startswith(("float", "bfloat"))
    if values.dtype.kind not in "fiub":
        raise DataError(f"The input {name!r} has dtype {values.dtype}. Expected: {describe_tensor(name, summary)}")
    if is_float and not np.isfinite(values).all():
        raise DataError(f"The input {name!r} contains NaN or infinity. Expected: {describe_tensor(name, summary)}")
    if summary.dtype == "uint8" or (wants_float and values.dtype == np.uint8):
        if values.dtype == np.uint8:
            return _scale(values, summary, f"The input {name!r}")
        _check_unit_range(values, summary, name)
        return values.astype(np.float32)
    if wants_float:
        _check_range(values, summary, name)
        return values.astype(np.float32)
    if is_float:
        raise DataError(f"The input {name!r} has dtype {values.dtype}. Expected: {describe_tensor(name, summary)}")
    allowed = allowed_range(summary)
    if allowed is not None and (values.min() < allowed[0] or values.max() > allowed[1]):
        found = values.min() if values.min() < allowed[0] else values.max()
        raise DataError(f"The input {name!r} contains {found}. Expected: {describe_tensor(name, summary)}")
    return values.astype(np.int64)


def _to_numpy(x: Any) -> Array:
    if hasattr(x, "detach"):  # a tensor; NumPy has no bfloat16
        x = x.detach().cpu()
        x = x.float() if str(x.dtype) == "torch.bfloat16" else x
        return np.asarray(x.numpy())
    try:
        return np.asarray(x)
    except ValueError as error:
        raise DataError(f"The input cannot become an array ({error}). Expected: rows of one shape") from None


def _shape_error(values: Array, shape: tuple[int, ...], name: str) -> str:
    found = list(values.shape[1:] if values.ndim > len(shape) else values.shape)
    text = f"The input {name!r} has shape {list(values.shape)}. Expected: {list(shape)}, or {['N', *shape]} for a batch"
    if len(shape) == 3 and len(found) == 3 and found == [*shape[1:], shape[0]]:
        axes = "(2, 0, 1)" if values.ndim == 3 else "(0, 3, 1, 2)"
        return (
            f"{text}. Channels are last: move them first with x.transpose{axes} of NumPy, or x.permute{axes} of torch"
        )
    if len(shape) == 3 and len(found) == 3 and found[1:] == list(shape[1:]):
        return f"{text}. The number of channels is {found[0]}, not {shape[0]}: convert the images"
    return text.replace("'N'", "N")


def _check_unit_range(values: Array, summary: TensorSummary, name: str) -> None:
    low, high = (values.min(), values.max()) if values.dtype.kind != "b" else (0, 1)
    if values.dtype.kind != "f" or low < -RANGE_TOLERANCE or high > 1 + RANGE_TOLERANCE:
        hint = "divide them by 255, or pass uint8" if low >= 0 else "do not normalize them, the model does"
        raise DataError(
            f"The input {name!r} is {values.dtype} from {low:g} to {high:g}. Expected: "
            f"{describe_tensor(name, summary)}; {hint}"
        )


def _check_range(values: Array, summary: TensorSummary, name: str) -> None:
    """Reject floats of another scale. Out-of-distribution values are no error, so features may exceed their range."""
    if summary.low is None or summary.high is None:
        return
    if len(summary.shape) == 3 and _is_unit_range(summary):
        return _check_unit_range(values, summary, name)
    low, high = float(values.min()), float(values.max())
    smallest, largest = allowed_range(summary) or (low, high)
    is_small = len(summary.shape) == 3 and summary.low >= 0 and summary.high >= UNSCALED and 0 < high <= 1
    if low < smallest or high > largest or is_small:
        raise DataError(
            f"The input {name!r} has values from {low:g} to {high:g}. Expected: {describe_tensor(name, summary)}; the "
            "usual cause is another scale, such as pixels from 0 to 255 instead of 0 to 1"
        )
    return None


def _kind(x: Any) -> str:
    return f"a {type(x).__name__}"
