"""phi against exact fractions, and against the sum that the paper prints."""

from __future__ import annotations

from fractions import Fraction
from math import factorial

import numpy as np
import pytest
from reference import wishart

from plateaux_papers.theory import exact_phi, phi, trace_variance
from plateaux_papers.theory.phi import first_correction, nodes

SETTINGS = [  # r, eta, rho, k: stable and not, tall data and wide
    (2.0, 0.1, 0.4, 6),
    (20.0, 0.05, 0.01, 8),
    (20.0, 0.01, 0.5, 4),
    (2.0, 0.1, 0.1, 12),
    (1.0, 0.2, 0.1, 5),
    (0.5, 0.3, 0.2, 6),
    (1.0001, 0.2, 0.1, 3),
]


@pytest.mark.parametrize(("r", "eta", "rho", "k"), SETTINGS)
def test_quadrature_equals_exact_fractions(r: float, eta: float, rho: float, k: int) -> None:
    for i, j in ((0, 0), (1, 0), (k, 0), (k, 1), (k, 2), (2 * k, 0), (2 * k, 2), (4 * k, 4)):
        exact = float(wishart.leading_phi(i, j, r=r, eta=eta, rho=rho))
        assert phi(i, j, r=r, eta=eta, rho=rho) == pytest.approx(exact, rel=1e-12)


def test_quadrature_equals_the_sum_that_the_paper_prints() -> None:
    i, j, r, eta, rho = 4, 1, Fraction(3), Fraction(1, 10), Fraction(1, 5)
    total = Fraction(0)
    for first in range(i + 1):
        for second in range(i + 1 - first):
            third = i - first - second
            ways = factorial(i) // (factorial(first) * factorial(second) * factorial(third))
            moment = wishart.narayana(second + 2 * third + j, r)
            total += ways * (-eta) ** (second + third) * rho**third * moment
    assert phi(i, j, r=3.0, eta=0.1, rho=0.2) == pytest.approx(float(total), rel=1e-12)


def test_the_sum_that_the_paper_prints_loses_all_digits_where_quadrature_does_not() -> None:
    r, eta, rho, i = 2.0, 0.1, 0.4, 48
    exact = float(wishart.leading_phi(i, 4, r=r, eta=eta, rho=rho))
    terms = wishart.coefficients(i, 4, Fraction(eta), Fraction(rho))
    naive = sum(float(value) * float(wishart.narayana(m, Fraction(r))) for m, value in enumerate(terms))
    assert abs(naive / exact - 1) > 1
    assert phi(i, 4, r=r, eta=eta, rho=rho) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("r", [0.3, 1.0, 7.0])
def test_all_weights_are_positive_and_sum_to_one(r: float) -> None:
    _, weights, at_zero = nodes(r, 9)
    assert at_zero > 0
    assert (weights > 0).all()
    assert weights.sum() + at_zero == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("r", [0.5, 2.0, 20.0])
def test_the_first_correction_is_the_coefficient_of_one_over_d(r: float) -> None:
    known = {0: 0.0, 1: 0.0, 2: r, 3: 3 * r**2 + 3 * r, 4: 6 * r**3 + 17 * r**2 + 6 * r}
    found = {m: first_correction(0, m, r=r, eta=0.1, rho=0.0) for m in known}
    assert found == pytest.approx(known, rel=1e-12, abs=1e-12)


def test_fractions_have_the_known_moments() -> None:
    n, d = 6, 4
    r = Fraction(n, d)
    assert wishart.traces((1,), n, d) / d == r
    assert wishart.traces((2,), n, d) / d == r**2 + r + r / d
    assert wishart.traces((3,), n, d) / d == r**3 + 3 * r**2 + r + (3 * r**2 + 3 * r) / d + 4 * r / d**2
    fourth = r**4 + 6 * r**3 + 6 * r**2 + r + (6 * r**3 + 17 * r**2 + 6 * r) / d + (21 * r**2 + 21 * r) / d**2
    assert wishart.traces((4,), n, d) / d == fourth + 20 * r / d**3
    assert wishart.traces((1, 1), n, d) == n**2 + 2 * r  # E[chi^2 squared] / d^2 with nd degrees of freedom


def test_corrections_converge_to_the_exact_integral() -> None:
    n, d, eta, rho = 300, 150, 0.1, 0.4
    truth = float(wishart.exact_phi(10, 2, n=n, d=d, eta=eta, rho=rho))
    off = [
        phi(10, 2, r=n / d, eta=eta, rho=rho) / truth - 1,
        phi(10, 2, r=n / d, eta=eta, rho=rho, d=d) / truth - 1,
        exact_phi(10, 2, n=n, d=d, eta=eta, rho=rho) / truth - 1,
    ]
    assert off[0] == pytest.approx(-0.192, abs=5e-4)
    assert off[1] == pytest.approx(-0.053, abs=5e-4)
    assert abs(off[2]) < 1e-11


@pytest.mark.parametrize(
    ("n", "d"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 3), (7, 4), (4, 7), (5, 12), (31, 11), (20, 20)]
)
def test_the_exact_integral_has_the_exact_moments(n: int, d: int) -> None:
    for m in range(8):
        truth = float(wishart.traces((m,), n, d) / d)
        assert exact_phi(0, m, n=n, d=d, eta=0.1, rho=0.0) == pytest.approx(truth, rel=1e-12)


def test_the_exact_integral_is_right_at_the_papers_size() -> None:
    for i, j, eta, rho in ((6, 2, 0.01, 0.5), (6, 0, 0.01, 0.1), (3, 1, 0.05, 0.3)):
        truth = float(wishart.exact_phi(i, j, n=3000, d=150, eta=eta, rho=rho))
        assert exact_phi(i, j, n=3000, d=150, eta=eta, rho=rho) == pytest.approx(truth, rel=1e-11)


def test_large_matrices_do_not_underflow() -> None:
    large = exact_phi(6, 2, n=12_000, d=600, eta=0.01, rho=0.1)
    assert large == pytest.approx(phi(6, 2, r=20.0, eta=0.01, rho=0.1, d=600), rel=1e-4)


@pytest.mark.parametrize("n", [3, 8, 40])
def test_the_variance_of_a_trace_is_that_of_the_moments(n: int) -> None:
    d = 8
    assert trace_variance(0, 1, r=n / d, eta=0.1, rho=0.0) == pytest.approx(2 * n / d, rel=1e-12)
    exact = {
        size: wishart.traces((2, 2), n * size // d, size) - wishart.traces((2,), n * size // d, size) ** 2
        for size in (200, 400)
    }
    limit = 2 * float(exact[400]) - float(exact[200])  # what is left is of order 1/d^2
    assert trace_variance(0, 2, r=n / d, eta=0.1, rho=0.0) == pytest.approx(limit, rel=1e-3)


def test_phi_without_powers_is_one() -> None:
    assert phi(0, 0, r=3.0, eta=0.1, rho=0.2) == pytest.approx(1)
    assert exact_phi(0, 0, n=2, d=5, eta=0.1, rho=0.2) == pytest.approx(1)


def test_phi_equals_the_mean_over_random_matrices() -> None:
    random, n, d, eta, rho = np.random.default_rng(1), 24, 8, 0.2, 0.3
    data = random.standard_normal((4000, n, d)) / np.sqrt(d)
    values = np.linalg.eigvalsh(data.transpose(0, 2, 1) @ data)
    traces = ((1 - eta * values - eta * rho * values**2) ** 4 * values**2).mean(1)
    error = traces.std() / np.sqrt(len(traces))
    assert abs(exact_phi(4, 2, n=n, d=d, eta=eta, rho=rho) - traces.mean()) < 4 * error
    assert abs(phi(4, 2, r=n / d, eta=eta, rho=rho) - traces.mean()) > 4 * error
