"""Average-case sharpness: the mean increase of the loss at random points around the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from plateaux.core import tensor_tree
from plateaux.core.ranges import Count, NonNegative
from plateaux.core.registry import probe
from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.types import Estimate, TensorTree
from plateaux.loss_landscape import perturbations
from plateaux.loss_landscape.apgd import Norm
from plateaux.loss_landscape.groups import REMAINDER, Group, group_losses, num_grouped, split_groups
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe

RADII = {("l2", True): 0.1, ("l2", False): 0.01, ("linf", True): 0.2, ("linf", False): 0.02}


@probe("average_l2", norm="l2")
@probe("average_linf", norm="linf")
def average(
    *,
    norm: Norm,
    radius: NonNegative | None = None,
    adaptive: bool = True,
    m: Count = 128,
    samples: Count = 1024,
    mc_samples: Count = 20,
    eta: NonNegative = 0.0,
) -> Probe:
    """Average-case sharpness: the mean increase of the loss under noise proportional to each weight.

    delta_i = radius (|w_i| + eta) z_i, or radius z_i if not adaptive, where z_i is N(0, 1), or U(-1, 1) in l-infinity.
    The default radius is .1, or .01 if not adaptive; in l-infinity .2 or .02.
    """
    noise_scale = RADII[norm, adaptive] if radius is None else radius
    distribution: perturbations.Distribution = "normal" if norm == "l2" else "uniform"

    def run(surface: LossSurface) -> dict[str, Estimate]:
        scale = perturbations.perturbation_scale(surface.origin, adaptive=adaptive, eta=eta)
        sample_means, draw_means = [], []
        with surface.at_params(surface.origin):
            for i, group in enumerate(split_groups(surface.batches, m)):
                generator = surface.generator(f"average_{norm}", i)
                by_sample, by_draw = _increases(surface, group, scale, noise_scale, distribution, mc_samples, generator)
                sample_means.append(by_sample)
                draw_means.append(by_draw)
        return _summarize(sample_means, draw_means, mc_samples)

    noise = "N(0, 1)" if norm == "l2" else "U(-1, 1)"
    factor = "(|w| + eta) " if eta else "|w| " if adaptive else ""
    return Probe(
        run,
        passes=lambda count: (mc_samples + 1) / 3 * num_grouped(count, m),
        samples=samples,
        scale_invariant=adaptive and not eta,
        definition=f"delta = {noise_scale:g} {factor}{noise}, {mc_samples} draws per group of {m} samples; signed; "
        f"standard error over samples of their means over draws, {REMAINDER}",
    )


def _increases(
    surface: LossSurface,
    group: Group,
    scale: TensorTree | None,
    radius: float,
    distribution: perturbations.Distribution,
    mc_samples: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return the mean increase of every sample `[m]`, and that of the group per draw `[mc_samples]`, in float64."""
    tensor_tree.write(surface.params, surface.origin)
    initial = group_losses(surface, group)
    by_sample, by_draw = torch.zeros_like(initial), []
    for _ in range(mc_samples):
        noise = perturbations.sample_direction(surface.origin, generator, distribution)
        perturbations.perturb(surface, noise, scale=scale, times=radius)
        increase = group_losses(surface, group) - initial
        by_sample += increase / mc_samples
        by_draw.append(increase.mean())
    return by_sample, torch.stack(by_draw)


def _summarize(sample_means: list[Tensor], draw_means: list[Tensor], mc_samples: int) -> dict[str, Estimate]:
    """Return the mean with its standard errors. Groups have independent draws, so their variances add."""
    mean = mean_of_independent(torch.cat(sample_means).tolist())
    if mc_samples < 2:
        return {"": mean}
    mc_stderr = float(torch.stack(draw_means).var(1).sum() / mc_samples) ** 0.5 / len(draw_means)
    return {"": Estimate(mean.value, mean.stderr, mc_stderr)}
