"""Student's t, for means over few matrices."""

from __future__ import annotations

from functools import cache
from math import exp, lgamma, pi, sqrt, tan

import numpy as np

from plateaux.theory.phi import Floats
from plateaux.types import Value


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return where Student's t with so many degrees of freedom stays below with that probability.

    >>> round(t_quantile(0.975, 49), 4), round(t_quantile(0.975, 1), 4)
    (2.0096, 12.7062)
    """
    # With t = sqrt(freedom) tan(angle) the density becomes a power of the cosine.
    scale = exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)) / sqrt(pi)
    low, high = -pi / 2, pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.5 + scale * _cosines(middle, freedom - 1)
        low, high = (middle, high) if below < probability else (low, middle)
    return sqrt(freedom) * tan((low + high) / 2)


def interval(values: Floats, *, among: int = 1) -> tuple[float, float]:
    """Return the 95 % interval of a mean; with `among`, so wide that all of so many intervals hold at once."""
    return around(mean_of(values), len(values), among=among)


def around(mean: Value, count: int, *, among: int = 1) -> tuple[float, float]:
    """Return the 95 % interval of a mean of so many numbers, from its standard error."""
    half = t_quantile(1 - 0.025 / among, count - 1) * (mean.error or 0.0)
    return mean.number - half, mean.number + half


def mean_of(values: Floats) -> Value:
    """Return a mean with its standard error."""
    return Value(float(values.mean()), float(values.std(ddof=1)) / sqrt(len(values)))


def _cosines(angle: float, power: int) -> float:
    """Return the integral of cos^power from zero to the angle, in pieces no wider than the power makes them."""
    pieces = 1 + int(sqrt(power))
    edges = np.linspace(0, angle, pieces + 1)
    at, weights = np.polynomial.legendre.leggauss(24)
    half = np.diff(edges)[:, None] / 2
    return float((half * weights * np.cos(edges[:-1, None] + half * (1 + at)) ** power).sum())
