"""Symmetric label noise: some training labels are replaced by another class."""

from __future__ import annotations

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.data.sources import InMemorySource, Source


def with_label_noise(source: Source, fraction: float, *, classes: int, seed: int) -> InMemorySource:
    """Return the source with `fraction` of its labels replaced; every other class is equally likely."""
    if not isinstance(source, InMemorySource) or source.y.is_floating_point() or source.y.ndim != 1:
        raise RecipeError(
            f"data.label_noise = {fraction:g} needs a classification data set in memory, such as cifar10 or "
            "fashion_mnist; leave it out, or change the labels of your data set yourself"
        )
    return InMemorySource(source.x, noisy_labels(source.y, fraction, classes=classes, seed=seed))


def noisy_labels(y: Tensor, fraction: float, *, classes: int, seed: int) -> Tensor:
    """Return labels `[N]` of which round(fraction * N) are another class."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randperm(len(y), generator=rng)[: round(fraction * len(y))]
    shift = torch.randint(1, classes, (len(ids),), generator=rng)
    noisy = y.clone()
    noisy[ids] = (y[ids] + shift) % classes
    return noisy
