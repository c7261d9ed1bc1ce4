"""Bagging: every member learns from a bag of its own, drawn from the training samples with replacement."""

from __future__ import annotations

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError


def bag(ids: Tensor, share: float, key: int) -> Tensor:
    """Return so many of the ids, drawn with replacement, as `share` of them are: sorted, some more than once.

    Of n ids a bag with share 1 leaves out (1 - 1/n)^n of them, about 37 %.
    """
    count = round(share * len(ids))
    if count < 1:
        raise RecipeError(
            f"data.bag = {share:g} of {len(ids)} training samples makes an empty bag; "
            "give 1.0 for as many draws as there are samples"
        )
    draw = torch.Generator().manual_seed(key)
    return ids[torch.randint(len(ids), (count,), generator=draw)].sort().values
