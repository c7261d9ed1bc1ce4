"""Numbers of every sample on a ground, and what they say together: a mean with its two errors apart."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from plateaux.core.errors import RecipeError
from plateaux.core.stats.estimates import mean
from plateaux.core.types import Batch, Estimate
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.optim.grad_norms import squared_norms


def squared_gradient_norms(ground: LossSurface) -> Tensor:
    """Return the squared norm of every sample's gradient over the trained weights, `[N]` in float64."""
    require_independent_samples(ground, "gradient")

    def loss(table: Tensor, batch: Batch) -> Tensor:
        return ground.losses_from_logits(table[0], batch)[None]

    given = loss if ground.normalize_logits else None  # cross entropy itself is known, and done without cancelling
    return torch.cat([squared_norms(ground.member, batch, given) for batch in ground.batches])


def require_independent_samples(ground: LossSurface, what: str) -> None:
    """Refuse a network in which samples see one another: none has a gradient of its own then."""
    if any(isinstance(part, _BatchNorm) and part.training for part in ground.module.modules()):
        raise RecipeError(
            f"BatchNorm in training mode mixes the samples of a batch, so that no sample has a {what} of its own; "
            "ask with BatchNorm in evaluation mode"
        )


def mean_over_samples(numbers: Tensor) -> Estimate:
    """Return the mean of the samples' numbers `[N]`, with its standard error over samples."""
    wide = numbers.double()
    return mean(float(wide.sum()), float(wide.square().sum()), len(wide))


def mean_over_draws(numbers: Tensor) -> Estimate:
    """Return the mean of the samples' numbers in every draw `[D, N]`, with the errors of samples and draws apart.

    The spread between samples holds some of the draws' too; it is taken out, as in an analysis of variance.
    """
    wide = numbers.double()
    draws, samples = wide.shape
    by_draw, by_sample, middle = wide.mean(1), wide.mean(0), float(wide.mean())
    drawn = float(by_draw.std() / draws**0.5) if draws > 1 else None
    if samples < 2:
        return Estimate(middle, None, drawn)
    spread = float(by_sample.var())
    if draws > 1:
        rest = wide - by_draw[:, None] - by_sample + middle
        spread -= float(rest.square().sum()) / ((draws - 1) * (samples - 1)) / draws
    return Estimate(middle, (max(spread, 0.0) / samples) ** 0.5, drawn)
