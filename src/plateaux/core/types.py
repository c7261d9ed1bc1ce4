"""Basic types: tensor trees, batches, estimates, and seeds, and tensors from NumPy arrays and labels.

Letters in shapes: M all members, m members of this process, R members whose outputs are gathered, B samples of a batch,
C classes, N samples of a data set. The member axis is always first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.plain_types import Estimate as Estimate
from plateaux.core.plain_types import derive_seed as derive_seed

TensorTree = dict[str, Tensor]
"""The tensors of one member by name."""

Inputs = Tensor | Mapping[str, Tensor]
"""The inputs of a model: a tensor `[B, ...]`, or named tensors for models with several inputs."""

Array = Tensor | NDArray[Any]
"""A tensor or a NumPy array."""

ArrayInputs = Array | Mapping[str, Array]
"""The inputs of a model as tensors or NumPy arrays."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step, and the seed of all randomness in it."""

    x: Inputs  # [B, ...]
    y: Tensor  # [B, ...]; class numbers, or class probabilities [B, C] after mixup
    index: Tensor  # [B] stable sample ids: the same in every epoch, order, and process
    seed: int = 0
    extra: Mapping[str, Inputs] = field(default_factory=dict)  # inputs of other samples, by name

    def __len__(self) -> int:
        return len(self.index)

    def take(self, rows: slice | Tensor) -> Batch:
        """Return the samples `rows` of this batch as a batch; `extra` is unchanged."""
        x = map_tensors(self.x, lambda t: _rows(t, rows))
        return replace(self, x=x, y=_rows(self.y, rows), index=_rows(self.index, rows))


def map_tensors(x: Inputs, fn) -> Inputs:  # type: ignore[no-untyped-def]
    """Apply `fn` to the tensor, or to every named tensor, of `x`."""
    if isinstance(x, Tensor):
        return fn(x)  # type: ignore[no-any-return]
    return {name: fn(tensor) for name, tensor in x.items()}


def first_tensor(x: Inputs) -> Tensor:
    """Return the tensor, or the first named tensor, of `x`: its length and its device are those of all."""
    return x if isinstance(x, Tensor) else next(iter(x.values()))


def to_tensor(values: Any, what: str = "The value") -> Tensor:
    """Return a tensor, or a NumPy array or list of numbers as a tensor; memory is shared where possible."""
    if isinstance(values, Tensor):
        return values
    if type(values).__module__.startswith("scipy.sparse"):
        raise DataError(f"{what} is a sparse matrix of scipy. Expected: a dense array: {what}.toarray()")
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


def _rows(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Return some rows in the memory format of the tensor, on which the speed of convolutions depends."""
    if isinstance(rows, slice):
        return tensor[rows]
    selected = tensor.index_select(0, rows)
    is_channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return selected.contiguous(memory_format=torch.channels_last) if is_channels_last else selected
