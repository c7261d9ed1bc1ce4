"""Worst-case sharpness as it was released, slowly: one flat vector, steps in delta, projection on the ellipsoid.

Andriushchenko et al. 2023, as described in words; two of its defects are mended: after a step is halved the ascent goes
on from the best point with the delta of that point, and the bisection stops by a relative tolerance or after so many
halvings. Weights of exactly zero do not move.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

Looks = Callable[[Tensor], tuple[float, Tensor]]
"""The mean loss of a group at flat weights, and its gradient."""

Heights = Callable[[Tensor], float]
"""The mean loss alone."""


def checkpoints(steps: int) -> set[int]:
    shares = [0.0, 0.22]
    while shares[-1] < 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    return {ceil(share * steps) for share in shares[1:-1]}


def weighted_norm(delta: Tensor, t: Tensor) -> float:
    return float(torch.where(t > 0, delta / t.clamp(min=1e-300), 0.0).norm())


def onto_ellipsoid(delta: Tensor, t: Tensor, radius: float) -> Tensor:
    """Return the nearest point with |delta / t| <= radius: delta / (1 + 2 lambda / t^2), lambda by bisection."""
    delta = torch.where(t > 0, delta, 0.0)
    if weighted_norm(delta, t) <= radius:
        return delta

    def shrunk(multiplier: float) -> Tensor:
        return torch.where(t > 0, delta * t**2 / (t**2 + 2 * multiplier), 0.0)

    low, high = 0.0, 10.0
    while weighted_norm(shrunk(high), t) > radius:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        length = weighted_norm(shrunk(middle), t)
        if abs(length - radius) < 1e-6 * radius:
            break
        low, high = (middle, high) if length > radius else (low, middle)
    return shrunk(high) if length > radius else shrunk(middle)


def project(delta: Tensor, t: Tensor, radius: float, norm: str, adaptive: bool) -> Tensor:
    if norm == "linf":
        return torch.minimum(torch.maximum(delta, -radius * t), radius * t)
    if adaptive:
        return onto_ellipsoid(delta, t, radius)
    return delta * min(1.0, radius / max(float(delta.norm()), 1e-300))


def worst(
    home: Tensor,
    look: Looks,
    height: Heights,
    *,
    radius: float,
    norm: str = "l2",
    adaptive: bool = True,
    steps: int = 20,
) -> tuple[float, float, int]:
    """Return the loss at home, the largest loss found, and how many gradients were taken."""
    w = home.double()
    t = w.abs() if adaptive else torch.ones_like(w)
    delta = older = best_delta = torch.zeros_like(w)
    first = best = last = last_best = height(home)
    step, last_step, rises, since, taken = 2 * radius, None, 0, 0, 0
    for number in range(1, steps + 1):
        _, g = look((w + delta).to(home.dtype))
        taken += 1
        g = g.double()
        up = g.sign() * t if norm == "linf" else g * t / (g.norm() + 1e-12)
        z = project(delta + step * up, t, radius, norm, adaptive)
        delta, older = 0.75 * z + 0.25 * older, delta
        loss = height((w + delta).to(home.dtype))
        rises += loss > last
        last = loss
        if loss > best:
            best, best_delta = loss, delta
        if number in checkpoints(steps):
            stalled = rises < 0.75 * (number - since) or (last_step == step and last_best == best)
            last_step, last_best, rises, since = step, best, 0, number
            if stalled:
                step /= 2
                delta, last = best_delta, best
    return first, best, taken
