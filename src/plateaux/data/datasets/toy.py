"""Toy data sets of points in two dimensions, for tests, demos, and plots."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.ranges import Count, NonNegative, Seed, Size
from plateaux.core.registry import dataset
from plateaux.core.types import derive_seed
from plateaux.data.sources import DataSplits, InMemorySource

Curve = Callable[[Tensor, Tensor], Tensor]
"""Maps classes `[N]` and positions `[N]` in [0, 1) along the curve of the class to points `[N, 2]`."""


@dataset
def moons(*, samples: Count = 1000, test_samples: Count = 1000, noise: NonNegative = 0.1, seed: Seed = 0) -> DataSplits:
    """Two interleaving half circles."""

    def curve(y: Tensor, t: Tensor) -> Tensor:
        upper = torch.stack([torch.cos(math.pi * t), torch.sin(math.pi * t)], 1)
        lower = torch.stack([1 - torch.cos(math.pi * t), 0.5 - torch.sin(math.pi * t)], 1)
        return torch.where(y[:, None] == 0, upper, lower)

    return _build_points("moons", curve, 2, samples, test_samples, noise, seed)


@dataset
def spirals(
    *, samples: Count = 1000, test_samples: Count = 1000, noise: NonNegative = 0.05, classes: Size = 3, seed: Seed = 0
) -> DataSplits:
    """Spiral arms, one per class, in the unit circle."""

    def curve(y: Tensor, t: Tensor) -> Tensor:
        angle = 2 * math.pi * (0.75 * t + y / classes)
        return (0.1 + 0.9 * t)[:, None] * torch.stack([angle.cos(), angle.sin()], 1)

    return _build_points("spirals", curve, classes, samples, test_samples, noise, seed)


@dataset
def blobs(
    *, samples: Count = 1000, test_samples: Count = 1000, noise: NonNegative = 0.3, classes: Size = 3, seed: Seed = 0
) -> DataSplits:
    """Isotropic Gaussian clusters with centers evenly spaced on the unit circle."""

    def curve(y: Tensor, t: Tensor) -> Tensor:
        angle = 2 * math.pi * y / classes
        return torch.stack([angle.cos(), angle.sin()], 1)

    return _build_points("blobs", curve, classes, samples, test_samples, noise, seed)


def _build_points(
    name: str, curve: Curve, classes: int, samples: int, test_samples: int, noise: float, seed: int
) -> DataSplits:
    if classes < 2 or min(samples, test_samples) < classes or noise < 0:
        raise RecipeError(
            f"{name} has {classes} classes, {samples} + {test_samples} samples, and noise {noise}. It needs at least 2 "
            "classes, one sample per class, and noise of at least 0."
        )

    def sample(split: str, count: int) -> InMemorySource:
        generator = Generator().manual_seed(derive_seed(seed, name, split))
        y = torch.arange(count) % classes  # balanced
        t = torch.rand(count, generator=generator, dtype=torch.float64)
        jitter = noise * torch.randn(count, 2, generator=generator, dtype=torch.float64)
        return InMemorySource((curve(y, t) + jitter).float(), y)

    return DataSplits(name, sample("train", samples), sample("test", test_samples), classes, (2,))
