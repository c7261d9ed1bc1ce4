"""Everything here is asked of matrices that are known whole."""

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
    orthonormalize,
    quadrature,
    rademacher,
)


def matrix(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return turn @ values.double().diag() @ turn.T


def starts(size: int, dtype: torch.dtype = torch.float64) -> Callable[[int], Tensor]:
    like = torch.zeros(1, dtype=dtype)
    return lambda number: rademacher(size, like, torch.Generator().manual_seed(number))


SPREAD = torch.cat([torch.linspace(-1, 1, 80), torch.tensor([-9.0, -4.0, 3.0, 5.0, 7.0])])


@pytest.mark.parametrize(
    ("end", "wanted"), [("largest", [7.0, 5.0, 3.0]), ("smallest", [-9.0, -4.0, -1.0]), ("magnitude", [-9.0, 7.0, 5.0])]
)
@pytest.mark.parametrize("space", [100, 16])
def test_eigenpairs_are_those_of_the_matrix_at_either_end(end: str, wanted: list[float], space: int) -> None:
    a = matrix(SPREAD)
    values, vectors = eigenpairs(
        lambda v: a @ v, starts(85), count=3, which=end, max_products=400, max_size=space, tolerance=1e-10
    )
    assert values.tolist() == pytest.approx(wanted, abs=1e-8)
    assert torch.allclose(vectors @ vectors.T, torch.eye(3, dtype=torch.float64), atol=1e-10)
    assert torch.allclose(a @ vectors.T, vectors.T * values, atol=1e-8)


def test_it_stops_when_the_residuals_are_small_and_after_so_many_steps_at_most() -> None:
    a, asked = matrix(SPREAD), [0]

    def product(v: Tensor) -> Tensor:
        asked[0] += 1
        return a @ v

    counts = []
    for tolerance in (1e-2, 1e-6, 0.0):
        asked[0] = 0
        value = float(eigenpairs(product, starts(85), max_products=60, max_size=60, tolerance=tolerance)[0])
        counts.append(asked[0])
        assert abs(value - 7) <= max(9 * tolerance, 1e-8)
    assert 2 < counts[0] < counts[1] < counts[2] == 60


def test_an_end_among_many_eigenvalues_near_zero_is_not_taken_for_found_too_early() -> None:
    a = matrix(torch.cat([torch.tensor([100.0, 90.0]), torch.linspace(-0.2, 0.05, 300)]))
    assert float(eigenpairs(lambda v: a @ v, starts(302), which="smallest")[0]) == pytest.approx(-0.2, rel=1e-2)


def test_equal_eigenvalues_are_each_found() -> None:
    a = matrix(torch.tensor([5.0, 5.0, 5.0, 2.0, 2.0, 1.0]))
    assert eigenpairs(lambda v: a @ v, starts(6), count=3)[0].tolist() == pytest.approx([5, 5, 5], abs=1e-10)
    values, vectors = eigenpairs(lambda v: 3 * v, starts(30), count=2, max_size=4, max_products=40)
    assert values.tolist() == pytest.approx([3, 3])
    assert abs(float(vectors[0] @ vectors[1])) < 1e-12


def test_every_eigenvalue_of_a_small_matrix_is_found() -> None:
    wanted = torch.tensor([4.0, 1.0, -0.5, -2.0])
    a = matrix(wanted)
    assert torch.allclose(eigenpairs(lambda v: a @ v, starts(4), count=4)[0], wanted.double(), atol=1e-10)
    assert float(eigenpairs(lambda v: 0 * v, starts(4))[0]) == 0


def test_a_closed_and_full_space_goes_on_from_its_best_vectors() -> None:
    """Seven eigenvalues close the space twice, when it is full with fourteen vectors; a third copy is still found."""
    a = matrix(torch.arange(1.0, 8.0).repeat(5))
    values, vectors = eigenpairs(lambda v: a @ v, starts(35), count=3, max_size=14, max_products=60)
    assert values.tolist() == pytest.approx([7.0] * 3, abs=1e-9)
    assert torch.allclose(vectors @ vectors.T, torch.eye(3, dtype=torch.float64), atol=1e-9)


def test_a_matrix_of_single_precision_has_eigenvalues_to_its_precision() -> None:
    a = matrix(SPREAD).float()
    values, _ = eigenpairs(
        lambda v: a @ v, starts(85, torch.float32), count=3, max_size=16, max_products=200, tolerance=1e-5
    )
    assert values.tolist() == pytest.approx([7, 5, 3], abs=1e-4)


def test_vectors_stay_orthogonal_where_one_eigenvalue_outweighs_all_others() -> None:
    a = matrix(torch.cat([torch.linspace(0, 1, 60), torch.tensor([1e9])]))
    krylov = KrylovSpace(lambda v: a @ v, starts(61)(0), max_size=40)
    while not krylov.is_full:
        krylov.expand()
    assert torch.allclose(krylov.basis @ krylov.basis.T, torch.eye(40, dtype=torch.float64), atol=1e-13)


def test_a_product_that_is_not_finite_is_told() -> None:
    with pytest.raises(DivergedError, match="NaN or infinite"):
        eigenpairs(lambda v: v * float("nan"), starts(5))


def test_quadrature_knows_the_moments_that_the_vector_sees() -> None:
    a, v = matrix(SPREAD), starts(85)(0)
    nodes, weights = quadrature(lambda x: a @ x, v, steps=4)
    unit, power = v / v.norm(), torch.eye(85, dtype=torch.float64)
    for degree in range(8):  # 2 m - 1 = 7
        assert float(weights @ nodes**degree) == pytest.approx(float(unit @ power @ unit), rel=1e-9)
        power = power @ a
    assert len(quadrature(lambda x: 2 * x, v, steps=4)[0]) == 1


def test_the_density_integrates_to_one_and_keeps_the_mean() -> None:
    nodes = [torch.tensor([-1.0, 0.0, 4.0], dtype=torch.float64), torch.tensor([0.5, 3.0], dtype=torch.float64)]
    weights = [torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor([0.9, 0.1], dtype=torch.float64)]
    grid, heights = density(nodes, weights, points=50)
    step = float(grid[1] - grid[0])
    assert (heights.sum(1) * step).tolist() == pytest.approx([1, 1], abs=1e-7)
    assert (heights @ grid * step).tolist() == pytest.approx([1.0, 0.75], abs=1e-6)
    alone, height = density(nodes[:1] and [torch.ones(1).double()], [torch.ones(1).double()], points=50)
    assert float(height.sum() * (alone[1] - alone[0])) == pytest.approx(1, abs=1e-7)


def test_a_basis_leaves_out_what_adds_nothing() -> None:
    a, b = torch.randn(2, 6, dtype=torch.float64)
    rows = torch.stack(orthonormalize([a, 2 * a, b, a - b, torch.zeros(6, dtype=torch.float64)]))
    assert torch.allclose(rows @ rows.T, torch.eye(2, dtype=torch.float64))
    assert float(orthogonalize(a + 3 * b, rows).norm()) < 1e-12


def test_draws_are_signs_and_their_error_is_that_of_a_mean() -> None:
    v = starts(1000)(3)
    assert set(v.tolist()) == {-1.0, 1.0}
    assert abs(float(v.mean())) < 0.15
    assert mc_standard_error(torch.tensor([1.0, 3.0])) == pytest.approx(1.0)
    assert mc_standard_error(torch.ones(1)) is None
