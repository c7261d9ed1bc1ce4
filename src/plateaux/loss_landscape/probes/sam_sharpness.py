"""Sharpness as in SAM: at random points near the weights, and after one ascent step."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from plateaux.core import tensor_tree
from plateaux.core.ranges import Count, NonNegative
from plateaux.core.registry import probe
from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.types import Estimate, TensorTree
from plateaux.loss_landscape import perturbations
from plateaux.loss_landscape.groups import (
    REMAINDER,
    Group,
    group_gradient,
    group_losses,
    num_grouped,
    split_groups,
)
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe

Direction = Literal["sphere", "gaussian", "filter"]
Form = Literal["antithetic", "paper"]

DIRECTIONS = {
    "sphere": "u uniform on the unit sphere",
    "gaussian": "u of independent N(0, 1)",
    "filter": "u Gaussian, every filter scaled to the norm of that filter of the weights, zero for biases and vectors",
}
FORMS = {
    "antithetic": "pairs of points of (L(w + {rho:g} u) + L(w - {rho:g} u)) / 2 - L(w)",
    "paper": "points of L(w + {rho:g} u) - L(w)",
}


@probe
def sam_sharpness(
    *,
    rho: NonNegative = 0.005,
    directions: Count = 100,
    direction: Direction = "sphere",
    form: Form = "antithetic",
    samples: Count = 1024,
) -> Probe:
    """SAM-sharpness: the mean change of the loss at random points at distance rho (100 directions at .005).

    `sphere`: directions of norm one. `gaussian`: every weight gets rho N(0, 1). `filter`: filter-normalized directions.

    `form="antithetic"` averages L(w + rho u) - L(w) and L(w - rho u) - L(w), so that the gradient cancels exactly and
    the value is about rho^2 tr(H) / 2p for p weights on the sphere. `form="paper"` uses w + rho u only: the same mean
    over all directions, but where the gradient is not zero, its estimate is dominated by first-order noise of size
    rho |g| / sqrt(p directions).

    The standard deviation over points and the largest change are also reported; all values are signed.
    """
    signs = (1.0, -1.0) if form == "antithetic" else (1.0,)

    def run(surface: LossSurface) -> dict[str, Estimate]:
        initial = surface.all_losses()
        sums, largest = torch.zeros_like(initial), initial
        means: list[Tensor] = []
        with surface.at_params(surface.origin):
            for i in range(directions):
                u, factor = _sample_point(surface.origin, surface.generator("sam_sharpness", i), direction)
                for sign in signs:
                    perturbations.perturb(surface, u, times=sign * rho * factor)
                    change = surface.all_losses() - initial
                    largest = change if not means or change.mean() > max(means) else largest
                    means.append(change.mean())
                    sums += change
        return _summarize(sums / len(means), torch.stack(means).view(directions, len(signs)), largest)

    return Probe(
        run,
        passes=lambda count: (len(signs) * directions + 1) / 3 * count,
        samples=samples,
        definition=f"mean over {directions} {FORMS[form].format(rho=rho)}, {DIRECTIONS[direction]}; signed; "
        "standard errors over samples and over directions; float64 sums",
    )


def _sample_point(origin: TensorTree, generator: torch.Generator, direction: Direction) -> tuple[TensorTree, float]:
    """Return a random direction and the factor that normalizes it."""
    noise = perturbations.sample_direction(origin, generator)
    if direction == "sphere":
        return noise, 1 / float(tensor_tree.norm(noise))
    if direction == "gaussian":
        return noise, 1.0
    return {name: perturbations.normalize_filters(noise[name], origin[name]) for name in noise}, 1.0


def _summarize(sample_means: Tensor, point_means: Tensor, largest: Tensor) -> dict[str, Estimate]:
    """Return the mean change, the standard deviation over points, and the change at the point where it is largest.

    `point_means` are the changes by direction and sign; only directions are independent.
    """
    mean, largest_mean = mean_of_independent(sample_means.tolist()), mean_of_independent(largest.tolist())
    if len(point_means) < 2:
        return {"": mean, "largest": largest_mean}
    return {
        "": Estimate(mean.value, mean.stderr, float(point_means.mean(1).std()) / len(point_means) ** 0.5),
        "deviation": Estimate(float(point_means.flatten().std())),
        "largest": largest_mean,
    }


@probe
def sam_step(
    *, rho: NonNegative = 0.05, adaptive: bool = False, m: Count = 128, samples: Count = 1024, eta: NonNegative = 0.0
) -> Probe:
    """One-step SAM sharpness: the increase of a group's loss after one ascent step of length rho, as in SAM.

    The point is w + rho g / |g|, or with T = |w| + eta, w + rho T^2 g / |T g| if adaptive. The first-order estimate
    rho |g| or rho |T g| is also reported.
    """

    def run(surface: LossSurface) -> dict[str, Estimate]:
        scale = perturbations.perturbation_scale(surface.origin, adaptive=adaptive, eta=eta)
        with surface.at_params(surface.origin):
            steps = [_ascent_step(surface, group, scale, rho) for group in split_groups(surface.batches, m)]
        return {
            "": mean_of_independent([increase for increase, _ in steps]),
            "first order": mean_of_independent([first_order for _, first_order in steps]),
        }

    return Probe(
        run,
        passes=lambda count: 4 / 3 * num_grouped(count, m),
        samples=samples,
        scale_invariant=adaptive and not eta,
        definition=f"one step of length {rho:g}{' in delta / |w|' * adaptive} along each group's own gradient; mean "
        f"over groups of {m} samples, standard error over groups, {REMAINDER}; "
        "first order: rho times the norm of the gradient",
    )


def _ascent_step(surface: LossSurface, group: Group, scale: TensorTree | None, rho: float) -> tuple[float, float]:
    """Return the increase of the loss after one ascent step, and its first-order estimate from the gradient."""
    tensor_tree.write(surface.params, surface.origin)
    initial, direction = group_gradient(surface, group)
    if scale is not None:
        tensor_tree.multiply_(direction, scale)
    norm = float(tensor_tree.norm(direction))
    if rho * norm == 0:
        return 0.0, 0.0
    perturbations.perturb(surface, direction, scale=scale, times=rho / norm)
    return float(group_losses(surface, group).mean()) - initial, rho * norm
