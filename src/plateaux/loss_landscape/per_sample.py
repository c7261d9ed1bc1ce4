"""Values per sample, and their mean with the standard errors over samples and over random draws."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from plateaux.core.errors import RecipeError
from plateaux.core.stats.estimates import mean
from plateaux.core.types import Batch, Estimate
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.optim.grad_norms import squared_norms


def squared_gradient_norms(surface: LossSurface) -> Tensor:
    """Return the squared norm of every sample's gradient over the trained weights, `[N]` in float64."""
    require_independent_samples(surface, "gradient")

    def loss(outputs: Tensor, batch: Batch) -> Tensor:  # [1, B, C]
        return surface.losses_from_logits(outputs[0], batch)[None]

    # None stands for plain cross entropy, which has a closed form without cancellation.
    loss_fn = loss if surface.normalize_logits or surface.loss else None
    return torch.cat([squared_norms(surface.member, batch, loss_fn) for batch in surface.batches])


def require_independent_samples(surface: LossSurface, what: str) -> None:
    """Raise an error if BatchNorm is in training mode: a gradient per sample is not defined then."""
    if any(isinstance(layer, _BatchNorm) and layer.training for layer in surface.module.modules()):
        raise RecipeError(
            f"BatchNorm in training mode mixes the samples of a batch, so a {what} per sample is not defined; "
            "use BatchNorm in evaluation mode"
        )


def require_cross_entropy(surface: LossSurface, what: str) -> None:
    """Raise an error for a quantity that is defined by the probabilities of the classes, not by a loss."""
    if surface.loss is not None:
        raise RecipeError(f"{what} is defined for the cross entropy only, and this run has a loss of its own")


def mean_over_samples(values: Tensor) -> Estimate:
    """Return the mean of the samples' values `[N]`, with its standard error over samples."""
    values = values.double()
    return mean(float(values.sum()), float(values.square().sum()), len(values))


def mean_over_draws(values: Tensor) -> Estimate:
    """Return the mean of the samples' values in every draw `[D, N]`, with its standard errors over samples and draws.

    The variance between samples contains part of the variance between draws, which is subtracted as in an analysis of
    variance.
    """
    values = values.double()
    draws, samples = values.shape
    draw_means, sample_means, total_mean = values.mean(1), values.mean(0), float(values.mean())
    mc_stderr = float(draw_means.std() / draws**0.5) if draws > 1 else None
    if samples < 2:
        return Estimate(total_mean, None, mc_stderr)
    variance = float(sample_means.var())
    if draws > 1:
        residual = values - draw_means[:, None] - sample_means + total_mean
        variance -= float(residual.square().sum()) / ((draws - 1) * (samples - 1)) / draws
    return Estimate(total_mean, (max(variance, 0.0) / samples) ** 0.5, mc_stderr)
