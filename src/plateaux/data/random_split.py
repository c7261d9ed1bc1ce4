"""Train-validation split, and bootstrap samples of the training set (bagging)."""

from __future__ import annotations

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError


def bootstrap(ids: Tensor, fraction: float, seed: int) -> Tensor:
    """Sample `fraction` times as many ids with replacement, sorted, some more than once.

    With fraction 1, a bootstrap sample of n ids omits (1 - 1/n)^n of them, about 37 %.
    """
    count = round(fraction * len(ids))
    if count < 1:
        raise RecipeError(
            f"data.bootstrap = {fraction:g} of {len(ids)} training samples gives an empty bootstrap sample. "
            "Set it to 1.0 to draw as many as there are samples."
        )
    generator = torch.Generator().manual_seed(seed)
    return ids[torch.randint(len(ids), (count,), generator=generator)].sort().values


def split(n: int, validation: float | int, seed: int) -> tuple[Tensor, Tensor]:
    """Split n samples into train ids and validation ids, both sorted; `validation` is a fraction (0.1) or a count."""
    if isinstance(validation, float) and not 0 <= validation < 1:
        raise RecipeError(f"A validation fraction of {validation} is not in [0, 1). For a count, use an integer.")
    count = round(n * validation) if isinstance(validation, float) else validation
    if not 0 <= count < n:
        raise RecipeError(f"{count} of {n} samples cannot be held out for validation. Use 0 to {n - 1}.")
    order = random_permutation(n, seed)
    return order[count:].sort().values, order[:count].sort().values


def random_permutation(n: int, seed: int) -> Tensor:
    """Return a random permutation of 0 .. n-1 from a generator seeded with `seed`."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))
