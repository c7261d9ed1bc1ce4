"""Basic types: tensor trees, batches, estimates, and seeds.

Letters in shapes: M all members, m members of this process, R members whose outputs are gathered, B samples of a batch,
C classes, N samples of a data set. The member axis is always first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# Defined in modules that do not import torch, for code that must start fast.
from plateaux.core.estimate import Estimate as Estimate
from plateaux.core.seeds import derive_seed as derive_seed

TensorTree = dict[str, Tensor]
"""The tensors of one member by name."""

Inputs = Tensor | Mapping[str, Tensor]
"""The inputs of a model: a tensor `[B, ...]`, or named tensors for models with several inputs."""


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


def _rows(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Return some rows in the memory format of the tensor, on which the speed of convolutions depends."""
    if isinstance(rows, slice):
        return tensor[rows]
    selected = tensor.index_select(0, rows)
    is_channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return selected.contiguous(memory_format=torch.channels_last) if is_channels_last else selected
