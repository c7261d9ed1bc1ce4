"""Worst-case sharpness by the released APGD: one flat vector, steps in delta, projection onto the ellipsoid.

Andriushchenko et al. 2023, as described in the paper, with two defects fixed: after the step size is halved, the ascent
continues from the best point with the delta of that point, and the bisection stops at a relative tolerance or after 200
iterations. Weights of exactly zero do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

LossAndGradFn = Callable[[Tensor], tuple[float, Tensor]]
"""Maps flat weights to the mean loss of a group and its gradient."""

FlatLossFn = Callable[[Tensor], float]
"""Maps flat weights to the mean loss of a group."""


def checkpoints(steps: int) -> set[int]:
    fractions = [0.0, 0.22]
    while fractions[-1] < 1:
        fractions.append(fractions[-1] + max(fractions[-1] - fractions[-2] - 0.03, 0.06))
    return {ceil(fraction * steps) for fraction in fractions[1:-1]}


def weighted_norm(delta: Tensor, t: Tensor) -> float:
    return float(torch.where(t > 0, delta / t.clamp(min=1e-300), 0.0).norm())


def project_onto_ellipsoid(delta: Tensor, t: Tensor, radius: float) -> Tensor:
    """Project onto |delta / t| <= radius: delta / (1 + 2 lambda / t^2), with lambda found by bisection."""
    delta = torch.where(t > 0, delta, 0.0)
    if weighted_norm(delta, t) <= radius:
        return delta

    def shrink(multiplier: float) -> Tensor:
        return torch.where(t > 0, delta * t**2 / (t**2 + 2 * multiplier), 0.0)

    low, high = 0.0, 10.0
    while weighted_norm(shrink(high), t) > radius:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        length = weighted_norm(shrink(middle), t)
        if abs(length - radius) < 1e-6 * radius:
            break
        low, high = (middle, high) if length > radius else (low, middle)
    return shrink(high) if length > radius else shrink(middle)


def project(delta: Tensor, t: Tensor, radius: float, norm: str, adaptive: bool) -> Tensor:
    if norm == "linf":
        return torch.minimum(torch.maximum(delta, -radius * t), radius * t)
    if adaptive:
        return project_onto_ellipsoid(delta, t, radius)
    return delta * min(1.0, radius / max(float(delta.norm()), 1e-300))


def maximize_loss(
    origin: Tensor,
    loss_and_grad: LossAndGradFn,
    loss_fn: FlatLossFn,
    *,
    radius: float,
    norm: str = "l2",
    adaptive: bool = True,
    steps: int = 20,
) -> tuple[float, float, int]:
    """Return the loss at the origin, the largest loss found, and the number of gradients."""
    w = origin.double()
    t = w.abs() if adaptive else torch.ones_like(w)
    delta = previous_delta = best_delta = torch.zeros_like(w)
    initial = best = last = last_best = loss_fn(origin)
    step_size, last_step_size, increases, last_checkpoint, gradients = 2 * radius, None, 0, 0, 0
    for step in range(1, steps + 1):
        _, g = loss_and_grad((w + delta).to(origin.dtype))
        gradients += 1
        g = g.double()
        direction = g.sign() * t if norm == "linf" else g * t / (g.norm() + 1e-12)
        z = project(delta + step_size * direction, t, radius, norm, adaptive)
        delta, previous_delta = 0.75 * z + 0.25 * previous_delta, delta
        loss = loss_fn((w + delta).to(origin.dtype))
        increases += loss > last
        last = loss
        if loss > best:
            best, best_delta = loss, delta
        if step in checkpoints(steps):
            is_stalled = increases < 0.75 * (step - last_checkpoint) or (
                last_step_size == step_size and last_best == best
            )
            last_step_size, last_best, increases, last_checkpoint = step_size, best, 0, step
            if is_stalled:
                step_size /= 2
                delta, last = best_delta, best
    return initial, best, gradients
