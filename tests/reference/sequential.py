"""Reference sequential training: plain SGD loops, one network after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from plateaux.core.types import Batch, TensorTree

Loss = Callable[[nn.Module, Batch], Tensor]


def rate(t: int, length: int, start: float) -> float:
    """The learning rate of step t = 1, 2, ... where cycles have so many steps (Huang et al. 2017)."""
    return start / 2 * (math.cos(math.pi * ((t - 1) % length) / length) + 1)


def descend(module: nn.Module, velocity: TensorTree, loss: Tensor, lr: float, momentum: float, decay: float) -> None:
    params = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, list(params.values()))
    with torch.no_grad():
        for (name, w), g in zip(params.items(), gradients, strict=True):
            velocity[name] = momentum * velocity.get(name, torch.zeros_like(w)) + g + decay * w
            w -= lr * velocity[name]


def snapshots(
    module: nn.Module, cycles: Sequence[Sequence[Batch]], loss: Loss, *, lr: float, momentum: float, decay: float
) -> list[TensorTree]:
    """One network over all cycles; its weights at every cycle's end."""
    velocity: TensorTree = {}
    found, t = [], 0
    for batches in cycles:
        for batch in batches:
            t += 1
            descend(module, velocity, loss(module, batch), rate(t, len(batches), lr), momentum, decay)
        found.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
    return found


def in_turn(
    modules: Sequence[nn.Module],
    batches: Sequence[Batch],
    loss: Callable[[nn.Module, Batch, Sequence[nn.Module]], Tensor],
    *,
    lr: float,
    momentum: float,
    decay: float,
) -> list[TensorTree]:
    """One network after the other over the same batches; each sees those before it, finished."""
    for number, module in enumerate(modules):
        velocity: TensorTree = {}
        for t, batch in enumerate(batches, 1):
            value = loss(module, batch, modules[:number])
            descend(module, velocity, value, rate(t, len(batches), lr), momentum, decay)
        module.eval()
    return [dict(module.state_dict()) for module in modules]
