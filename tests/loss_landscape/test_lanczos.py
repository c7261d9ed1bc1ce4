"""Lanczos methods against explicit matrices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plateaux.core.errors import DivergedError
from plateaux.loss_landscape.lanczos import (
    KrylovSpace,
    density,
    eigenpairs,
    mc_standard_error,
    orthogonalize,
    quadrature,
    rademacher,
)


def matrix(values: Tensor, seed: int = 0) -> Tensor:
    """Return a symmetric matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return rotation @ values.double().diag() @ rotation.T


def start_vectors(size: int, dtype: torch.dtype = torch.float64) -> Callable[[int], Tensor]:
    like = torch.zeros(1, dtype=dtype)
    return lambda number: rademacher(size, like, torch.Generator().manual_seed(number))


SPREAD = torch.cat([torch.linspace(-1, 1, 80), torch.tensor([-9.0, -4.0, 3.0, 5.0, 7.0])])


@pytest.mark.parametrize(
    ("which", "expected"),
    [("largest", [7.0, 5.0, 3.0]), ("smallest", [-9.0, -4.0, -1.0]), ("magnitude", [-9.0, 7.0, 5.0])],
)
@pytest.mark.parametrize("max_size", [100, 16])
def test_eigenpairs_equal_those_of_the_explicit_matrix(which: str, expected: list[float], max_size: int) -> None:
    a = matrix(SPREAD)
    values, vectors = eigenpairs(
        lambda v: a @ v, start_vectors(85), count=3, which=which, max_products=400, max_size=max_size, tolerance=1e-10
    )
    assert values.tolist() == pytest.approx(expected, abs=1e-8)
    assert torch.allclose(vectors @ vectors.T, torch.eye(3, dtype=torch.float64), atol=1e-10)
    assert torch.allclose(a @ vectors.T, vectors.T * values, atol=1e-8)


def test_lanczos_stops_at_the_tolerance_or_after_max_products() -> None:
    a, calls = matrix(SPREAD), [0]

    def product(v: Tensor) -> Tensor:
        calls[0] += 1
        return a @ v

    counts = []
    for tolerance in (1e-2, 1e-6, 0.0):
        calls[0] = 0
        value = float(eigenpairs(product, start_vectors(85), max_products=60, max_size=60, tolerance=tolerance)[0])
        counts.append(calls[0])
        assert abs(value - 7) <= max(9 * tolerance, 1e-8)
    assert 2 < counts[0] < counts[1] < counts[2] == 60


def test_an_eigenvalue_near_many_others_does_not_converge_too_early() -> None:
    a = matrix(torch.cat([torch.tensor([100.0, 90.0]), torch.linspace(-0.2, 0.05, 300)]))
    assert float(eigenpairs(lambda v: a @ v, start_vectors(302), which="smallest")[0]) == pytest.approx(-0.2, rel=1e-2)


def test_repeated_eigenvalues_are_all_found() -> None:
    a = matrix(torch.tensor([5.0, 5.0, 5.0, 2.0, 2.0, 1.0]))
    assert eigenpairs(lambda v: a @ v, start_vectors(6), count=3)[0].tolist() == pytest.approx([5, 5, 5], abs=1e-10)
    values, vectors = eigenpairs(lambda v: 3 * v, start_vectors(30), count=2, max_size=4, max_products=40)
    assert values.tolist() == pytest.approx([3, 3])
    assert abs(float(vectors[0] @ vectors[1])) < 1e-12


def test_every_eigenvalue_of_a_small_matrix_is_found() -> None:
    expected = torch.tensor([4.0, 1.0, -0.5, -2.0])
    a = matrix(expected)
    assert torch.allclose(eigenpairs(lambda v: a @ v, start_vectors(4), count=4)[0], expected.double(), atol=1e-10)
    assert float(eigenpairs(lambda v: 0 * v, start_vectors(4))[0]) == 0


def test_a_full_invariant_space_continues_from_its_best_vectors() -> None:
    """With seven distinct eigenvalues the space is invariant twice and then full; a third copy is still found."""
    a = matrix(torch.arange(1.0, 8.0).repeat(5))
    values, vectors = eigenpairs(lambda v: a @ v, start_vectors(35), count=3, max_size=14, max_products=60)
    assert values.tolist() == pytest.approx([7.0] * 3, abs=1e-9)
    assert torch.allclose(vectors @ vectors.T, torch.eye(3, dtype=torch.float64), atol=1e-9)


def test_eigenvalues_of_a_float32_matrix_have_float32_precision() -> None:
    a = matrix(SPREAD).float()
    values, _ = eigenpairs(
        lambda v: a @ v, start_vectors(85, torch.float32), count=3, max_size=16, max_products=200, tolerance=1e-5
    )
    assert values.tolist() == pytest.approx([7, 5, 3], abs=1e-4)


def test_vectors_stay_orthogonal_with_one_dominant_eigenvalue() -> None:
    a = matrix(torch.cat([torch.linspace(0, 1, 60), torch.tensor([1e9])]))
    krylov = KrylovSpace(lambda v: a @ v, start_vectors(61)(0), max_size=40)
    while not krylov.is_full:
        krylov.expand()
    assert torch.allclose(krylov.basis @ krylov.basis.T, torch.eye(40, dtype=torch.float64), atol=1e-13)


def test_a_nan_product_raises_diverged_error() -> None:
    with pytest.raises(DivergedError, match="NaN or infinite"):
        eigenpairs(lambda v: v * float("nan"), start_vectors(5))


def test_quadrature_is_exact_for_the_moments_of_the_start_vector() -> None:
    a, v = matrix(SPREAD), start_vectors(85)(0)
    nodes, weights = quadrature(lambda x: a @ x, v, steps=4)
    unit, power = v / v.norm(), torch.eye(85, dtype=torch.float64)
    for degree in range(8):  # 2 m - 1 = 7
        assert float(weights @ nodes**degree) == pytest.approx(float(unit @ power @ unit), rel=1e-9)
        power = power @ a
    assert len(quadrature(lambda x: 2 * x, v, steps=4)[0]) == 1


def test_the_density_integrates_to_one_and_preserves_the_mean() -> None:
    nodes = [torch.tensor([-1.0, 0.0, 4.0], dtype=torch.float64), torch.tensor([0.5, 3.0], dtype=torch.float64)]
    weights = [torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor([0.9, 0.1], dtype=torch.float64)]
    grid, heights = density(nodes, weights, points=50)
    step = float(grid[1] - grid[0])
    assert (heights.sum(1) * step).tolist() == pytest.approx([1, 1], abs=1e-7)
    assert (heights @ grid * step).tolist() == pytest.approx([1.0, 0.75], abs=1e-6)
    alone, height = density(nodes[:1] and [torch.ones(1).double()], [torch.ones(1).double()], points=50)
    assert float(height.sum() * (alone[1] - alone[0])) == pytest.approx(1, abs=1e-7)


def test_the_projection_on_a_basis_is_removed() -> None:
    a, b = torch.randn(2, 6, dtype=torch.float64)
    rows = torch.linalg.qr(torch.stack([a, b]).T).Q.T
    assert float(orthogonalize(a + 3 * b, rows).norm()) < 1e-12


def test_rademacher_vectors_and_the_standard_error_of_draws() -> None:
    v = start_vectors(1000)(3)
    assert set(v.tolist()) == {-1.0, 1.0}
    assert abs(float(v.mean())) < 0.15
    assert mc_standard_error(torch.tensor([1.0, 3.0])) == pytest.approx(1.0)
    assert mc_standard_error(torch.ones(1)) is None
