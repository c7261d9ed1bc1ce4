"""Confidences in bins, and a confidence with its rightness in one number.

Confidence is the largest probability, the guess its class; of equal classes the first is the guess.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError

CERTAIN = torch.finfo(torch.float32).tiny  # stands for -log(1): a zero would lose its sign where rows are added up


def check_bins(bins: int) -> None:
    """Refuse a number of bins that is none."""
    if bins < 1:
        raise RecipeError(f"bins = {bins}: confidences are sorted into 1 bin or more; leave it out for 15")


def guesses(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the confidence `[R, B]` and the guess `[R, B]` from log-probabilities `[R, B, C]`."""
    best, guess = log_p.max(-1)
    return best.clamp(max=0), guess  # should a mean over members round to above probability 1


def equal_width(p: Tensor, bins: int) -> Tensor:
    """Return the bin of every probability: bin i holds [i/bins, (i+1)/bins), and the last one holds 1 too."""
    edges = torch.arange(1, bins, dtype=torch.float64, device=p.device) / bins
    return torch.bucketize(p.double().contiguous(), edges, right=True)


def binned(home: Tensor, parts: Sequence[Tensor], bins: int) -> Tensor:
    """Return the sum of every part `[..., B]` over the samples of every bin: `[..., bins, parts]`."""
    empty = home.new_zeros(*home.shape[:-1], bins, dtype=torch.float64)
    return torch.stack([empty.scatter_add(-1, home, part.double()) for part in parts], -1)


def pack(log_confidence: Tensor, right: Tensor) -> Tensor:
    """Return one float32 for each confidence and its rightness: minus the logarithm, negative where wrong.

    The logarithm tells confidences apart that round to 1, and nothing of a float32 one is lost.
    """
    doubt = (-log_confidence).float().clamp(min=CERTAIN)
    return torch.where(right, doubt, -doubt)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return minus the logarithm of the confidence in float64, and whether the guess was right."""
    return packed.abs().double(), packed > 0
