"""SAM on a quadratic, in closed form: where it goes, and how sharp it is there.

The loss is f(w) = |A (w - w*)|^2 / 2 with W = A^T A. SAM without normalisation steps to
w - eta grad f(w + rho grad f(w)), so that w_k = w* + B^k (w_0 - w*) with B = I - eta W - eta rho W^2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plateaux.theory.phi import Floats, contraction

HALVINGS = 110  # of an interval of doubles, until nothing is left of it


class Worst(NamedTuple):
    """The largest rise of the loss within a radius, and where it is, in the basis of eigenvectors."""

    rise: Floats  # [...]
    where: Floats  # [..., d]


def sam_weights(gram: Floats, start: Floats, teacher: Floats, *, steps: int, eta: float, rho: float) -> Floats:
    """Return where SAM is after so many steps from `start` [d] or [d, members].

    >>> gram, origin, teacher = np.diag([1.0, 2.0]), np.zeros(2), np.ones(2)
    >>> sam_weights(gram, origin, teacher, steps=1, eta=0.5, rho=0.0).tolist()
    [0.5, 1.0]
    """
    values, vectors = np.linalg.eigh(gram)
    error = (start.T - teacher).T
    left = (contraction(values, eta=eta, rho=rho) ** steps * (vectors.T @ error).T).T
    return ((vectors @ left).T + teacher).T


def rise(values: Floats, slope: Floats, at: Floats) -> Floats:
    """Return how much the loss rises from a point with gradient `slope`, all in the basis of eigenvectors."""
    found: Floats = (0.5 * values * at * at + slope * at).sum(-1)
    return found


def worst_case(values: Floats, slope: Floats, radius: float | Floats) -> Worst:
    """Return the largest e^T W e / 2 + slope^T e over |e| <= radius, exactly: a trust-region problem.

    `values` [d] are the eigenvalues of W in ascending order, `slope` [..., d] the gradient along their eigenvectors.
    The answer is the least of (mu radius^2 + sum slope^2 / (mu - values)) / 2 over mu >= values[-1], at the mu where
    |slope / (mu - values)| = radius. In the hard case there is none, because the slope has no part along the top
    eigenvectors: mu is the top value then, and the way left to the boundary is gone along a top eigenvector.

    >>> found = worst_case(np.array([1.0, 3.0]), np.array([0.5, 0.0]), 2.0)  # a hard case
    >>> float(found.rise), found.where.round(6).tolist()
    (6.0625, [0.25, 1.984313])
    """
    size = np.asarray(radius, dtype=np.float64)
    gap, reach = values[-1] - values, np.maximum(size, 1e-300)
    low, high = np.abs(slope[..., -1]) / reach, np.linalg.norm(slope, axis=-1) / reach  # of mu - values[-1]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        too_near = np.linalg.norm(_divide(slope, gap + middle[..., None]), axis=-1) > size
        low, high = np.where(too_near, middle, low), np.where(too_near, high, middle)
    where = _divide(slope, gap + high[..., None])
    left = np.maximum(size**2 - (where * where).sum(-1), 0.0)
    top = where[..., -1]
    where[..., -1] = np.where(top < 0, -1.0, 1.0) * np.sqrt(top * top + left)
    return Worst(rise(values, slope, where), where)


def _divide(slope: Floats, by: Floats) -> Floats:
    """Return slope / by, and zero where there is no slope."""
    return np.divide(slope, by, out=np.zeros(np.broadcast_shapes(slope.shape, by.shape)), where=slope != 0)
