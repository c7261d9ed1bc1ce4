"""Bagging: every member learns from a bag of its own, drawn from the training samples with replacement."""

from __future__ import annotations

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError


def bootstrap(ids: Tensor, fraction: float, seed: int) -> Tensor:
    """Return so many of the ids, drawn with replacement, as `share` of them are: sorted, some more than once.

    Of n ids a bag with share 1 leaves out (1 - 1/n)^n of them, about 37 %.
    """
    count = round(fraction * len(ids))
    if count < 1:
        raise RecipeError(
            f"data.bootstrap = {fraction:g} of {len(ids)} training samples makes an empty bag; "
            "give 1.0 for as many draws as there are samples"
        )
    draw = torch.Generator().manual_seed(seed)
    return ids[torch.randint(len(ids), (count,), generator=draw)].sort().values


def split(n: int, validation: float | int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the ids to train on and the ids to validate on, both sorted: a share (0.1) or a number (5000) of n."""
    if isinstance(validation, float) and not 0 <= validation < 1:
        raise RecipeError(f"A validation share of {validation} is not in [0, 1); give a whole number for a count.")
    count = round(n * validation) if isinstance(validation, float) else validation
    if not 0 <= count < n:
        raise RecipeError(f"{count} of {n} samples cannot be kept for validation; give 0 to {n - 1}.")
    order = _permutation(n, seed)
    return order[count:].sort().values, order[:count].sort().values


def _permutation(n: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))
