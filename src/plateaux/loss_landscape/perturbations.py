"""Perturbed weights of a member: origin + scale * u.

With scale = |w| (adaptive), a perturbation u has the same effect if adjacent layers are rescaled and the network
computes the same function, and a weight of zero stays zero. Without a scale, u is the change of the weights itself.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from plateaux.core import tensor_tree
from plateaux.core.types import TensorTree
from plateaux.loss_landscape.loss_surface import LossSurface

Distribution = Literal["normal", "uniform"]


def perturbation_scale(origin: TensorTree, *, adaptive: bool, eta: float = 0.0) -> TensorTree | None:
    """Return |w| + eta for every weight, or None if the perturbation is not adaptive."""
    if not adaptive:
        return None
    magnitudes = tensor_tree.magnitude(origin)
    return {name: tensor + eta for name, tensor in magnitudes.items()} if eta else magnitudes


def perturb(surface: LossSurface, u: TensorTree, *, scale: TensorTree | None = None, times: float = 1.0) -> None:
    """Set the member to origin + times * scale * u. Call it inside `surface.at_params`, which restores the weights."""
    tensor_tree.write(surface.params, surface.origin)
    params, directions = list(surface.params.values()), [u[name] for name in surface.params]
    with torch.no_grad():
        if scale is None:
            torch._foreach_add_(params, directions, alpha=times)
        else:
            torch._foreach_addcmul_(params, [scale[name] for name in surface.params], directions, value=times)


def sample_direction(like: TensorTree, generator: torch.Generator, distribution: Distribution = "normal") -> TensorTree:
    """Return independent entries from N(0, 1) or U(-1, 1). The values do not depend on the memory format."""
    return {name: _sample_tensor(tensor, generator, distribution) for name, tensor in like.items()}


def _sample_tensor(like: Tensor, generator: torch.Generator, distribution: Distribution) -> Tensor:
    sample = torch.randn if distribution == "normal" else torch.rand
    noise = sample(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    if distribution == "uniform":
        noise.mul_(2).sub_(1)
    return noise if noise.stride() == like.stride() else torch.empty_like(like).copy_(noise)


def normalize_filters(direction: Tensor, weights: Tensor) -> Tensor:
    """Scale every filter of a direction, a slice along the first axis, to the norm of that filter of the weights.

    A direction with one axis is zero: biases and the weights of normalization layers do not change.
    """
    if weights.ndim < 2:
        return torch.zeros_like(direction)
    axes = tuple(range(1, weights.ndim))
    target, norm = (torch.linalg.vector_norm(tensor, dim=axes, keepdim=True) for tensor in (weights, direction))
    scaled: Tensor = direction * (target / norm.clamp(min=1e-10))
    return scaled
