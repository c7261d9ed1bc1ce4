"""What single samples feel of the landscape: their gradients, the curvature at their inputs, and whether both agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
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
    "mean over random signs v of |grad(x + h v) - grad(x)|^2 / h^2, the samples' own losses; h = {radius:g} of \
the inputs as the member sees them; {mc_samples} draws"
)


@probe
def gradient_norm(*, quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)) -> Probe:
    """The squared norm of the samples' gradients over all trained weights: mean and quantiles."""
    if not all(0 < q < 1 for q in quantiles):
        raise RecipeError(f"quantiles = {list(quantiles)}: give shares of samples above 0 and below 1")

    def ask(ground: LossSurface) -> Mapping[str, Estimate]:
        norms = squared_gradient_norms(ground)
        return {"": mean_over_samples(norms)} | {f"{100 * q:g} %": _quantile(norms, q) for q in quantiles}

    return Probe(ask, passes=float, definition="squared norms; error of a quantile from its neighbours in rank")


@probe
def input_curvature(*, mc_samples: int = 10, radius: float = 1e-3) -> Probe:
    """The curvature of the loss at the inputs (Garg and Roy): the squared norm of its Hessian, by finite differences.

    The mean over samples of E|(grad(x + h v) - grad(x)) / h|^2, v of random signs, which is Tr(H^2) as h goes to zero.
    """
    _check(mc_samples, radius)
    return Probe(
        lambda ground: {"": mean_over_draws(input_curvatures(ground, mc_samples=mc_samples, radius=radius))},
        passes=lambda samples: _curvature_passes(mc_samples) * samples,
        scale_invariant=True,
        definition=GARG_AND_ROY.format(radius=radius, mc_samples=mc_samples),
    )


@probe
def rank_agreement(*, mc_samples: int = 10, radius: float = 1e-3) -> Probe:
    """Spearman's rank correlation over samples of squared gradient norm and input curvature."""
    _check(mc_samples, radius)

    def ask(ground: LossSurface) -> Mapping[str, Estimate]:
        norms = squared_gradient_norms(ground).cpu().numpy()
        curvatures = input_curvatures(ground, mc_samples=mc_samples, radius=radius).cpu()
        whole = spearman(norms, curvatures.mean(0).numpy())
        less = [_without(curvatures, draw) for draw in range(mc_samples)] if mc_samples > 1 else []
        left_out = torch.tensor([spearman(norms, each.numpy()).value for each in less], dtype=torch.float64)
        return {"": replace(whole, mc_stderr=_jackknife(left_out) if mc_samples > 1 else None)}

    return Probe(
        ask,
        passes=lambda samples: (1 + _curvature_passes(mc_samples)) * samples,
        higher_is_better=None,
        default=False,
        definition="input curvature: " + GARG_AND_ROY.format(radius=radius, mc_samples=mc_samples),
    )


def input_curvatures(ground: LossSurface, *, mc_samples: int = 10, radius: float = 1e-3) -> Tensor:
    """Return the input curvature of every sample in every draw, `[mc_samples, N]` in float64."""
    require_independent_samples(ground, "curvature")
    makers = [ground.generator("input_curvature", draw) for draw in range(mc_samples)]
    return torch.cat([_curvatures(ground, batch, makers, radius) for batch in ground.batches], 1)


def _curvatures(ground: LossSurface, batch: Batch, makers: Sequence[torch.Generator], radius: float) -> Tensor:
    home = _input_gradient(ground, batch)
    rows = []
    for maker in makers:
        away = _input_gradient(ground, replace(batch, x=_shaken(batch.x, maker, radius)))
        pairs = zip(away, home, strict=True)
        rows.append(torch.stack([(a - b).double().flatten(1).square().sum(1) for a, b in pairs]).sum(0))
    return torch.stack(rows) / radius**2


def _input_gradient(ground: LossSurface, batch: Batch) -> tuple[Tensor, ...]:
    """Return the gradient of every sample's loss at each of its inputs that is no whole number."""
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            leaves.append(tensor.detach().requires_grad_())
            return leaves[-1]
        return tensor

    x = map_tensors(batch.x, leaf)
    if not leaves:
        raise RecipeError("The inputs are whole numbers, at which a loss has no curvature; leave out input_curvature")
    with torch.enable_grad():
        total = ground.loss_fn(replace(batch, x=x))(ground.origin).sum()
        return torch.autograd.grad(total, leaves, materialize_grads=True)


def _shaken(x: Inputs, maker: torch.Generator, radius: float) -> Inputs:
    """Move every number of the inputs up or down by `radius`."""

    def shake(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=maker, device=tensor.device)
        return tensor + radius * (2 * signs - 1)

    return map_tensors(x, shake)


def _quantile(numbers: Tensor, q: float) -> Estimate:
    """Return a quantile; its error is half the way between those a standard deviation of its rank below and above."""
    step = (q * (1 - q) / len(numbers)) ** 0.5
    places = torch.tensor([q - step, q, q + step], dtype=torch.float64, device=numbers.device).clamp(0, 1)
    low, middle, high = numbers.quantile(places).tolist()
    return Estimate(middle, (high - low) / 2 if len(numbers) > 1 else None)


def _without(curvatures: Tensor, draw: int) -> Tensor:
    return (curvatures.sum(0) - curvatures[draw]) / (len(curvatures) - 1)


def _jackknife(left_out: Tensor) -> float:
    return sqrt((len(left_out) - 1) * float(left_out.var(correction=0)))


def _curvature_passes(mc_samples: int) -> float:
    return (mc_samples + 1) * 2 / 3  # forward, and back to the inputs without the weights' gradients


def _check(mc_samples: int, radius: float) -> None:
    if mc_samples < 1 or radius <= 0:
        raise RecipeError(
            f"mc_samples = {mc_samples}, radius = {radius:g}: give at least one draw and a radius above 0"
        )
