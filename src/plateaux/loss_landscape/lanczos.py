"""What a symmetric matrix is like that is known only by its products with vectors.

Vectors are flat, `[P]`; a basis is kept as rows `[m, P]` in the vectors' own type, and everything small is float64.

    values, vectors = eigenpairs(lambda v: matrix @ v, start, count=2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plateaux.core.errors import DivergedError

Product = Callable[[Tensor], Tensor]
"""A symmetric matrix times a vector `[P]`."""

Which = Literal["largest", "smallest", "magnitude"]
"""The most positive, the most negative, or those farthest from zero."""

TAIL_STEPS = 6  # widths beyond the outermost node at which a bell curve is taken for zero


def rademacher(size: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Return a vector of +1 and -1, each as likely."""
    bits = torch.randint(0, 2, (size,), generator=generator, device=like.device, dtype=like.dtype)
    return bits.mul_(2).sub_(1)


def mc_standard_error(draws: Tensor) -> float | None:
    """Return the standard error of the mean of draws `[D]`; of one draw nothing is known."""
    return float(draws.std() / len(draws) ** 0.5) if len(draws) > 1 else None


def orthogonalize(vector: Tensor, basis: Tensor) -> Tensor:
    """Return the part of a vector that is orthogonal to every row of the basis."""
    return _project_out(vector, basis)[0]


def orthonormalize(vectors: Iterable[Tensor]) -> list[Tensor]:
    """Return an orthonormal basis of what the vectors span; those that add next to nothing are left out."""
    rows: list[Tensor] = []
    for vector in vectors:
        rest = orthogonalize(vector, torch.stack(rows)) if rows else vector
        length = torch.linalg.vector_norm(rest)
        if length > torch.finfo(vector.dtype).eps ** 0.5 * torch.linalg.vector_norm(vector):
            rows.append(rest / length)
    return rows


@dataclass(frozen=True, slots=True)
class RitzPairs:
    """The matrix as seen from a space of few dimensions, in its own eigenvectors."""

    values: Tensor  # [m] ascending
    weights: Tensor  # [m, m] eigenvector j is the sum over rows i of the basis times weights[i, j]
    residuals: Tensor  # [m] how far each is from an eigenvector of the whole matrix


class KrylovSpace:
    """A space that grows by one product at a time: Lanczos, every new vector made orthogonal to all before, twice.

    The coefficients of that are kept whole, so that nothing depends on how the space was come by and it can be shrunk
    to its best vectors (Wu and Simon 2000, thick restart) where memory ends.
    """

    def __init__(self, product: Product, start: Tensor, *, max_size: int) -> None:
        self.product = product
        self.basis = start.new_empty(min(max_size, len(start)), len(start))
        self.projected = torch.zeros(len(self.basis), len(self.basis), dtype=torch.float64)
        self.next = start / torch.linalg.vector_norm(start)
        self.size = 0
        self.residual_norm = 0.0  # the length of what the last product leaves outside

    @property
    def is_full(self) -> bool:
        return self.size == len(self.basis)

    @property
    def is_invariant(self) -> bool:
        """Whether products lead out of the space no more, but for rounding."""
        whole = self.size == self.basis.shape[1]
        return whole or self.residual_norm <= 100 * torch.finfo(self.basis.dtype).eps * float(
            self.projected.abs().max()
        )

    def expand(self) -> None:
        self.basis[self.size] = self.next
        self.size += 1
        rows = self.basis[: self.size]
        rest, inside = _project_out(self.product(self.next), rows)
        self.projected[: self.size, self.size - 1] = self.projected[self.size - 1, : self.size] = inside.double().cpu()
        self._set_next(rest)

    def ritz_pairs(self) -> RitzPairs:
        values, weights = torch.linalg.eigh(self.projected[: self.size, : self.size])
        return RitzPairs(values, weights, self.residual_norm * weights[-1].abs())

    def combine(self, weights: Tensor) -> Tensor:
        """Return the vectors `[k, P]` with weights `[m, k]`."""
        return weights.T.to(self.basis) @ self.basis[: self.size]

    def shrink(self, kept: Tensor) -> None:
        """Keep only some of the eigenvectors seen, by position; the next vector stays what it is."""
        seen = self.ritz_pairs()
        self.basis[: len(kept)] = self.combine(seen.weights[:, kept])
        self.projected.zero_()
        self.projected[: len(kept), : len(kept)] = seen.values[kept].diag()
        self.size = len(kept)

    def continue_from(self, vector: Tensor) -> None:
        """Go on in another direction, where the space is closed."""
        self._set_next(orthogonalize(vector, self.basis[: self.size]))

    def _set_next(self, rest: Tensor) -> None:
        self.residual_norm = float(torch.linalg.vector_norm(rest))
        if self.residual_norm != self.residual_norm or self.residual_norm == float("inf"):
            raise DivergedError(
                "A product with the curvature is not finite: the member's weights or its losses have diverged"
            )
        self.next = rest / self.residual_norm if self.residual_norm else rest


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
    """Return the outermost eigenvalues `[k]` of one end, the outermost first, and their vectors `[k, P]`.

    It ends after so many products, or as soon as every residual is below the tolerance times its own eigenvalue. Not
    the largest one: among many eigenvalues near zero almost any vector has a small residual, and is at no end. An
    eigenvalue is wrong by at most its residual, and mostly by the square of it. `starts` gives random vectors: one,
    and one more for each time the space closes, because from one vector equal eigenvalues are seen once.
    """
    krylov = KrylovSpace(product, start_vector(0), max_size=max(max_size, 2 * count + 8))
    turns = 0
    for step in range(1, max_products + 1):
        krylov.expand()
        if krylov.is_invariant:
            turns += 1
            if turns == count or krylov.size == krylov.basis.shape[1] or step == max_products:
                break
            if krylov.is_full:
                krylov.shrink(_order(krylov.ritz_pairs().values, which)[: krylov.size // 2])
            krylov.continue_from(start_vector(turns))
            continue
        seen = krylov.ritz_pairs()
        order = _order(seen.values, which)
        if not turns and len(order) >= count and _has_converged(seen, order[:count], tolerance):
            break
        if krylov.is_full and step < max_products:
            krylov.shrink(order[: krylov.size // 2])
    seen = krylov.ritz_pairs()
    chosen = _order(seen.values, which)[:count]
    return seen.values[chosen], krylov.combine(seen.weights[:, chosen])


def quadrature(product: Product, start: Tensor, *, steps: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights `[m]` that stand for the eigenvalues as the start vector is made of their vectors.

    Stochastic Lanczos quadrature: exact for polynomials of a degree below twice the steps; the weights add to one.
    """
    krylov = KrylovSpace(product, start, max_size=steps)
    krylov.expand()
    while not krylov.is_full and not krylov.is_invariant:
        krylov.expand()
    seen = krylov.ritz_pairs()
    return seen.values, seen.weights[0].square()


def density(nodes: Sequence[Tensor], weights: Sequence[Tensor], *, points: int) -> tuple[Tensor, Tensor]:
    """Return a grid `[points]` and the density of each draw on it `[draws, points]`, blurred by one step of the grid.

    With a blur of one step, sums over the grid are integrals to eight digits.
    """
    low, high = float(torch.cat(list(nodes)).min()), float(torch.cat(list(nodes)).max())
    step = (high - low) / (points - 1 - 2 * TAIL_STEPS) or max(abs(low), 1.0) * 1e-3
    grid = low + step * (torch.arange(points, dtype=torch.float64) - TAIL_STEPS)
    rows = [(_gaussian((grid[:, None] - at) / step) / step) @ weight for at, weight in zip(nodes, weights, strict=True)]
    return grid, torch.stack(rows)


def _project_out(vector: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return what of a vector is outside a basis, and its coefficients inside."""
    inside = basis @ vector
    rest = torch.addmv(vector, basis.T, inside, alpha=-1)
    again = basis @ rest  # rounding leaves as much inside as a small rest is long
    return rest.addmv_(basis.T, again, alpha=-1), inside + again


def _order(values: Tensor, end: Which) -> Tensor:
    key = {"largest": values, "smallest": -values, "magnitude": values.abs()}[end]
    return key.argsort(descending=True)


def _has_converged(seen: RitzPairs, wanted: Tensor, tolerance: float) -> bool:
    return bool((seen.residuals[wanted] <= tolerance * seen.values[wanted].abs()).all())


def _gaussian(x: Tensor) -> Tensor:
    height: Tensor = torch.exp(-x.square() / 2) / (2 * torch.pi) ** 0.5
    return height
