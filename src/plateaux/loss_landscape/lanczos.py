"""Eigenvalues and spectral densities of symmetric matrices that are given by matrix-vector products.

Vectors are flat, `[P]`. A basis is stored as rows `[m, P]` in the dtype of the vectors; small matrices are float64.

    values, vectors = eigenpairs(lambda v: matrix @ v, start_vector, count=2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from plateaux.core.errors import DivergedError

Product = Callable[[Tensor], Tensor]
"""A symmetric matrix times a vector `[P]`."""

Which = Literal["largest", "smallest", "magnitude"]
"""The most positive eigenvalues, the most negative, or those farthest from zero."""

TAIL_STEPS = 6  # grid steps (standard deviations) beyond the outermost node at which a Gaussian is taken to be zero


def rademacher(size: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Return a vector of random signs, +1 or -1 with equal probability."""
    bits = torch.randint(0, 2, (size,), generator=generator, device=like.device, dtype=like.dtype)
    return bits.mul_(2).sub_(1)


def mc_standard_error(draws: Tensor) -> float | None:
    """Return the standard error of the mean of draws `[D]`, or None for one draw."""
    return float(draws.std() / len(draws) ** 0.5) if len(draws) > 1 else None


def orthogonalize(vector: Tensor, basis: Tensor) -> Tensor:
    """Return the component of a vector that is orthogonal to every row of the basis."""
    return _project_out(vector, basis)[0]


@dataclass(frozen=True, slots=True)
class RitzPairs:
    """Approximate eigenvalues and eigenvectors from a Krylov space of m dimensions."""

    values: Tensor  # [m] ascending
    weights: Tensor  # [m, m] vector j is the sum over rows i of the basis times weights[i, j]
    residuals: Tensor  # [m] norms of H v - value * v


class KrylovSpace:
    """A Krylov space that grows by one product at a time: Lanczos with full re-orthogonalization, done twice.

    All coefficients of the orthogonalization are stored, so the space can be shrunk to its best Ritz vectors when it
    is full (thick restart, Wu and Simon 2000).
    """

    def __init__(self, product: Product, start: Tensor, *, max_size: int) -> None:
        self.product = product
        self.basis = start.new_empty(min(max_size, len(start)), len(start))
        self.projected = torch.zeros(len(self.basis), len(self.basis), dtype=torch.float64)
        self.next = start / torch.linalg.vector_norm(start)
        self.size = 0
        self.residual_norm = 0.0  # of the last product outside the space

    @property
    def is_full(self) -> bool:
        return self.size == len(self.basis)

    @property
    def is_invariant(self) -> bool:
        """Whether products stay inside the space, up to rounding errors."""
        is_complete = self.size == self.basis.shape[1]
        eps = torch.finfo(self.basis.dtype).eps
        return is_complete or self.residual_norm <= 100 * eps * float(self.projected.abs().max())

    def expand(self) -> None:
        """Add the next vector to the basis, at the cost of one product."""
        self.basis[self.size] = self.next
        self.size += 1
        rows = self.basis[: self.size]
        residual, coefficients = _project_out(self.product(self.next), rows)
        column = coefficients.double().cpu()
        self.projected[: self.size, self.size - 1] = self.projected[self.size - 1, : self.size] = column
        self._set_next(residual)

    def ritz_pairs(self) -> RitzPairs:
        values, weights = torch.linalg.eigh(self.projected[: self.size, : self.size])
        return RitzPairs(values, weights, self.residual_norm * weights[-1].abs())

    def combine(self, weights: Tensor) -> Tensor:
        """Return the linear combinations `[k, P]` of the basis with weights `[m, k]`."""
        return weights.T.to(self.basis) @ self.basis[: self.size]

    def shrink(self, selected: Tensor) -> None:
        """Keep only the selected Ritz vectors, by position. The next vector does not change."""
        pairs = self.ritz_pairs()
        self.basis[: len(selected)] = self.combine(pairs.weights[:, selected])
        self.projected.zero_()
        self.projected[: len(selected), : len(selected)] = pairs.values[selected].diag()
        self.size = len(selected)

    def continue_from(self, vector: Tensor) -> None:
        """Continue with another start vector after the space has become invariant."""
        self._set_next(orthogonalize(vector, self.basis[: self.size]))

    def _set_next(self, residual: Tensor) -> None:
        self.residual_norm = float(torch.linalg.vector_norm(residual))
        if not isfinite(self.residual_norm):
            raise DivergedError(
                "A product with the curvature matrix is NaN or infinite: the weights or the losses of the member have "
                "diverged"
            )
        self.next = residual / self.residual_norm if self.residual_norm else residual


def eigenpairs(
    product: Product,
    start_vector: Callable[[int], Tensor],
    *,
    count: int = 1,
    which: Which = "largest",
    max_products: int = 100,
    max_size: int = 40,
    tolerance: float = 1e-3,
) -> tuple[Tensor, Tensor]:
    """Return the outermost eigenvalues `[k]` at one end of the spectrum, the outermost first, and vectors `[k, P]`.

    Stops after `max_products`, or as soon as every residual is below the tolerance times its own eigenvalue (not times
    the largest eigenvalue: among many eigenvalues near zero, almost any vector has a small residual). The error of an
    eigenvalue is at most its residual, and usually close to the square of it. `start_vector(i)` returns random vectors:
    one at the start, and one each time the space becomes invariant, because a single start vector finds repeated
    eigenvalues only once.
    """
    krylov = KrylovSpace(product, start_vector(0), max_size=max(max_size, 2 * count + 8))
    restarts = 0
    for step in range(1, max_products + 1):
        krylov.expand()
        if krylov.is_invariant:
            restarts += 1
            if restarts == count or krylov.size == krylov.basis.shape[1] or step == max_products:
                break
            if krylov.is_full:
                krylov.shrink(_order(krylov.ritz_pairs().values, which)[: krylov.size // 2])
            krylov.continue_from(start_vector(restarts))
            continue
        pairs = krylov.ritz_pairs()
        order = _order(pairs.values, which)
        if not restarts and len(order) >= count and _has_converged(pairs, order[:count], tolerance):
            break
        if krylov.is_full and step < max_products:
            krylov.shrink(order[: krylov.size // 2])
    pairs = krylov.ritz_pairs()
    selected = _order(pairs.values, which)[:count]
    return pairs.values[selected], krylov.combine(pairs.weights[:, selected])


def quadrature(product: Product, start: Tensor, *, steps: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights `[m]` of the spectral measure of the start vector.

    Stochastic Lanczos quadrature: exact for polynomials of degree below 2 * steps. The weights sum to one.
    """
    krylov = KrylovSpace(product, start, max_size=steps)
    krylov.expand()
    while not krylov.is_full and not krylov.is_invariant:
        krylov.expand()
    pairs = krylov.ritz_pairs()
    return pairs.values, pairs.weights[0].square()


def density(nodes: Sequence[Tensor], weights: Sequence[Tensor], *, points: int) -> tuple[Tensor, Tensor]:
    """Return a grid `[points]` and the spectral density of each draw on it `[draws, points]`.

    The density is smoothed by a Gaussian whose standard deviation is one grid step, so that sums over the grid agree
    with integrals to eight digits.
    """
    low, high = float(torch.cat(list(nodes)).min()), float(torch.cat(list(nodes)).max())
    step = (high - low) / (points - 1 - 2 * TAIL_STEPS) or max(abs(low), 1.0) * 1e-3
    grid = low + step * (torch.arange(points, dtype=torch.float64) - TAIL_STEPS)
    pairs = zip(nodes, weights, strict=True)
    rows = [(_gaussian((grid[:, None] - node) / step) / step) @ weight for node, weight in pairs]
    return grid, torch.stack(rows)


def _project_out(vector: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the component of a vector orthogonal to the basis, and its coefficients in the basis."""
    coefficients = basis @ vector
    residual = torch.addmv(vector, basis.T, coefficients, alpha=-1)
    correction = basis @ residual  # a second pass removes what rounding leaves of the basis in a small residual
    return residual.addmv_(basis.T, correction, alpha=-1), coefficients + correction


def _order(values: Tensor, which: Which) -> Tensor:
    key = {"largest": values, "smallest": -values, "magnitude": values.abs()}[which]
    return key.argsort(descending=True)


def _has_converged(pairs: RitzPairs, selected: Tensor, tolerance: float) -> bool:
    return bool((pairs.residuals[selected] <= tolerance * pairs.values[selected].abs()).all())


def _gaussian(x: Tensor) -> Tensor:
    values: Tensor = torch.exp(-x.square() / 2) / (2 * torch.pi) ** 0.5
    return values
