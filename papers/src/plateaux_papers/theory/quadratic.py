"""SAM on a quadratic loss in closed form: its weights after any number of steps, and the sharpness there.

The loss is f(w) = |A (w - w*)|^2 / 2 with W = A^T A. SAM without normalization steps to
w - eta grad f(w + rho grad f(w)), so that w_k = w* + B^k (w_0 - w*) with B = I - eta W - eta rho W^2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plateaux_papers.theory.phi import Floats, contraction

BISECTIONS = 110  # down to the last bit of a double


class WorstCase(NamedTuple):
    """The largest rise of the loss within a radius and its position, in the basis of eigenvectors."""

    rise: Floats  # [...]
    where: Floats  # [..., d]


def sam_weights(gram: Floats, start: Floats, teacher: Floats, *, steps: int, eta: float, rho: float) -> Floats:
    """Return the weights of SAM after `steps` steps from `start` [d] or [d, members].

    >>> gram, origin, teacher = np.diag([1.0, 2.0]), np.zeros(2), np.ones(2)
    >>> sam_weights(gram, origin, teacher, steps=1, eta=0.5, rho=0.0).tolist()
    [0.5, 1.0]
    """
    values, vectors = np.linalg.eigh(gram)
    error = (start.T - teacher).T
    shrunk = (contraction(values, eta=eta, rho=rho) ** steps * (vectors.T @ error).T).T
    return ((vectors @ shrunk).T + teacher).T


def rise(values: Floats, slope: Floats, at: Floats) -> Floats:
    """Return the rise of the loss at `at`, from a point with gradient `slope`, all in the basis of eigenvectors."""
    increase: Floats = (0.5 * values * at * at + slope * at).sum(-1)
    return increase


def worst_case(values: Floats, slope: Floats, radius: float | Floats) -> WorstCase:
    """Return the largest e^T W e / 2 + slope^T e over |e| <= radius, exactly: a trust-region problem.

    `values` [d] are the eigenvalues of W in ascending order, `slope` [..., d] the gradient along their eigenvectors.
    The maximum is the minimum of (mu radius^2 + sum slope^2 / (mu - values)) / 2 over mu >= values[-1], at the mu with
    |slope / (mu - values)| = radius. In the hard case no such mu exists, because the slope has no component along the
    top eigenvectors: mu is then the top eigenvalue, and a top eigenvector completes the step to the boundary.

    >>> worst = worst_case(np.array([1.0, 3.0]), np.array([0.5, 0.0]), 2.0)  # a hard case
    >>> float(worst.rise), worst.where.round(6).tolist()
    (6.0625, [0.25, 1.984313])
    """
    size = np.asarray(radius, dtype=np.float64)
    gap, safe_size = values[-1] - values, np.maximum(size, 1e-300)
    low, high = np.abs(slope[..., -1]) / safe_size, np.linalg.norm(slope, axis=-1) / safe_size  # mu - top
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_too_small = np.linalg.norm(_divide(slope, gap + middle[..., None]), axis=-1) > size
        low, high = np.where(is_too_small, middle, low), np.where(is_too_small, high, middle)
    where = _divide(slope, gap + high[..., None])
    rest = np.maximum(size**2 - (where * where).sum(-1), 0.0)
    top = where[..., -1]
    where[..., -1] = np.where(top < 0, -1.0, 1.0) * np.sqrt(top * top + rest)
    return WorstCase(rise(values, slope, where), where)


def _divide(slope: Floats, divisor: Floats) -> Floats:
    """Return slope / divisor, and zero where the slope is zero."""
    zeros = np.zeros(np.broadcast_shapes(slope.shape, divisor.shape))
    return np.divide(slope, divisor, out=zeros, where=slope != 0)
