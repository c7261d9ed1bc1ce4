"""Samples in groups of m, for what is asked of the mean loss of few samples at a time, as training feels it.

A group's worst case is larger than that of all samples together: m is part of the definition.
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
"""Samples whose mean loss counts, in pieces that fit memory."""

REMAINDER = "a rest of fewer than m samples is left out unless there are no more"


def split_groups(batches: Sequence[Batch], m: int) -> Iterator[Group]:
    """Yield m samples after m samples, in order; a rest is left out unless it is all there is.

    Batches are cut and joined as needed, and never grow beyond the largest of those given.
    """
    total, largest = sum(len(batch) for batch in batches), max((len(batch) for batch in batches), default=0)
    if not total:
        raise RecipeError("There are no samples to ask about; give at least one")
    wanted = min(m, total)
    held: list[Batch] = []
    for batch in batches:
        start = 0
        while start < len(batch):
            lacks = wanted - sum(len(part) for part in held)
            held.append(batch.take(slice(start, start + lacks)))
            start += lacks
            if sum(len(part) for part in held) == wanted:
                yield [concat_batches(held)] if wanted <= largest else held
                held = []


def num_grouped(samples: int, m: int) -> int:
    """Return how many of so many samples are in groups of m."""
    return samples // m * m or samples


def concat_batches(parts: Sequence[Batch]) -> Batch:
    """Return several batches as one; named extras are those of the first."""
    if len(parts) == 1:
        return parts[0]
    y, index = (torch.cat([getattr(part, name) for part in parts]) for name in ("y", "index"))
    return replace(parts[0], x=_cat([part.x for part in parts]), y=y, index=index)


def _cat(inputs: Sequence[object]) -> Tensor | dict[str, Tensor]:
    first = inputs[0]
    if isinstance(first, Tensor):
        return torch.cat(inputs)  # type: ignore[arg-type]
    return {name: torch.cat([x[name] for x in inputs]) for name in first}  # type: ignore[attr-defined,index]


def group_losses(ground: LossSurface, group: Group) -> Tensor:
    """Return the loss of every sample of a group `[m]` in float64, where the member stands now."""
    return torch.cat([ground.losses(batch) for batch in group])


def group_gradient(ground: LossSurface, group: Group) -> tuple[float, TensorTree]:
    """Return the mean loss of a group and its gradient, where the member stands now."""
    if len(group) == 1:
        loss, found = ground.gradient(group[0])
        return float(loss), found
    total = sum(len(batch) for batch in group)
    mean, sums = 0.0, None
    for batch in group:
        loss, found = ground.gradient(batch)
        mean += float(loss) * len(batch) / total
        if sums is None:
            sums = tensor_tree.scale(found, len(batch) / total)
        else:
            tensor_tree.add_(sums, found, times=len(batch) / total)
    assert sums is not None
    return mean, sums
