"""Curvature of the loss: traces, top eigenvalues, and the spectral density of the Hessian or Gauss-Newton matrix.

All values refer to the mean loss over the samples at the trained weights. None of them is scale-invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.ranges import Count, NonNegative
from plateaux.core.registry import probe
from plateaux.core.types import Estimate
from plateaux.loss_landscape.curvature import Curvature, Kind
from plateaux.loss_landscape.lanczos import (
    Which,
    density,
    eigenpairs,
    mc_standard_error,
    quadrature,
    rademacher,
)
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe

PASSES_PER_PRODUCT: dict[Kind, int] = {"hessian": 4, "gauss_newton": 2}
MATRIX: dict[Kind, str] = {
    "hessian": "Hessian of the mean loss over the trained weights",
    "gauss_newton": "mean of J' (diag p - p p') J over the trained weights",
}
DATA_STDERR = "standard error of the data from at least eight chunks of at least sixteen samples, if there are enough"
_ORDER: dict[Which, str] = {
    "largest": "the most positive first",
    "smallest": "the most negative first",
    "magnitude": "those farthest from zero first, with their sign",
}


@probe("trace", kind="hessian")
@probe("gauss_newton_trace", kind="gauss_newton")
def trace(
    *,
    kind: Kind,
    mc_samples: Count = 30,
    layers: bool = False,
    layer: str | None = None,
) -> Probe:
    """The trace of a curvature matrix: the sum of the curvatures of the loss in all directions.

    The Gauss-Newton matrix is the positive semidefinite part of the Hessian.
    """
    name = "trace" if kind == "hessian" else "gauss_newton_trace"

    def run(surface: LossSurface) -> Mapping[str, Estimate]:
        matrix = Curvature(surface, kind=kind, layer=layer)
        vectors = _random_vectors(matrix, name, mc_samples)
        forms = torch.stack([matrix.product_and_forms(v)[1] for v in vectors])  # [D, G, T]
        positions = matrix.layers() if layers else {}
        by_layer = {f"layer {n}": _estimate(matrix, forms[..., at].sum(-1)) for n, at in positions.items()}
        return {"": _estimate(matrix, forms.sum(-1)), **by_layer}

    return Probe(
        run,
        passes=lambda samples: PASSES_PER_PRODUCT[kind] * mc_samples * samples,
        definition=f"{MATRIX[kind]}; hutchinson, {mc_samples} products with vectors of random signs; {DATA_STDERR}, "
        "for the given draws",
    )


@probe("top_eigenvalue", kind="hessian")
@probe("gauss_newton_eigenvalue", kind="gauss_newton")
def top(
    *,
    kind: Kind,
    k: Count = 1,
    end: Which = "largest",
    steps: Count = 50,
    tolerance: NonNegative = 1e-3,
    layer: str | None = None,
) -> Probe:
    """The largest eigenvalue of a curvature matrix: the curvature of the loss in its steepest direction.

    The Gauss-Newton matrix has no negative eigenvalues.
    """
    name = "top_eigenvalue" if kind == "hessian" else "gauss_newton_eigenvalue"
    if steps < k:
        raise RecipeError(f"steps = {steps}: must be at least {k}, the number of eigenvalues")

    def run(surface: LossSurface) -> Mapping[str, Estimate]:
        matrix = Curvature(surface, kind=kind, layer=layer)
        if k > matrix.size:
            raise RecipeError(f"k = {k} for {name}: the matrix has only {matrix.size} eigenvalues; use a smaller k")
        start = _start_vector(matrix, name)
        _, vectors = eigenpairs(matrix.product, start, count=k, which=end, max_products=steps, tolerance=tolerance)
        values, residuals = zip(*[_eigenvalue(matrix, vector) for vector in vectors], strict=True)
        names = ["", *[ordinal(rank) for rank in range(2, k + 1)]]
        return {**dict(zip(names, values, strict=True)), "residual": Estimate(max(residuals))}

    return Probe(
        run,
        passes=lambda samples: PASSES_PER_PRODUCT[kind] * (steps + k) * samples,
        definition=f"{MATRIX[kind]}; {_ORDER[end]}; Lanczos until residuals are below {tolerance:g} of the eigenvalue, "
        f"or {steps} products; the error of an eigenvalue is at most its residual; {DATA_STDERR}, at the given vector",
    )


@probe
def spectrum(
    *, mc_samples: Count = 4, steps: Count = 30, points: Count = 101, kind: Kind = "hessian", layer: str | None = None
) -> Probe:
    """The density of the Hessian's eigenvalues on a grid; the main value is the mean eigenvalue."""
    if points < 32:
        raise RecipeError(f"points = {points}: must be at least 32")

    def run(surface: LossSurface) -> Mapping[str, Estimate]:
        matrix = Curvature(surface, kind=kind, layer=layer)
        results = [quadrature(matrix.product, v, steps=steps) for v in _random_vectors(matrix, "spectrum", mc_samples)]
        nodes, weights = [result[0] for result in results], [result[1] for result in results]
        means = torch.stack([node @ weight for node, weight in results])
        grid, densities = density(nodes, weights, points=points)
        return {
            "": Estimate(float(means.mean()), mc_stderr=mc_standard_error(means)),
            "lowest": Estimate(min(float(node.min()) for node in nodes)),
            "highest": Estimate(max(float(node.max()) for node in nodes)),
            **{
                f"density at {at:.8g}": Estimate(float(column.mean()), mc_stderr=mc_standard_error(column))
                for at, column in zip(grid.tolist(), densities.T, strict=True)
            },
        }

    return Probe(
        run,
        passes=lambda samples: PASSES_PER_PRODUCT[kind] * mc_samples * steps * samples,
        higher_is_better=None,
        default=False,
        definition=f"{MATRIX[kind]}; stochastic Lanczos quadrature, {mc_samples} draws of {steps} steps, smoothed by a "
        f"Gaussian with a standard deviation of one of the {points - 1} grid steps",
    )


def _eigenvalue(matrix: Curvature, vector: Tensor) -> tuple[Estimate, float]:
    """Return v . H v as the eigenvalue and the norm of the residual, both from one more product."""
    vector = vector / torch.linalg.vector_norm(vector)
    product, forms = matrix.product_and_forms(vector)
    by_chunk = forms.sum(-1)  # [G]
    value = float(by_chunk @ matrix.chunk_weights)
    residual = float(torch.linalg.vector_norm(product - value * vector))
    return Estimate(value, stderr=matrix.data_stderr(by_chunk)), residual


def _estimate(matrix: Curvature, forms: Tensor) -> Estimate:
    """Return the mean of draws per chunk `[D, G]`, with the standard errors from the data and from the draws."""
    by_draw = forms @ matrix.chunk_weights
    stderr = matrix.data_stderr(forms.mean(0))
    return Estimate(float(by_draw.mean()), stderr=stderr, mc_stderr=mc_standard_error(by_draw))


def _random_vectors(matrix: Curvature, name: str, count: int) -> Iterator[Tensor]:
    start = _start_vector(matrix, name)
    return (start(i) for i in range(count))


def _start_vector(matrix: Curvature, name: str) -> Callable[[int], Tensor]:
    return lambda i: rademacher(matrix.size, matrix.like, matrix.surface.generator(name, i))


def ordinal(rank: int) -> str:
    """Return 1st, 2nd, 3rd, ..."""
    suffix = "th" if rank % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"{rank}{suffix}"
