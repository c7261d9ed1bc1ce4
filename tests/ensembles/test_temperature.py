"""Temperatures compared with scipy's minimizer and known values; separable labels, bounds, and both orders."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import cross_entropy

from plateaux.core.errors import DataError, RecipeError
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.ensembles.temperature import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Temperatures,
    apply,
    calibrate_then_pool,
    fit,
    pool_then_calibrate,
)


def drawn(
    samples: int, classes: int, *, sharpness: float = 1.0, members: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits `[M, N, C]` and labels drawn from the members' mean logit, each logit then `sharpness` times too large."""
    chance = torch.Generator().manual_seed(seed)
    common = 2 * torch.randn(samples, classes, generator=chance, dtype=torch.float64)
    y = torch.multinomial(common.softmax(1), 1, generator=chance)[:, 0]
    noise = torch.randn(members, samples, classes, generator=chance, dtype=torch.float64)
    return sharpness * (common + noise * (members > 1)), y


def nll(log_p: Tensor, y: Tensor) -> float:
    return float(cross_entropy(log_p.double(), y))


def by_scipy(logits: Tensor, y: Tensor) -> float:
    """The slow reference."""
    found = minimize_scalar(
        lambda u: nll(logits.double() / math.exp(u), y),
        bounds=(math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return math.exp(found.x)


@pytest.mark.parametrize("sharpness", [0.05, 0.5, 1.0, 3.0, 40.0])
@pytest.mark.parametrize(("samples", "classes"), [(50, 2), (400, 10), (200, 100)])
def test_the_temperature_equals_scipys_minimizer(samples: int, classes: int, sharpness: float) -> None:
    logits, y = drawn(samples, classes, sharpness=sharpness)
    assert fit(logits[0], y) == pytest.approx(by_scipy(logits[0], y), rel=1e-6)


def test_logits_k_times_too_large_have_the_temperature_k() -> None:
    for k in (0.3, 1.0, 2.5):
        logits, y = drawn(40_000, 5, sharpness=k)
        assert fit(logits[0], y) == pytest.approx(k, rel=0.03)


def test_at_the_optimal_temperature_the_mean_logit_equals_the_mean_label_logit() -> None:
    # The derivative by 1/T: zero where the logit expected under the model is the labels' own, on average.
    logits, y = drawn(300, 7, sharpness=2.0)
    logits, t = logits[0], fit(logits[0], y)
    expected = ((logits / t).softmax(1) * logits).sum(1)
    assert float((expected - logits[torch.arange(300), y]).mean()) == pytest.approx(0, abs=1e-11)


@given(
    samples=st.integers(1, 30),
    classes=st.integers(1, 5),
    seed=st.integers(0, 999),
    scale=st.sampled_from([1e-6, 0.1, 1.0, 30.0, 1e5]),
)
@settings(max_examples=80)
@pytest.mark.filterwarnings("ignore:The temperature is at its")
def test_the_fitted_temperature_is_optimal(samples: int, classes: int, seed: int, scale: float) -> None:
    chance = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(samples, classes, generator=chance, dtype=torch.float64)
    y = torch.randint(classes, (samples,), generator=chance)
    t = fit(logits, y)
    assert MIN_TEMPERATURE <= t <= MAX_TEMPERATURE
    best = nll(logits / t, y)
    for other in (MIN_TEMPERATURE, 0.1, 0.9 * t, 1.0, 1.1 * t, 10.0, MAX_TEMPERATURE):
        other = min(max(other, MIN_TEMPERATURE), MAX_TEMPERATURE)
        assert best <= nll(logits / other, y) * (1 + 1e-9) + 1e-12


def test_if_all_predictions_are_correct_the_temperature_is_the_lower_bound() -> None:
    logits = torch.randn(50, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"at its lower bound 0\.01"):
        assert fit(logits, logits.argmax(1)) == MIN_TEMPERATURE
    with pytest.warns(UserWarning, match="lower"):  # where probabilities are exactly 0 and 1
        assert fit(1e4 * logits, logits.argmax(1)) == MIN_TEMPERATURE
    with pytest.warns(UserWarning, match="lower"):
        assert fit(torch.tensor([[3.0, 0.0]]), torch.tensor([0])) == MIN_TEMPERATURE


def test_if_all_predictions_are_incorrect_the_temperature_is_the_upper_bound() -> None:
    logits = torch.randn(50, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="at its upper bound 100"):
        assert fit(logits, logits.argmin(1)) == MAX_TEMPERATURE
    with pytest.warns(UserWarning, match="upper"):
        assert fit(torch.tensor([[3.0, 0.0]]), torch.tensor([1])) == MAX_TEMPERATURE


@pytest.mark.parametrize("logits", [torch.randn(6, 1), torch.full((6, 10), 0.1), torch.full((6, 3), -7e4)])
def test_the_temperature_is_one_if_it_has_no_effect(logits: Tensor) -> None:
    assert fit(logits, torch.zeros(6, dtype=torch.int64)) == 1.0


def test_shifting_logits_changes_nothing_and_scaling_them_scales_the_temperature() -> None:
    logits, y = drawn(200, 6)
    logits = logits[0]
    t = fit(logits, y)
    assert fit(logits + 50 * torch.randn(200, 1, dtype=torch.float64), y) == pytest.approx(t, rel=1e-9)
    assert fit(7 * logits, y) == pytest.approx(7 * t, rel=1e-9)
    assert fit(logits.log_softmax(1), y) == pytest.approx(t, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_logits_are_fitted_in_float64(dtype: torch.dtype) -> None:
    logits, y = drawn(200, 6)
    logits = logits[0].to(dtype)
    assert fit(logits, y) == fit(logits.double(), y)


def test_classes_with_a_logit_of_minus_infinity_change_nothing() -> None:
    logits, y = drawn(100, 4)
    wider = torch.cat([logits[0], torch.full((100, 2), -math.inf, dtype=torch.float64)], 1)
    assert fit(wider, y) == pytest.approx(fit(logits[0], y), rel=1e-12)


@pytest.mark.parametrize(
    ("logits", "y", "words"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), "at least one held-out sample"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), r"shape \[3\]"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), r"labels \[3\]"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), "from 0 to 2"),
        (torch.zeros(2, 3), torch.tensor([0, -1]), "from 0 to 2"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), "must be integers"),
        (torch.tensor([[0.0, math.nan]]), torch.tensor([0]), "NaN"),
        (torch.tensor([[0.0, math.inf]]), torch.tensor([0]), "infinite"),
        (torch.tensor([[-math.inf, 0.0]]), torch.tensor([0]), "probability 0"),
    ],
)
def test_invalid_calibration_inputs_are_rejected(logits: Tensor, y: Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        fit(logits, y)


def test_pool_then_calibrate_fits_the_temperature_of_the_mean_probability() -> None:
    logits, y = drawn(500, 5, sharpness=2.0, members=4)
    pooled = log_probabilities(logits)[-2]
    found = pool_then_calibrate(logits, y)
    assert (found.order, found.members, found.remarks) == ("pool then calibrate", 4, ())
    assert found.values == (pytest.approx(fit(pooled, y), rel=1e-9),)
    out = apply(logits, found)
    assert torch.allclose(out, (pooled / found.values[0]).log_softmax(1))
    assert torch.equal(out.argmax(1), pooled.argmax(1))
    assert nll(out, y) < nll(pooled, y)


def test_calibrate_then_pool_calibrates_each_member() -> None:
    logits, y = drawn(500, 5, members=3)
    logits = logits * torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)[:, None, None]
    found = calibrate_then_pool(logits, y)
    assert found.values == pytest.approx([fit(row, y) for row in logits], rel=1e-9)
    mean = np.mean([(row / t).softmax(1).numpy() for row, t in zip(logits, found.values, strict=True)], 0)
    assert apply(logits, found).exp().numpy() == pytest.approx(mean, rel=1e-9)
    order = [2, 0, 1]
    assert calibrate_then_pool(logits[order], y).values == tuple(found.values[i] for i in order)


def test_an_ensemble_of_calibrated_members_is_underconfident() -> None:
    logits, y = drawn(2000, 5, sharpness=2.0, members=8)
    calibrated_first = apply(logits, calibrate_then_pool(logits, y))
    assert fit(calibrated_first, y) < 0.95
    pooled_first = apply(logits, pool_then_calibrate(logits, y))
    assert fit(pooled_first, y) == pytest.approx(1.0, abs=1e-9)
    assert nll(pooled_first, y) < nll(calibrated_first, y)


def test_for_one_member_both_orders_are_one() -> None:
    logits, y = drawn(100, 3, sharpness=2.0)
    pool, each = pool_then_calibrate(logits, y), calibrate_then_pool(logits, y)
    assert pool.values == pytest.approx(each.values, rel=1e-12)
    assert torch.allclose(apply(logits, pool), apply(logits, each))


@pytest.mark.parametrize("order", ["pool then calibrate", "calibrate then pool"])
def test_a_temperature_of_one_is_the_mean_probability(order: str) -> None:
    logits, _ = drawn(20, 4, members=3)
    ones = Temperatures(order, 3, (1.0,) * (1 if order.startswith("pool") else 3))  # type: ignore[arg-type]
    out = apply(logits, ones)
    assert torch.allclose(out, log_probabilities(logits)[-2])
    assert out.logsumexp(1).abs().max() < 1e-12
    assert apply(logits.half(), ones).dtype == torch.float64


def test_temperatures_at_a_bound_are_reported() -> None:
    logits = torch.randn(2, 30, 4, dtype=torch.float64)
    y = logits[1].argmax(1)
    assert calibrate_then_pool(logits, y).remarks == (
        "The temperature of member 1 is at its lower bound 0.01: every held-out prediction is correct. Use more "
        "samples.",
    )
    assert "temperature of the ensemble is at its lower bound" in pool_then_calibrate(logits[1:], y).remarks[0]


def test_temperatures_round_trip_through_json() -> None:
    logits, y = drawn(60, 3, members=2)
    for found in (pool_then_calibrate(logits, y), calibrate_then_pool(logits, y)):
        assert Temperatures.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found
    with pytest.raises(RecipeError, match="pool then calibrate"):
        Temperatures.from_dict({**found.to_dict(), "order": "backwards"})


def test_temperatures_of_another_number_of_members_are_rejected() -> None:
    logits, y = drawn(60, 3, members=3)
    for found in (pool_then_calibrate(logits, y), calibrate_then_pool(logits, y)):
        with pytest.raises(RecipeError, match="3 members, but the logits have 2"):
            apply(logits[:2], found)
    with pytest.raises(DataError, match="members, samples, classes"):
        pool_then_calibrate(logits[0], y)
