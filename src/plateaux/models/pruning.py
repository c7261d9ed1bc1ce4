"""Pruning at initialization: ERK densities over layers, and the largest weights within every layer.

A comparison of magnitudes over all layers would remove whole layers, because the scale of initial weights depends on
the size of a layer. The number of live weights of a layer is therefore proportional to the sum of the dimensions of
its weight, `n_in + n_out + k_h + k_w` (Erdos-Renyi-Kernel: Mocanu et al., arXiv:1707.04780; Evci et al.,
arXiv:1911.11134), up to all of its weights. See docs/decisions/0008-pruning-at-initialization.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, prod

import torch
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.models.surgery import get_part


def prune(module: nn.Module, sparsity: float, *, keep: Sequence[str] = ()) -> None:
    """Prune by magnitude within every layer: set the smallest weights to zero, and register a mask for each weight.

    Exactly `round(sparsity * count)` weights are pruned in total; among ties, the first. Every output unit keeps its
    largest weight. Weights are parameters named `...weight` with two or more dimensions, outside the submodules and
    parameters in `keep`. The masks are buffers `<name>_mask`, True for live weights, and not part of the state dict.
    """
    if not 0 <= sparsity < 1:
        raise RecipeError(f"sparsity = {sparsity} is not a fraction of the weights. Use a number in [0, 1).")
    for name in keep:
        get_part(module, name)
    weights = {
        name: weight
        for name, weight in _layer_weights(module).items()
        if not any(name == k or name.startswith(f"{k}.") for k in keep)
    }
    if sparsity and not weights:
        raise RecipeError(
            f"sparsity = {sparsity}, but there is no layer to prune: the first and the last layer stay dense. Use a "
            "model with at least three layers, or leave out model.sparsity."
        )
    counts = live_counts([weight.shape for weight in weights.values()], sparsity)
    for (name, weight), count in zip(weights.items(), counts, strict=True):
        _apply_mask(module, name, _largest_mask(weight.detach().abs(), count))


def end_layers(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of the first and of the last layer, in the order of the parameters."""
    names = list(_layer_weights(module))
    return tuple(dict.fromkeys(names[:1] + names[-1:]))


def live_counts(shapes: Sequence[Sequence[int]], sparsity: float) -> list[int]:
    """Return how many weights of every layer remain: ERK, with at least one per output unit and the exact total.

    >>> live_counts([(16, 16, 3, 3), (64, 64, 3, 3)], 0.95)
    [433, 1525]
    """
    sizes, units, dimensions = [prod(s) for s in shapes], [s[0] for s in shapes], [sum(s) for s in shapes]
    live = sum(sizes) - round(sparsity * sum(sizes))
    if live < sum(units):
        raise RecipeError(
            f"sparsity = {sparsity} leaves {live} of {sum(sizes)} weights, but there are {sum(units)} output units, "
            f"which need one each. Use at most {floor(1e4 * (1 - sum(units) / sum(sizes))) / 1e4}, or a wider model."
        )

    def limited(scale: float) -> list[float]:
        return [min(max(scale * d, u), s) for d, u, s in zip(dimensions, units, sizes, strict=True)]

    low, high = 0.0, float(max(sizes, default=0))  # at the upper end, all layers are dense
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(limited(middle)) < live else (low, middle)
    exact = limited(high)
    counts = [int(count) for count in exact]
    remainders = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in remainders[: live - sum(counts)]:
        counts[i] += 1
    return counts


def _layer_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.ndim >= 2 and name.endswith("weight")}


def _largest_mask(magnitudes: Tensor, count: int) -> Tensor:
    """Return the mask of the `count` largest entries; the largest entry of every row is always among them."""
    rows = magnitudes.flatten(1).clone()
    rows[torch.arange(len(rows), device=rows.device), rows.argmax(1)] = torch.inf
    flat, num_pruned = rows.flatten(), rows.numel() - count
    mask = torch.ones_like(flat, dtype=torch.bool)
    if num_pruned:
        threshold = flat.kthvalue(num_pruned).values
        below, ties = flat < threshold, (flat == threshold).nonzero().flatten()
        mask[below] = False
        mask[ties[: num_pruned - int(below.sum())]] = False
    return mask.view_as(magnitudes)


def _apply_mask(module: nn.Module, name: str, mask: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    with torch.no_grad():
        getattr(owner, leaf).mul_(mask)
    owner.register_buffer(f"{leaf}_mask", mask, persistent=False)
