"""Conversion of NumPy arrays and integer labels to the tensors that models and losses take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.types import Inputs

Array = Tensor | NDArray[Any]
"""A tensor or a NumPy array."""

ArrayInputs = Array | Mapping[str, Array]
"""The inputs of a model as tensors or NumPy arrays."""


def to_tensor(values: Any, what: str = "The value") -> Tensor:
    """Return a tensor, or a NumPy array or list of numbers as a tensor; memory is shared where possible."""
    if isinstance(values, Tensor):
        return values
    try:
        array = np.asarray(values)
        shared = np.require(array, requirements=["C", "W"]).reshape(array.shape)  # torch needs writable memory
        return torch.from_numpy(shared)
    except (TypeError, ValueError) as error:
        kind = getattr(values, "dtype", type(values).__name__)
        raise DataError(
            f"{what} is {kind}, which cannot become a tensor ({error}). Expected: a tensor or a NumPy array of "
            "numbers. The usual cause is an array of text, or of rows of different lengths"
        ) from None


def to_inputs(x: ArrayInputs, what: str = "The input") -> Inputs:
    """Return inputs as tensors."""
    if isinstance(x, Mapping):
        return {name: to_tensor(values, f"{what} {name!r}") for name, values in x.items()}
    return to_tensor(x, what)


def to_labels(y: Any, what: str = "The labels") -> Tensor:
    """Return labels as a tensor. Integers of any width and booleans become int64, which losses need."""
    labels = to_tensor(y, what)
    if labels.is_floating_point() or labels.is_complex():
        return labels
    return labels.to(torch.int64)
