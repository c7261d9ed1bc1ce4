"""Arrays of a user as the inputs and labels of a data set: dtypes, layout of images, classes, and standardization."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.types import Inputs, to_tensor
from plateaux.data.samples import label_problem

CHANNELS = (1, 3, 4)
CHUNK_ROWS = 4096


def convert_inputs(x: Any, what: str = "x") -> Inputs:
    """Return inputs as tensors: uint8 images with channels first, other integers as int64, all else as float32."""
    if isinstance(x, Mapping):
        inputs = {str(name): _convert(values, f"{what}[{name!r}]") for name, values in x.items()}
        lengths = {name: len(values) for name, values in inputs.items()}
        if not inputs or len(set(lengths.values())) > 1:
            raise DataError(f"{what} has the named inputs {lengths}: give at least one, all with the same length.")
        return inputs
    return _convert(x, what)


def _convert(x: Any, what: str) -> Tensor:
    values = to_tensor(x, what)
    if values.ndim < 2:
        raise DataError(
            f"{what} has shape {list(values.shape)}, but samples are rows: give [N, features] for a table or "
            f"[N, channels, height, width] for images; {what}.reshape(-1, 1) makes a table of one feature."
        )
    if values.is_complex():
        raise DataError(f"{what} has complex numbers: give real ones, such as the real and imaginary part as features.")
    if values.is_floating_point():
        bad = ~torch.cat([rows.flatten(1).isfinite().all(1) for rows in torch.split(values, CHUNK_ROWS)])
        if bool(bad.any()):
            raise DataError(
                f"{what} has NaN or infinity in {int(bad.sum()):,} of {len(values):,} samples (first: sample "
                f"{int(bad.nonzero()[0])}): remove these samples or replace the values."
            )
    is_image = values.dtype == torch.uint8 and values.ndim >= 3
    if is_image and values.ndim == 3:
        values = values[:, None]
    if values.ndim == 4 and (is_image or values.is_floating_point()):
        is_last = values.shape[3] in CHANNELS and values.shape[1] not in CHANNELS
        values = values.movedim(3, 1) if is_last else values
    if is_image:
        return values.contiguous()
    is_token = not values.is_floating_point() and values.dtype not in (torch.bool, torch.uint8)
    return values.to(torch.int64 if is_token else torch.float32).contiguous()


def convert_labels(y: Any, classes: int | None = None, what: str = "y") -> tuple[Tensor, tuple[str, ...]]:
    """Return class numbers `[N]`, and the class names if the labels are not numbers from 0.

    Text, and integers that are not all of 0 .. C-1, become numbers in sorted order. With `classes`, integers are class
    numbers already.
    """
    values = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    if values.ndim != 1:
        raise DataError(f"{what} is {label_problem(values)}.")
    if not len(values):
        raise DataError(f"{what} has no labels: give one for each sample.")
    values = _to_integers_or_text(values, what)
    if values.dtype.kind == "U":
        found, numbers = np.unique(values, return_inverse=True)
        return torch.from_numpy(numbers.astype(np.int64)), tuple(map(str, found))
    if classes is not None:
        return torch.from_numpy(values), ()
    found, numbers = np.unique(values, return_inverse=True)
    if found[0] == 0 and found[-1] == len(found) - 1:
        return torch.from_numpy(values), ()
    return torch.from_numpy(numbers.astype(np.int64)), tuple(map(str, found.tolist()))


def _to_integers_or_text(values: NDArray[Any], what: str) -> NDArray[Any]:
    if values.dtype.kind == "O":
        missing = [i for i, value in enumerate(values) if value is None or value != value]  # NaN differs from itself
        if missing:
            raise DataError(
                f"{what} has {len(missing):,} missing labels (first: sample {missing[0]}): remove these samples."
            )
        kinds = {str if isinstance(value, str) else type(value) for value in values}
        values = values.astype(str) if kinds == {str} else np.asarray(values.tolist())
    if values.dtype.kind in "US" or values.dtype.kind == "T":
        return values.astype(str)
    if values.dtype.kind == "f":
        if not bool(np.isfinite(values).all()):
            raise DataError(f"{what} has NaN or infinity: remove the samples without a label.")
        if not bool((values == np.floor(values)).all()):
            raise DataError(
                f"{what} has fractions, such as {float(values[values != np.floor(values)][0]):g}, but classes are "
                "needed: regression is not supported yet."
            )
    elif values.dtype.kind not in "iub":
        raise DataError(f"{what} has labels of dtype {values.dtype}: give integers or text.")
    return values.astype(np.int64)


def mean_and_std(x: Inputs) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each feature or channel, of uint8 in [0, 1]; a constant gets std 1.

    Token ids and named inputs are not standardized, so the results are empty.
    """
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.dtype == torch.uint8):
        return (), ()
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    axes = [axis for axis in range(x.ndim) if axis != 1]
    count = x.numel() / x.shape[1]
    mean = sum((rows.sum(axes) for rows in _chunks(x, scale)), torch.zeros(x.shape[1], dtype=torch.float64)) / count
    centered = (rows.sub_(mean.view(1, -1, *[1] * (x.ndim - 2))) for rows in _chunks(x, scale))
    variance = sum((rows.square_().sum(axes) for rows in centered), torch.zeros_like(mean)) / count
    # The error of the mean leaves a tiny variance of a constant, by which nothing may be divided.
    is_constant = variance.sqrt() <= 1e-12 * mean.abs()
    std = torch.where(is_constant, 1.0, variance.sqrt())
    return tuple(mean.tolist()), tuple(std.tolist())


def _chunks(x: Tensor, scale: float) -> Iterator[Tensor]:
    return (rows.to(torch.float64, copy=True).div_(scale) for rows in torch.split(x, CHUNK_ROWS))
