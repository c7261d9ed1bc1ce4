"""Intervals have nominal coverage and agree with other libraries and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from plateaux.core.stats.estimates import proportion
from plateaux.core.stats.intervals import (
    CostPoint,
    at_cost,
    at_equal_cost,
    interval_from_stderr,
    paired_t_interval,
    slope,
    t_interval,
    t_quantile,
)
from plateaux.core.types import Estimate

SIMULATIONS = 4000


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 9, 29, 30, 199, 1000])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.6, 0.9, 0.975, 0.995, 0.9999])
def test_the_t_quantile_equals_scipy(share: float, freedom: int) -> None:
    assert t_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("share", "freedom"), [(0.0, 3), (1.0, 3), (0.9, 0)])
def test_an_invalid_quantile_is_refused(share: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="1 or more degrees of freedom"):
        t_quantile(share, freedom)


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_the_interval_over_repetitions_has_nominal_coverage(count: int) -> None:
    rng = np.random.default_rng(count)
    found = [t_interval(row) for row in rng.normal(0.7, 0.02, (SIMULATIONS, count))]
    assert 0.93 <= np.mean([each.low <= 0.7 <= each.high for each in found]) <= 0.97


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_the_interval_of_paired_differences_has_nominal_coverage(count: int) -> None:
    rng = np.random.default_rng(100 + count)
    shared = rng.normal(0.0, 1.0, (SIMULATIONS, count))  # a good seed is good for both
    mine, theirs = (shared + rng.normal(mean, 0.1, shared.shape) for mean in (0.3, 0.1))
    found = [paired_t_interval(a, b) for a, b in zip(mine, theirs, strict=True)]
    assert 0.93 <= np.mean([each.low <= 0.2 <= each.high for each in found]) <= 0.97
    alone = [t_interval(row).half for row in mine]
    assert np.median([each.half for each in found]) < np.median(alone) / 4


def test_an_interval_over_repetitions_equals_scipy() -> None:
    numbers = [0.71, 0.74, 0.69, 0.72]
    truth = stats.t.interval(0.9, 3, np.mean(numbers), stats.sem(numbers))
    found = t_interval(numbers, level=0.9)
    assert (found.low, found.high) == pytest.approx(truth)
    assert (found.count, found.over) == (4, "repetitions")


def test_simultaneous_intervals_are_those_of_bonferroni() -> None:
    numbers = [0.71, 0.74, 0.69, 0.72]
    truth = stats.t.interval(1 - 0.1 / 5, 3, np.mean(numbers), stats.sem(numbers))
    found = t_interval(numbers, level=0.9, simultaneous=5)
    assert (found.low, found.high) == pytest.approx(truth)
    mean = Estimate(float(np.mean(numbers)), float(stats.sem(numbers)))
    assert interval_from_stderr(mean, 4, level=0.9, simultaneous=5).low == pytest.approx(truth[0])


@pytest.mark.parametrize("hits", [0, 3, 9, 10])
def test_the_standard_error_of_a_proportion_is_binomial(hits: int) -> None:
    found = proportion(hits, 10)
    assert found.value == hits / 10
    assert found.stderr == pytest.approx(stats.binom(10, hits / 10).std() / 10)


def test_one_repetition_has_no_interval() -> None:
    found = t_interval([0.5])
    assert found.value == 0.5
    assert math.isnan(found.low)
    assert math.isnan(t_interval([]).value)


def test_nan_is_omitted() -> None:
    assert t_interval([1.0, float("nan"), 3.0]) == t_interval([1.0, 3.0])


def test_paired_numbers_need_equal_counts() -> None:
    with pytest.raises(ValueError, match="Cannot pair 2 numbers with 3"):
        paired_t_interval([1, 2], [1, 2, 3])


def test_the_slope_of_a_power_law_is_its_exponent() -> None:
    x = np.array([0.1, 0.5, 2.0, 7.0])
    found = slope(x, 3 * x**0.4)
    assert (found.value, found.low, found.high) == pytest.approx((0.4, 0.4, 0.4))


def test_the_slope_and_its_interval_equal_scipy() -> None:
    rng = np.random.default_rng(4)
    x, noise = rng.uniform(1, 9, 12), rng.normal(0, 0.2, 12)
    truth = stats.linregress(np.log(x), np.log(x**0.5 * np.exp(noise)))
    found = slope(x, x**0.5 * np.exp(noise))
    half = stats.t.ppf(0.975, 10) * truth.stderr
    expected = (truth.slope, truth.slope - half, truth.slope + half)
    assert (found.value, found.low, found.high) == pytest.approx(expected)


def test_points_without_a_logarithm_are_omitted() -> None:
    assert slope([0, 1, 2, 4], [9, 1, 2, 4]) == slope([1, 2, 4], [1, 2, 4])


def test_a_slope_of_too_few_points_has_no_interval() -> None:
    assert math.isnan(slope([1, 1, 1], [1, 2, 3]).value)
    assert math.isnan(slope([], []).value)
    two = slope([1, math.e], [1, math.e])
    assert two.value == pytest.approx(1)
    assert math.isnan(two.low)
    with pytest.raises(ValueError, match="Got 2 values of x and 3 of y"):
        slope([1, 2], [1, 2, 3])


def course(*points: tuple[float, float], passes: float = 1, seconds: float = 1) -> list[CostPoint]:
    return [CostPoint(number, epochs, passes * epochs, seconds * epochs) for epochs, number in points]


def test_a_cost_curve_is_interpolated_and_not_extrapolated() -> None:
    mine = course((10, 0.6), (20, 0.8), passes=2)
    assert at_cost(mine, 15, "epochs") == pytest.approx(0.7)
    assert at_cost(mine, 20, "passes") == pytest.approx(0.6)
    assert math.isnan(at_cost(mine, 5, "epochs"))
    assert math.isnan(at_cost(mine, 50, "passes"))


def test_a_method_better_at_equal_epochs_may_be_worse_at_equal_passes() -> None:
    flat = [course((10, 0.60 + e), (20, 0.70 + e), passes=2, seconds=1.8) for e in (0.0, 0.01)]
    plain = [course((10, 0.55 + e), (20, 0.66 + e), (40, 0.74 + e)) for e in (0.0, 0.012)]
    cost, found = at_equal_cost(flat, plain, "epochs")
    assert cost == 20
    assert found.value == pytest.approx(0.039)
    cost, found = at_equal_cost(flat, plain, "passes")
    assert cost == 40
    assert found.value == pytest.approx(-0.041)
    cost, found = at_equal_cost(flat, plain, "seconds")
    assert cost == pytest.approx(36)
    assert found.over == "paired repetitions"


def test_single_points_are_compared_only_at_equal_cost() -> None:
    flat, plain = [course((20, 0.7), passes=2)], [course((20, 0.66))]
    assert at_equal_cost(flat, plain, "epochs")[1].value == pytest.approx(0.04)
    assert math.isnan(at_equal_cost(flat, plain, "passes")[1].value)
    with pytest.raises(ValueError, match="for every repetition"):
        at_equal_cost(flat, [], "passes")
