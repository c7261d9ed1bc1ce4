"""The nouns everything else is written in: Tree, Batch, Value, and keys for randomness.

Shapes used throughout: M all members, m held here, R rows on the table, B batch, C classes, N data set.
The member axis is always first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch
from torch import Tensor

TensorTree = dict[str, Tensor]
"""One member's tensors by name."""

Inputs = Tensor | Mapping[str, Tensor]
"""What a model is called with: a tensor `[B, ...]`, or named tensors for models that take several."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one step, and the only randomness a settle may use."""

    x: Inputs  # [B, ...]
    y: Tensor  # [B, ...]; class numbers, or class probabilities [B, C] once samples are mixed
    index: Tensor  # [B] stable sample ids: the same in every epoch, order and process
    seed: int = 0
    extra: Mapping[str, Inputs] = field(default_factory=dict)  # inputs of other samples, by name

    def __len__(self) -> int:
        return len(self.index)

    def take(self, rows: slice | Tensor) -> Batch:
        """Return the samples `rows` of this batch as a batch; named extras go along whole."""
        x = map_tensors(self.x, lambda t: _rows(t, rows))
        return replace(self, x=x, y=_rows(self.y, rows), index=_rows(self.index, rows))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured number, with its standard error where it has one.

    `error` comes from the sample of data, `draws` from what was drawn at random to find the number.
    """

    value: float
    stderr: float | None = None
    mc_stderr: float | None = None


def map_tensors(x: Inputs, fn) -> Inputs:  # type: ignore[no-untyped-def]
    """Apply `fn` to the tensor, or to every named tensor, of `x`."""
    if isinstance(x, Tensor):
        return fn(x)  # type: ignore[no-any-return]
    return {name: fn(tensor) for name, tensor in x.items()}


def _rows(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """Return some rows, laid out in memory as the tensor is: a convolution feels it."""
    if isinstance(rows, slice):
        return tensor[rows]
    chosen = tensor.index_select(0, rows)
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return chosen.contiguous(memory_format=torch.channels_last) if last else chosen


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit number that depends on every part and on their order.

    >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1) != derive_seed(0, "order", 2)
    True
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
