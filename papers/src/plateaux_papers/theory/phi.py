"""phi(i, j) = (1/d) E tr[B^i W^j], the only moments of random matrices that the theorems need.

W = A^T A with independent entries N(0, 1/d) of A [n, d], r = n/d, and B = I - eta W - eta rho W^2 is one step of SAM.
To leading order phi is an integral over the Marchenko-Pastur law. As a sum over monomials it has terms of alternating
sign, which cancel to no correct digits; as a Gauss-Radau quadrature it has positive weights and is exact.
"""

from __future__ import annotations

from functools import cache
from math import expm1, log, sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def phi(i: int, j: int, *, r: float, eta: float, rho: float, d: int | None = None) -> float:
    """Return phi(i, j) to leading order, or with its first correction in 1/d if `d` is given.

    >>> round(phi(0, 2, r=2.0, eta=0.1, rho=0.0), 12), round(phi(0, 2, r=2.0, eta=0.1, rho=0.0, d=10), 12)
    (6.0, 6.2)
    """
    x, weight, at_zero = nodes(r, (2 * i + j) // 2 + 2)
    leading = float(weight @ _polynomial(x, i, j, eta=eta, rho=rho)) + (at_zero if j == 0 else 0.0)
    return leading if d is None else leading + first_correction(i, j, r=r, eta=eta, rho=rho) / d


def first_correction(i: int, j: int, *, r: float, eta: float, rho: float) -> float:
    """Return the coefficient of 1/d in phi(i, j) for real Gaussian data.

    It is (F(a) + F(b)) / 4 - mean(F) / 2 with F(x) = b(x)^i x^j, where a and b are the edges of the spectrum and the
    mean is over the arcsine law between them.
    """
    edges = np.array([(1 - sqrt(r)) ** 2, (1 + sqrt(r)) ** 2])
    inside = chebyshev(r, 2 * i + j + 1)[1]
    at_edges, at_inside = (_polynomial(x, i, j, eta=eta, rho=rho) for x in (edges, inside))
    return float(at_edges.sum() / 4 - at_inside.mean() / 2)


def trace_variance(i: int, j: int, *, r: float, eta: float, rho: float) -> float:
    """Return the variance of tr[B^i W^j] to leading order, which does not depend on d.

    It is half the sum of k c_k^2 over the Chebyshev coefficients of x -> b(x)^i x^j on the spectrum.
    """
    angles, x = chebyshev(r, 2 * i + j + 1)
    orders = np.arange(1, 2 * i + j + 1)
    coefficients = 2 / len(x) * (np.cos(np.outer(orders, angles)) @ _polynomial(x, i, j, eta=eta, rho=rho))
    return float(orders @ coefficients**2) / 2


def contraction(x: Floats, *, eta: float, rho: float) -> Floats:
    """Return the factor by which one step of SAM multiplies the error along an eigenvector of eigenvalue x."""
    return 1 - eta * x - eta * rho * x * x


@cache
def nodes(r: float, count: int) -> tuple[Floats, Floats, float]:
    """Return nodes and weights of the Marchenko-Pastur law, and the weight of one more node at zero.

    They are exact up to degree 2 count. The inner nodes are Chebyshev nodes of the second kind, for x times the law,
    with weights divided by x. The node at zero has the remaining mass: the atom of the law for r < 1, and the aliasing
    of 1/x.
    """
    angles = np.pi * np.arange(1, count + 1) / (count + 1)
    x = 1 + r + 2 * sqrt(r) * np.cos(angles)
    aliased = 1 / (count + 1) if r == 1 else abs(1 - r) / expm1((count + 1) * abs(log(r)))
    return x, r * 2 / (count + 1) * np.sin(angles) ** 2 / x, max(1 - r, 0.0) + aliased


@cache
def chebyshev(r: float, count: int) -> tuple[Floats, Floats]:
    """Return Chebyshev angles and points of the spectrum; a mean over them is one over the arcsine law."""
    angles = np.pi * (np.arange(count) + 0.5) / count
    return angles, 1 + r + 2 * sqrt(r) * np.cos(angles)


def _polynomial(x: Floats, i: int, j: int, *, eta: float, rho: float) -> Floats:
    return contraction(x, eta=eta, rho=rho) ** i * x**j
