"""SAM on a quadratic against its own steps, and the worst perturbation against brute force."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from plateaux.errors import RecipeError
from plateaux_papers.theory import (
    Setting,
    UnstableWarning,
    sam_weights,
    stability_limit,
    theorem1,
    theorem2,
    worst_case,
)
from plateaux_papers.theory.phi import Floats
from plateaux_papers.theory.quadratic import rise


def gram(d: int = 6, n: int = 20, seed: int = 0) -> Floats:
    data = np.random.default_rng(seed).standard_normal((n, d)) / np.sqrt(d)
    return data.T @ data


def test_sam_iterates_equal_the_closed_form() -> None:
    w, random, eta, rho = gram(), np.random.default_rng(1), 0.05, 0.2
    start, teacher = random.standard_normal((6, 3)), random.standard_normal(6)
    weights = start.copy()
    for _ in range(7):
        slope = w @ (weights - teacher[:, None])
        weights = weights - eta * w @ (weights + rho * slope - teacher[:, None])
    np.testing.assert_allclose(sam_weights(w, start, teacher, steps=7, eta=eta, rho=rho), weights, rtol=1e-11)
    one = sam_weights(w, start[:, 0], teacher, steps=7, eta=eta, rho=rho)
    np.testing.assert_allclose(one, weights[:, 0], rtol=1e-11)


def test_zero_steps_return_the_start() -> None:
    start = np.arange(6.0)
    np.testing.assert_allclose(sam_weights(gram(), start, np.ones(6), steps=0, eta=0.1, rho=0.1), start, atol=1e-13)


@pytest.mark.parametrize("radius", [0.01, 1.0, 30.0])
def test_the_worst_perturbation_equals_brute_force(radius: float) -> None:
    values = np.array([0.3, 2.0])
    around = np.linspace(0, 2 * np.pi, 200_001)
    circle = radius * np.stack([np.cos(around), np.sin(around)], 1)
    for slope in np.random.default_rng(2).standard_normal((5, 2)):
        found = worst_case(values, slope, radius)
        assert float(found.rise) == pytest.approx(rise(values, slope, circle).max(), rel=1e-8)
        assert np.linalg.norm(found.where) == pytest.approx(radius, rel=1e-12)


def test_the_worst_perturbation_is_exact_in_the_hard_case() -> None:
    values, slope, radius = np.array([0.5, 1.0, 3.0, 3.0]), np.array([0.4, -0.2, 0.0, 0.0]), 1.5
    points = np.random.default_rng(3).standard_normal((400_000, 4))
    points[:, :2] = slope[:2] / (3 - values[:2]) + 0.05 * points[:, :2]  # near the best, which mu = 3 gives
    points[:, 2:] *= np.sqrt(np.maximum(radius**2 - (points[:, :2] ** 2).sum(1), 0))[:, None] / np.linalg.norm(
        points[:, 2:], axis=1, keepdims=True
    )
    brute = rise(values, slope, points).max()
    found = worst_case(values, slope, radius)
    assert brute <= float(found.rise) == pytest.approx(brute, rel=1e-4)
    assert np.linalg.norm(found.where) == pytest.approx(radius, rel=1e-12)


def test_the_hard_case_is_continuous() -> None:
    values = np.array([1.0, 2.0, 4.0])
    slopes = np.array([[1.0, 0.5, 0.0], [1.0, 0.5, 1e-14], [1.0, 0.5, -1e-14]])
    found = worst_case(values, slopes, 1.0)
    np.testing.assert_allclose(found.rise, found.rise[0], rtol=1e-12)
    assert found.where[2, -1] < 0 < found.where[1, -1]


def test_a_small_radius_is_not_a_hard_case() -> None:
    found = worst_case(np.array([1.0, 2.0]), np.array([3.0, 0.0]), 1.0)  # |3 / (2 - 1)| > 1
    np.testing.assert_allclose(found.where, [1.0, 0.0], atol=1e-12)
    assert float(found.rise) == pytest.approx(3.5)


def test_a_batch_of_slopes_and_radii_equals_single_calls() -> None:
    values = np.sort(np.random.default_rng(4).random(5))
    slopes, radii = np.random.default_rng(5).standard_normal((4, 5)), np.array([0.1, 0.5, 1.0, 9.0])
    batched = worst_case(values, slopes, radii)
    for at in range(4):
        assert batched.rise[at] == pytest.approx(float(worst_case(values, slopes[at], radii[at]).rise), rel=1e-13)


def test_without_slope_only_the_top_eigenvalue_counts_and_without_radius_nothing() -> None:
    values = np.array([1.0, 3.0])
    assert float(worst_case(values, np.zeros(2), 2.0).rise) == pytest.approx(6.0)
    assert float(worst_case(values, np.ones(2), 0.0).rise) == pytest.approx(0, abs=1e-200)


def test_the_stability_limit_is_where_the_largest_eigenvalue_flips() -> None:
    assert stability_limit(eta=0.01, ratio=20.0) == pytest.approx(0.190, abs=5e-4)
    assert stability_limit(eta=0.1, ratio=20.0) < 0
    setting = Setting(rho=stability_limit(eta=0.01, ratio=20.0))
    top = (1 + np.sqrt(20)) ** 2
    assert 1 - setting.eta * top - setting.eta * setting.rho * top**2 == pytest.approx(-1)
    assert not setting.stable
    assert Setting(rho=0.189).stable


def test_a_divergent_setting_warns_and_a_stable_one_does_not() -> None:
    with pytest.warns(UnstableWarning, match=r"rho below 0\.19 is stable"):
        theorem1(Setting(rho=0.3))
    with pytest.warns(UnstableWarning, match=r"eta below 0\.0668 is stable"):
        theorem1(Setting(eta=0.1, rho=0.0))
    with pytest.warns(UnstableWarning, match="2 samples per weight"):
        theorem2(Setting(parts=10, eta=0.3, rho=0.3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theorem1(Setting(rho=0.1))
        theorem2(Setting(parts=10, rho=0.5))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"parts": 7}, "Choose a divisor"), ({"eta": 0.0}, "eta must be above 0"), ({"d": 0}, "at least 1")],
)
def test_an_invalid_setting_is_refused(wrong: dict[str, int], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Setting(**wrong)
