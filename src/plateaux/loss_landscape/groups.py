"""Groups of m samples, for m-sharpness: probes of the mean loss of few samples at a time, as in a training step.

The worst case of a group is larger than that of all samples at once, so m is part of the definition of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.types import Batch, TensorTree
from plateaux.loss_landscape.loss_surface import LossSurface

Group = Sequence[Batch]
"""The samples of one mean loss, in batches that fit in memory."""

REMAINDER = "the last group is left out if it has fewer than m samples, unless it is the only one"


def split_groups(batches: Sequence[Batch], m: int) -> Iterator[Group]:
    """Yield groups of m consecutive samples; an incomplete last group is left out unless it is the only one.

    Batches are split and concatenated as needed, and never exceed the largest given batch.
    """
    total, largest = sum(len(batch) for batch in batches), max((len(batch) for batch in batches), default=0)
    if not total:
        raise RecipeError("The sample of data is empty; give at least one sample")
    size = min(m, total)
    group: list[Batch] = []
    for batch in batches:
        start = 0
        while start < len(batch):
            missing = size - sum(len(part) for part in group)
            group.append(batch.take(slice(start, start + missing)))
            start += missing
            if sum(len(part) for part in group) == size:
                yield [concat_batches(group)] if size <= largest else group
                group = []


def num_grouped(samples: int, m: int) -> int:
    """Return the number of samples that are in groups of m."""
    return samples // m * m or samples


def concat_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches; extra fields are those of the first batch."""
    if len(batches) == 1:
        return batches[0]
    y, index = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("y", "index"))
    return replace(batches[0], x=_concat_inputs([batch.x for batch in batches]), y=y, index=index)


def _concat_inputs(inputs: Sequence[object]) -> Tensor | dict[str, Tensor]:
    first = inputs[0]
    if isinstance(first, Tensor):
        return torch.cat(inputs)  # type: ignore[arg-type]
    return {name: torch.cat([x[name] for x in inputs]) for name in first}  # type: ignore[attr-defined,index]


def group_losses(surface: LossSurface, group: Group) -> Tensor:
    """Return the loss of every sample of a group `[m]` in float64, at the current weights."""
    return torch.cat([surface.losses(batch) for batch in group])


def group_gradient(surface: LossSurface, group: Group) -> tuple[float, TensorTree]:
    """Return the mean loss of a group and its gradient, at the current weights."""
    if len(group) == 1:
        loss, gradient = surface.gradient(group[0])
        return float(loss), gradient
    total = sum(len(batch) for batch in group)
    mean, sums = 0.0, None
    for batch in group:
        loss, gradient = surface.gradient(batch)
        mean += float(loss) * len(batch) / total
        if sums is None:
            sums = tensor_tree.scale(gradient, len(batch) / total)
        else:
            tensor_tree.add_(sums, gradient, times=len(batch) / total)
    assert sums is not None
    return mean, sums
