"""Points around a member: home + scale * u, where u says how far and which way.

With scale = |w| (adaptive) a point does not change its meaning when neighbouring layers are rescaled, and a weight of
zero stays zero; without a scale u is the difference of the weights itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.types import TensorTree
from plateaux.loss_landscape.loss_surface import LossSurface

Distribution = Literal["normal", "uniform"]


def perturbation_scale(home: TensorTree, *, adaptive: bool, eta: float = 0.0) -> TensorTree | None:
    """Return |w| + eta for every weight, or nothing where all weights count alike."""
    if not adaptive:
        return None
    return (
        {name: tensor + eta for name, tensor in tensor_tree.magnitude(home).items()}
        if eta
        else tensor_tree.magnitude(home)
    )


def perturb(ground: LossSurface, u: TensorTree, *, scale: TensorTree | None = None, times: float = 1.0) -> None:
    """Put the member at home + times * scale * u; whoever calls is inside `ground.standing`."""
    tensor_tree.write(ground.params, ground.origin)
    places, ways = list(ground.params.values()), [u[name] for name in ground.params]
    with torch.no_grad():
        if scale is None:
            torch._foreach_add_(places, ways, alpha=times)
        else:
            torch._foreach_addcmul_(places, [scale[name] for name in ground.params], ways, value=times)


def sample_direction(like: TensorTree, generator: torch.Generator, distribution: Distribution = "normal") -> TensorTree:
    """Return independent entries, of variance one or uniform between -1 and 1; the layout in memory changes none."""
    return {name: _sample_tensor(tensor, generator, distribution) for name, tensor in like.items()}


def _sample_tensor(like: Tensor, generator: torch.Generator, distribution: Distribution) -> Tensor:
    draw = torch.randn if distribution == "normal" else torch.rand
    found = draw(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    if distribution == "uniform":
        found.mul_(2).sub_(1)
    return found if found.stride() == like.stride() else torch.empty_like(like).copy_(found)


def normalize_filters(way: Tensor, weights: Tensor) -> Tensor:
    """Return a direction whose filters, slices along the first axis, are as long as those of the weights."""
    axes = tuple(range(1, weights.ndim))
    if not axes:  # every entry is a filter of its own
        return way.sign() * weights.abs()
    return match_norm(way, weights, axes)


def match_norm(way: Tensor, weights: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return a direction that is, over these axes, as long as the weights."""
    wanted, own = (torch.linalg.vector_norm(each, dim=axes, keepdim=True) for each in (weights, way))
    scaled: Tensor = way * (wanted / own.clamp(min=1e-10))
    return scaled


def check_options(*, lengths: Mapping[str, float], counts: Mapping[str, int]) -> None:
    """Refuse lengths below zero and counts below one."""
    for least, given in ((0, lengths), (1, counts)):
        for name, number in given.items():
            if not isfinite(number) or number < least:
                raise RecipeError(
                    f"{name} = {number}: must be a finite number of at least {least}; leave it out for the usual one"
                )
