"""The average case: how much the loss rises on average at random points around the weights."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from plateaux.core import tensor_tree
from plateaux.core.registry import probe
from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.types import Estimate, TensorTree
from plateaux.loss_landscape import perturbations
from plateaux.loss_landscape.groups import REMAINDER, Group, group_losses, num_grouped, split_groups
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe


@probe
def average_l2(
    *,
    radius: float | None = None,
    adaptive: bool = True,
    m: int = 128,
    samples: int = 1024,
    mc_samples: int = 20,
    eta: float = 0.0,
) -> Probe:
    """Average-case sharpness: the mean rise of the loss when every weight gets Gaussian noise in its own proportion.

    delta_i = radius (|w_i| + eta) N(0, 1), or radius N(0, 1) where not adaptive; the radius is .1, or .01 where not
    adaptive.
    """
    return _average("l2", radius, adaptive, m, samples, mc_samples, eta)


@probe
def average_linf(
    *,
    radius: float | None = None,
    adaptive: bool = True,
    m: int = 128,
    samples: int = 1024,
    mc_samples: int = 20,
    eta: float = 0.0,
) -> Probe:
    """Average-case sharpness in a box: the mean rise of the loss when weights get uniform noise in their proportion.

    delta_i = radius (|w_i| + eta) U(-1, 1), or radius U(-1, 1) where not adaptive; the radius is .2, or .02 where not
    adaptive.
    """
    return _average("linf", radius, adaptive, m, samples, mc_samples, eta)


RADII = {("l2", True): 0.1, ("l2", False): 0.01, ("linf", True): 0.2, ("linf", False): 0.02}


def _average(
    norm: Literal["l2", "linf"],
    radius: float | None,
    adaptive: bool,
    m: int,
    samples: int,
    mc_samples: int,
    eta: float,
) -> Probe:
    far = RADII[norm, adaptive] if radius is None else radius
    perturbations.check_options(
        lengths={"radius": far, "eta": eta}, counts={"m": m, "samples": samples, "mc_samples": mc_samples}
    )
    law: perturbations.Distribution = "normal" if norm == "l2" else "uniform"

    def ask(ground: LossSurface) -> dict[str, Estimate]:
        scale = perturbations.perturbation_scale(ground.origin, adaptive=adaptive, eta=eta)
        found = []
        with ground.at_params(ground.origin):
            for number, group in enumerate(split_groups(ground.batches, m)):
                chance = ground.generator(f"average_{norm}", number)
                found.append(_rises(ground, group, scale, far, law, mc_samples, chance))
        return _reported([each for each, _ in found], [over for _, over in found], mc_samples)

    noise = "N(0, 1)" if norm == "l2" else "U(-1, 1)"
    return Probe(
        ask,
        passes=lambda given: (mc_samples + 1) / 3 * num_grouped(given, m),
        samples=samples,
        scale_invariant=adaptive and not eta,
        definition=f"delta = {far:g} {'(|w| + eta) ' if eta else '|w| ' if adaptive else ''}{noise}, {mc_samples} "
        f"draws for every {m} samples; signed; error over samples of their means over draws, {REMAINDER}",
    )


def _rises(
    ground: LossSurface,
    group: Group,
    scale: TensorTree | None,
    radius: float,
    law: perturbations.Distribution,
    mc_samples: int,
    chance: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return the mean rise of every sample `[m]`, and of the group at every draw `[mc_samples]`, in float64."""
    tensor_tree.write(ground.params, ground.origin)
    home = group_losses(ground, group)
    each, over = torch.zeros_like(home), []
    for _ in range(mc_samples):
        perturbations.perturb(
            ground, perturbations.sample_direction(ground.origin, chance, law), scale=scale, times=radius
        )
        rise = group_losses(ground, group) - home
        each += rise / mc_samples
        over.append(rise.mean())
    return each, torch.stack(over)


def _reported(each: list[Tensor], over: list[Tensor], mc_samples: int) -> dict[str, Estimate]:
    """Return the mean with its errors: groups have draws of their own, so that their variances add."""
    whole = mean_of_independent(torch.cat(each).tolist())
    if mc_samples < 2:
        return {"": whole}
    noise = float(torch.stack(over).var(1).sum() / mc_samples) ** 0.5 / len(over)
    return {"": Estimate(whole.value, whole.stderr, noise)}
