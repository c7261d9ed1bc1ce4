"""Exact phi(i, j) at finite size: an integral over the mean eigenvalue density of a real Wishart matrix.

With N = min(n, d), a = |n - d|, Laguerre functions f_m(x) = sqrt(m!/Gamma(m+a+1)) x^(a/2) e^(-x/2) L_m^a(x) and
g_m = f_m / sqrt(x), the eigenvalues of A^T A d have the density (Adler, Forrester, Nagao, van Moerbeke 2000)

    sum_{m < N-1} f_m^2 - sqrt((N-1)(N-1+a)) / 2 g_{N-1} e g_{N-2} + [N odd] g_{N-1} / int g_{N-1},

where (e g)(x) is half of the integral of g to the left of x minus that to the right.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import ceil, lgamma, sqrt

import numpy as np

from plateaux_papers.theory.phi import Floats, contraction

ORDER = 20  # nodes per quadrature interval


def exact_phi(i: int, j: int, *, n: int, d: int, eta: float, rho: float) -> float:
    """Return phi(i, j) for a data matrix of n rows and d columns, to about ten digits.

    >>> round(exact_phi(0, 2, n=20, d=10, eta=0.1, rho=0.0), 9)
    6.2
    """
    x, mass = density(n, d, -(-(2 * i + j) // 64) * 64)
    inside = float(mass @ (contraction(x, eta=eta, rho=rho) ** i * x**j))
    return inside + (max(d - n, 0) / d if j == 0 else 0.0)


@cache
def density(n: int, d: int, degree: int) -> tuple[Floats, Floats]:
    """Return eigenvalues of W and the fraction of all d eigenvalues at each, for polynomials up to a degree."""
    count, a = min(n, d), abs(n - d)
    middle, half = sqrt(count + a), sqrt(count)
    width = min(0.3, 4 / half)  # a few singular values, which lie between middle - half and middle + half
    y, weights = _quadrature(max(0.0, middle - half - 8), middle + half + 8 + sqrt(2 * degree), width)
    squares = np.zeros_like(y)
    before = last = squares
    for m, function in enumerate(_laguerre(y, count, a)):
        if m < count - 1:
            squares = squares + function**2
            before = function
        last = function
    # In y = sqrt(x): dx / sqrt(x) = 2 dy.
    halves = _half_difference(before * 2, weights)
    values = squares * 2 * y - sqrt((count - 1) * (count - 1 + a)) * last * halves
    if count % 2:
        values = values + last / float((weights * last).sum())
    return (y * y / d).ravel(), (values * weights / d).ravel()


def _laguerre(y: Floats, count: int, a: int) -> Iterator[Floats]:
    """Yield f_0 to f_{count-1} at x = y^2, by their recurrence; a running scale avoids underflow of f_0."""
    x = y * y
    scale = (a * np.log(np.maximum(x, 1e-300)) - x - lgamma(a + 1)) / 2
    before, now = np.zeros_like(x), np.ones_like(x)
    for m in range(count):
        yield now * np.exp(scale)
        after = ((2 * m + 1 + a - x) * now - sqrt(m * (m + a)) * before) / sqrt((m + 1) * (m + 1 + a))
        size = np.maximum(np.abs(after), np.abs(now))
        before, now, scale = now / size, after / size, scale + np.log(size)


def _quadrature(low: float, high: float, width: float) -> tuple[Floats, Floats]:
    """Return Gauss-Legendre nodes and weights [intervals, ORDER]."""
    edges = np.linspace(low, high, ceil((high - low) / width) + 1)
    at, weights = np.polynomial.legendre.leggauss(ORDER)
    half = np.diff(edges)[:, None] / 2
    return edges[:-1, None] + half * (1 + at), half * weights


def _half_difference(values: Floats, weights: Floats) -> Floats:
    """Return at each node half of the integral to its left minus that to its right."""
    sums = (values * weights).sum(1, keepdims=True)
    width = weights.sum(1, keepdims=True)
    inside = (values @ _integrals().T) * width / 2
    difference: Floats = inside + np.cumsum(sums, 0) - sums - sums.sum() / 2
    return difference


@cache
def _integrals() -> Floats:
    """Return the matrix from values at the nodes of [-1, 1] to the integrals up to each node."""
    legendre = np.polynomial.legendre
    at, _ = legendre.leggauss(ORDER)
    below = np.stack([legendre.legval(at, legendre.legint(row, lbnd=-1)) for row in np.eye(ORDER)], 1)
    matrix: Floats = below @ np.linalg.inv(legendre.legvander(at, ORDER - 1))
    return matrix
