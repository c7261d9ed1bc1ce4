"""How the loss curves around a member: traces, top eigenvalues and the density of eigenvalues.

All of them are about the mean loss over the ground's samples at the member's own weights. None is unchanged when
neighbouring layers are rescaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.registry import probe
from plateaux.core.types import Estimate
from plateaux.loss_landscape.curvature import Curvature, Kind
from plateaux.loss_landscape.lanczos import (
    Which,
    density,
    eigenpairs,
    mc_standard_error,
    orthogonalize,
    orthonormalize,
    quadrature,
    rademacher,
)
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.probe import Probe

Method = Literal["hutchinson", "hutch++"]

COST: dict[Kind, int] = {"hessian": 4, "gauss_newton": 2}  # passes that a product takes
MATRIX: dict[Kind, str] = {
    "hessian": "Hessian of the mean cross entropy over the trained weights",
    "gauss_newton": "mean of J' (diag p - p p') J over the trained weights",
}
DATA = "error of the data from at least eight pieces of the samples, where there are sixteen for each"


@probe
def trace(
    *, mc_samples: int = 30, method: Method = "hutchinson", layers: bool = False, layer: str | None = None
) -> Probe:
    """The trace of the Hessian: the sum of the loss's curvatures in all directions."""
    return _trace("trace", "hessian", mc_samples=mc_samples, method=method, layers=layers, layer=layer)


@probe
def gauss_newton_trace(
    *, mc_samples: int = 30, method: Method = "hutchinson", layers: bool = False, layer: str | None = None
) -> Probe:
    """The trace of the Gauss-Newton matrix: the part of the Hessian's that is never below zero."""
    return _trace(
        "gauss_newton_trace", "gauss_newton", mc_samples=mc_samples, method=method, layers=layers, layer=layer
    )


@probe
def top_eigenvalue(
    *, k: int = 1, end: Which = "largest", steps: int = 50, tolerance: float = 1e-3, layer: str | None = None
) -> Probe:
    """The largest eigenvalue of the Hessian: the loss's curvature in its steepest direction."""
    return _top("top_eigenvalue", "hessian", k=k, end=end, steps=steps, tolerance=tolerance, layer=layer)


@probe
def gauss_newton_eigenvalue(
    *, k: int = 1, end: Which = "largest", steps: int = 50, tolerance: float = 1e-3, layer: str | None = None
) -> Probe:
    """The largest eigenvalue of the Gauss-Newton matrix, which has none below zero."""
    return _top("gauss_newton_eigenvalue", "gauss_newton", k=k, end=end, steps=steps, tolerance=tolerance, layer=layer)


@probe
def spectrum(
    *, mc_samples: int = 4, steps: int = 30, points: int = 101, kind: Kind = "hessian", layer: str | None = None
) -> Probe:
    """The density of the Hessian's eigenvalues on a grid; the number itself is their mean."""
    _at_least(1, mc_samples=mc_samples, steps=steps)
    _at_least(32, points=points)

    def ask(ground: LossSurface) -> Mapping[str, Estimate]:
        matrix = Curvature(ground, kind=kind, layer=layer)
        found = [quadrature(matrix.product, v, steps=steps) for v in _draws(matrix, "spectrum", mc_samples)]
        nodes, weights = [each[0] for each in found], [each[1] for each in found]
        means = torch.stack([at @ weight for at, weight in found])
        grid, heights = density(nodes, weights, points=points)
        return {
            "": Estimate(float(means.mean()), mc_stderr=mc_standard_error(means)),
            "lowest": Estimate(min(float(at.min()) for at in nodes)),
            "highest": Estimate(max(float(at.max()) for at in nodes)),
            **{
                f"density at {at:.8g}": Estimate(float(column.mean()), mc_stderr=mc_standard_error(column))
                for at, column in zip(grid.tolist(), heights.T, strict=True)
            },
        }

    return Probe(
        ask,
        passes=lambda samples: COST[kind] * mc_samples * steps * samples,
        higher_is_better=None,
        default=False,
        definition=f"{MATRIX[kind]}; stochastic Lanczos quadrature, {mc_samples} draws of {steps} steps, "
        f"blurred by a bell curve as wide as one of {points - 1} steps of the grid",
    )


def _trace(name: str, kind: Kind, *, mc_samples: int, method: Method, layers: bool, layer: str | None) -> Probe:
    _at_least(1 if method == "hutchinson" else 3, mc_samples=mc_samples)
    if layers and method == "hutch++":
        raise RecipeError('layers = true with method = "hutch++", which knows the whole only; try "hutchinson"')

    def ask(ground: LossSurface) -> Mapping[str, Estimate]:
        matrix = Curvature(ground, kind=kind, layer=layer)
        if method == "hutch++":
            return {"": _value(matrix, torch.stack(list(_hutch_plus_plus(matrix, name, mc_samples))))}
        forms = torch.stack([matrix.product_and_forms(v)[1] for v in _draws(matrix, name, mc_samples)])  # [D, G, T]
        blocks = matrix.layers() if layers else {}
        each = {f"layer {layer}": _value(matrix, forms[..., held].sum(-1)) for layer, held in blocks.items()}
        return {"": _value(matrix, forms.sum(-1)), **each}

    return Probe(
        ask,
        passes=lambda samples: COST[kind] * mc_samples * samples,
        definition=f"{MATRIX[kind]}; {method}, {mc_samples} products with vectors of random signs; {DATA}, "
        "given the draws",
    )


def _hutch_plus_plus(matrix: Curvature, name: str, mc_samples: int) -> Iterator[Tensor]:
    """Yield draws of every piece's trace `[G]` (Meyer et al. 2021): exact where the matrix is large, random elsewhere.

    A third of the products finds the space of the largest eigenvalues, a third the trace within it; the others are
    draws of the trace outside.
    """
    third = mc_samples // 3
    basis = orthonormalize(matrix.product(v) for v in _draws(matrix, f"{name} sketch", third))
    inside = torch.zeros(len(matrix.chunks), dtype=torch.float64)
    for row in basis:
        inside += matrix.product_and_forms(row)[1].sum(-1)
    for v in _draws(matrix, name, mc_samples - 2 * third):
        outside = orthogonalize(v, torch.stack(basis)) if basis else v
        yield inside + matrix.product_and_forms(outside)[1].sum(-1)


def _top(name: str, kind: Kind, *, k: int, end: Which, steps: int, tolerance: float, layer: str | None) -> Probe:
    _at_least(1, k=k)
    _at_least(k, steps=steps)

    def ask(ground: LossSurface) -> Mapping[str, Estimate]:
        matrix = Curvature(ground, kind=kind, layer=layer)
        if k > matrix.size:
            raise RecipeError(f"{name} with k = {k}: there are {matrix.size} weights, and as many eigenvalues")
        start = _start(matrix, name)
        _, vectors = eigenpairs(matrix.product, start, count=k, which=end, max_products=steps, tolerance=tolerance)
        values, residuals = zip(*[_checked(matrix, vector) for vector in vectors], strict=True)
        names = ["", *[ordinal(place) for place in range(2, k + 1)]]
        return {**dict(zip(names, values, strict=True)), "residual": Estimate(max(residuals))}

    return Probe(
        ask,
        passes=lambda samples: COST[kind] * (steps + k) * samples,
        definition=f"{MATRIX[kind]}; {_END[end]}; Lanczos until residuals are below {tolerance:g} of the eigenvalue, "
        f"or {steps} products; an eigenvalue lies within the residual of the number; {DATA}, at the vector found",
    )


_END: dict[Which, str] = {
    "largest": "the most positive first",
    "smallest": "the most negative first",
    "magnitude": "those farthest from zero first, with their sign",
}


def _checked(matrix: Curvature, vector: Tensor) -> tuple[Estimate, float]:
    """Return v . H v as the eigenvalue, and how far v is from an eigenvector, both from one more product."""
    vector = vector / torch.linalg.vector_norm(vector)
    product, forms = matrix.product_and_forms(vector)
    each = forms.sum(-1)  # [G]
    number = float(each @ matrix.chunk_weights)
    return Estimate(number, stderr=matrix.data_stderr(each)), float(torch.linalg.vector_norm(product - number * vector))


def _value(matrix: Curvature, forms: Tensor) -> Estimate:
    """Return the mean of draws of every piece `[D, G]`, with what the draws and what the samples leave open."""
    each = forms @ matrix.chunk_weights
    return Estimate(float(each.mean()), stderr=matrix.data_stderr(forms.mean(0)), mc_stderr=mc_standard_error(each))


def _draws(matrix: Curvature, name: str, count: int) -> Iterator[Tensor]:
    start = _start(matrix, name)
    return (start(number) for number in range(count))


def _start(matrix: Curvature, name: str) -> Callable[[int], Tensor]:
    return lambda number: rademacher(matrix.size, matrix.like, matrix.surface.generator(name, number))


def _at_least(least: int, **options: int) -> None:
    for name, given in options.items():
        if given < least:
            raise RecipeError(f"{name} = {given}: it takes at least {least}")


def ordinal(place: int) -> str:
    """Return 1st, 2nd, 3rd, ..."""
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{ending}"
