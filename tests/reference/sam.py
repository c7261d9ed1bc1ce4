"""Reference SAM family: NumPy arrays by name, one line per line of the paper, given only a gradient.

SAM: Foret et al. 2021. ASAM: Kwon et al. 2021. GSAM: Zhuang et al. 2022. The `elementwise` forms are those of the
implementation most others are copied from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Arrays = dict[str, Array]
Gradient = Callable[[Arrays], Arrays]


def length(arrays: Arrays) -> float:
    return float(np.sqrt(sum((array**2).sum() for array in arrays.values())))


def inner(a: Arrays, b: Arrays) -> float:
    return float(sum((a[name] * b[name]).sum() for name in a))


def moved(w: Arrays, e: Arrays) -> Arrays:
    return {name: w[name] + e[name] for name in w}


def sam_epsilon(w: Arrays, g: Arrays, rho: float) -> Arrays:
    """rho g / |g|."""
    return {name: rho * g[name] / (length(g) + 1e-12) for name in g}


def asam_epsilon(w: Arrays, g: Arrays, rho: float, eta: float = 0.01) -> Arrays:
    """rho T^2 g / |T g|, T = |w| + eta where the name says weight, else 1."""
    t = {name: np.abs(w[name]) + eta if "weight" in name else np.ones_like(w[name]) for name in w}
    tg = {name: t[name] * g[name] for name in w}
    return {name: rho * t[name] ** 2 * g[name] / (length(tg) + 1e-12) for name in w}


def elementwise_epsilon(w: Arrays, g: Arrays, rho: float) -> Arrays:
    """rho w^2 g / | |w| g |, every parameter."""
    wg = {name: np.abs(w[name]) * g[name] for name in w}
    return {name: rho * w[name] ** 2 * g[name] / (length(wg) + 1e-12) for name in w}


def perturbed_gradient(w: Arrays, gradient: Gradient, epsilon: Callable[[Arrays, Arrays], Arrays]) -> Arrays:
    """Return the gradient at the perturbed weights."""
    return gradient(moved(w, epsilon(w, gradient(w))))


def in_groups(w: Arrays, gradients: Sequence[Gradient], shares: Sequence[float], rho: float) -> Arrays:
    """Return the m-sharpness gradient: each group perturbs by its own gradient, and the results are averaged."""
    found = [perturbed_gradient(w, gradient, lambda w, g: sam_epsilon(w, g, rho)) for gradient in gradients]
    return {name: sum(share * each[name] for share, each in zip(shares, found, strict=True)) for name in w}


def gsam(w: Arrays, gradient: Gradient, epsilon: Callable[[Arrays, Arrays], Arrays], alpha: float) -> Arrays:
    """g_p - alpha (g - cos |g| g_p / |g_p|)."""
    g = gradient(w)
    peak = gradient(moved(w, epsilon(w, g)))
    cos = inner(g, peak) / (length(g) * length(peak))
    across = {name: g[name] - cos * length(g) * peak[name] / length(peak) for name in w}
    return {name: peak[name] - alpha * across[name] for name in w}


def gsam_radius(rho: float, rho_min: float, lr: float, lr_max: float, lr_min: float) -> float:
    return rho_min + (rho - rho_min) * (lr - lr_min) / (lr_max - lr_min)


def clipped(direction: Arrays, largest: float) -> Arrays:
    scale = min(1.0, largest / (length(direction) + 1e-6))
    return {name: scale * each for name, each in direction.items()}


class Descent:
    """SGD with momentum and weight decay, as torch defines it."""

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.velocity: Arrays = {}

    def step(self, w: Arrays, direction: Arrays) -> Arrays:
        new: Arrays = {}
        for name in w:
            d = direction[name] + self.weight_decay * w[name]
            v = d if name not in self.velocity else self.momentum * self.velocity[name] + d
            self.velocity[name] = v
            new[name] = w[name] - self.lr * v
        return new
