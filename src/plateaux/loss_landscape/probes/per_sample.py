"""Per-sample probes: gradient norms, curvature with respect to the inputs, and the rank correlation of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.ranges import Count, Fraction, Positive
from plateaux.core.registry import probe
from plateaux.core.stats.ranking import spearman
from plateaux.core.types import Batch, Estimate, Inputs, map_tensors
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.per_sample import (
    mean_over_draws,
    mean_over_samples,
    require_independent_samples,
    squared_gradient_norms,
)
from plateaux.loss_landscape.probe import Probe

GARG_AND_ROY = (
    "mean over random signs v of |grad(x + h v) - grad(x)|^2 / h^2 with each sample's own loss; h = {radius:g} in "
    "units of the network's inputs; {mc_samples} draws"
)


@probe
def gradient_norm(*, quantiles: tuple[Fraction, ...] = (0.1, 0.5, 0.9)) -> Probe:
    """The squared norm of the samples' gradients over all trained weights: mean and quantiles."""
    if not all(0 < q < 1 for q in quantiles):
        raise RecipeError(f"quantiles = {list(quantiles)}: must be between 0 and 1")

    def run(surface: LossSurface) -> Mapping[str, Estimate]:
        norms = squared_gradient_norms(surface)
        return {"": mean_over_samples(norms)} | {f"{100 * q:g} %": _quantile(norms, q) for q in quantiles}

    return Probe(run, passes=float, definition="squared norms; standard error of a quantile from adjacent quantiles")


@probe
def input_curvature(*, mc_samples: Count = 10, radius: Positive = 1e-3) -> Probe:
    """The curvature of the loss with respect to the inputs (Garg and Roy), by finite differences of the gradient.

    The mean over samples of E|(grad(x + h v) - grad(x)) / h|^2 for random signs v, which tends to Tr(H^2) as h tends
    to zero.
    """
    return Probe(
        lambda surface: {"": mean_over_draws(input_curvatures(surface, mc_samples=mc_samples, radius=radius))},
        passes=lambda samples: _curvature_passes(mc_samples) * samples,
        scale_invariant=True,
        definition=GARG_AND_ROY.format(radius=radius, mc_samples=mc_samples),
    )


@probe
def rank_agreement(*, mc_samples: Count = 10, radius: Positive = 1e-3) -> Probe:
    """Spearman's rank correlation over samples between squared gradient norm and input curvature."""

    def run(surface: LossSurface) -> Mapping[str, Estimate]:
        norms = squared_gradient_norms(surface).cpu().numpy()
        curvatures = input_curvatures(surface, mc_samples=mc_samples, radius=radius).cpu()
        estimate = spearman(norms, curvatures.mean(0).numpy())
        if mc_samples == 1:
            return {"": replace(estimate, mc_stderr=None)}
        means = (curvatures.sum(0) - curvatures) / (mc_samples - 1)  # without each draw
        leave_one_out = torch.tensor([spearman(norms, mean.numpy()).value for mean in means], dtype=torch.float64)
        jackknife = sqrt((mc_samples - 1) * float(leave_one_out.var(correction=0)))
        return {"": replace(estimate, mc_stderr=jackknife)}

    return Probe(
        run,
        passes=lambda samples: (1 + _curvature_passes(mc_samples)) * samples,
        higher_is_better=None,
        default=False,
        definition="input curvature: " + GARG_AND_ROY.format(radius=radius, mc_samples=mc_samples),
    )


def input_curvatures(surface: LossSurface, *, mc_samples: int = 10, radius: float = 1e-3) -> Tensor:
    """Return the input curvature of every sample in every draw, `[mc_samples, N]` in float64."""
    require_independent_samples(surface, "curvature")
    generators = [surface.generator("input_curvature", draw) for draw in range(mc_samples)]
    return torch.cat([_batch_curvatures(surface, batch, generators, radius) for batch in surface.batches], 1)


def _batch_curvatures(
    surface: LossSurface, batch: Batch, generators: Sequence[torch.Generator], radius: float
) -> Tensor:
    gradients = _input_gradients(surface, batch)
    rows = []
    for generator in generators:
        perturbed = _input_gradients(surface, replace(batch, x=_perturb_inputs(batch.x, generator, radius)))
        pairs = zip(perturbed, gradients, strict=True)
        rows.append(torch.stack([(a - b).double().flatten(1).square().sum(1) for a, b in pairs]).sum(0))
    return torch.stack(rows) / radius**2


def _input_gradients(surface: LossSurface, batch: Batch) -> tuple[Tensor, ...]:
    """Return the gradients of the samples' losses with respect to each floating-point input."""
    leaves: list[Tensor] = []

    def make_leaf(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            leaves.append(tensor.detach().requires_grad_())
            return leaves[-1]
        return tensor

    x = map_tensors(batch.x, make_leaf)
    if not leaves:
        raise RecipeError(
            "The inputs are integers, so the loss has no curvature with respect to them; leave out input_curvature "
            "and rank_agreement"
        )
    with torch.enable_grad():
        total = surface.loss_fn(replace(batch, x=x))(surface.origin).sum()
        return torch.autograd.grad(total, leaves, materialize_grads=True)


def _perturb_inputs(x: Inputs, generator: torch.Generator, radius: float) -> Inputs:
    """Add `radius` times a random sign to every floating-point entry."""

    def perturb(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=generator, device=tensor.device)
        return tensor + radius * (2 * signs - 1)

    return map_tensors(x, perturb)


def _quantile(values: Tensor, q: float) -> Estimate:
    """Return a quantile. Its error is half the distance between the quantiles one standard deviation of rank apart."""
    step = (q * (1 - q) / len(values)) ** 0.5
    ranks = torch.tensor([q - step, q, q + step], dtype=torch.float64, device=values.device).clamp(0, 1)
    low, middle, high = values.quantile(ranks).tolist()
    return Estimate(middle, (high - low) / 2 if len(values) > 1 else None)


def _curvature_passes(mc_samples: int) -> float:
    return (mc_samples + 1) * 2 / 3  # forward, and backward to the inputs without gradients of the weights
