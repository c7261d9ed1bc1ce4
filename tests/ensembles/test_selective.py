"""Rejection thresholds compared with brute force, scipy's Clopper-Pearson bound, and risks in closed form."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.ensembles.selective import Bound, RejectionThreshold, upper_bound
from plateaux.ensembles.selective import fit as fit_with_default_bound

INF = math.inf
fit = partial(fit_with_default_bound, bound="none")
WITH_GUARANTEE: list[Bound] = ["clopper-pearson", "hoeffding"]


def drawn(samples: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sample scores d uniform on [0, 1], incorrect with probability 0.3 d^2: up to t, the risk is 0.1 t^2."""
    generator = torch.Generator().manual_seed(seed)
    error_prob = torch.rand(samples, generator=generator, dtype=torch.float64)
    return error_prob, torch.rand(samples, generator=generator, dtype=torch.float64) < 0.3 * error_prob**2


def brute(error_prob: list[float], incorrect: list[bool], risk: float) -> tuple[float | None, float]:
    """The slow reference: every error_prob is tried as a threshold."""
    best: tuple[float | None, float] = None, 0.0
    for at in sorted(set(error_prob)):
        taken = [w for d, w in zip(error_prob, incorrect, strict=True) if d <= at]
        if sum(taken) / len(taken) <= risk:
            best = at, len(taken) / len(error_prob)
    return best


def slow_stages(error_prob: Tensor, incorrect: Tensor, risk: float, delta: float, stages: int) -> float | None:
    """The slow reference of the fixed sequence, with scipy's bound."""
    order, passed = sorted(error_prob.tolist()), None
    for stage in range(1, stages + 1):
        at = order[math.ceil(stage * len(order) / stages) - 1]
        taken = incorrect[error_prob <= at]
        count, mistakes = len(taken), int(taken.sum())
        if beta.ppf(1 - delta, 1, count) > risk:
            continue
        if mistakes == count or beta.ppf(1 - delta, mistakes + 1, count - mistakes) > risk:
            break
        passed = at
    return passed


def test_the_threshold_of_a_hand_computed_example() -> None:
    error_prob = torch.tensor([0.5, 0.1, 0.4, 0.2, 0.3])
    incorrect = torch.tensor([True, False, False, True, False])
    # From the most certain: right, incorrect, right, right, incorrect; risks 0, 1/2, 1/3, 1/4, 2/5.
    found = fit(error_prob, incorrect, 0.25)
    assert found.at == pytest.approx(0.4)
    assert (found.coverage, found.observed, found.upper, found.samples) == (0.8, 0.25, None, 5)
    assert found.accepts(error_prob).tolist() == [False, True, True, True, True]
    assert fit(error_prob, incorrect, 0.24).coverage == 0.2
    assert fit(error_prob, incorrect, 0.4).coverage == 1.0
    assert fit(error_prob, incorrect, 0.4).at == pytest.approx(0.5)  # and not beyond the observed samples


def test_samples_with_equal_error_probability_are_accepted_or_rejected_together() -> None:
    error_prob, incorrect = torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0]), torch.tensor([0, 0, 0, 1, 0])
    # Two of the three would keep the risk at 0; all of them make it a quarter.
    assert fit(error_prob, incorrect, 0.2).coverage == 1.0
    assert fit(error_prob[:4], incorrect[:4], 0.2).coverage == 0.25
    assert fit(error_prob[:4], incorrect[:4], 0.25).coverage == 1.0
    same = fit(torch.ones(10), torch.tensor([1] + [0] * 9), 0.05)
    assert (same.at, same.coverage) == (None, 0.0)


@pytest.mark.slow
@given(
    rows=st.lists(st.tuples(st.sampled_from([-INF, 0.0, 0.5, 1.0, 3.0, INF]), st.booleans()), min_size=1, max_size=14),
    risk=st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0]),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=80)
def test_the_threshold_has_the_largest_coverage_at_the_target_risk(
    rows: list[tuple[float, bool]], risk: float, data: st.DataObject
) -> None:
    error_prob, incorrect = [d for d, _ in rows], [w for _, w in rows]
    found = fit(torch.tensor(error_prob), torch.tensor(incorrect), risk)
    assert (found.at, found.coverage) == brute(error_prob, incorrect, risk)
    order = data.draw(st.permutations(range(len(rows))))
    assert fit(torch.tensor(error_prob)[order], torch.tensor(incorrect)[order], risk) == found
    assert found.accepts(torch.tensor(error_prob)).double().mean() == pytest.approx(found.coverage)
    assert RejectionThreshold.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found


@pytest.mark.parametrize("delta", [0.001, 0.05, 0.3, 0.7])
@pytest.mark.parametrize(
    ("incorrect", "count"), [(0, 1), (1, 1), (0, 59), (3, 100), (100, 100), (57, 5000), (4999, 5000)]
)
def test_the_upper_bound_equals_clopper_pearson(incorrect: int, count: int, delta: float) -> None:
    truth = 1.0 if incorrect == count else float(beta.ppf(1 - delta, incorrect + 1, count - incorrect))
    assert upper_bound(incorrect, count, delta) == pytest.approx(truth, rel=1e-9)


def test_the_upper_bounds_equal_their_closed_forms() -> None:
    assert upper_bound(0, 59, 0.05) == pytest.approx(1 - 0.05 ** (1 / 59), rel=1e-12)
    assert upper_bound(3, 200, 0.1, "hoeffding") == pytest.approx(0.015 + math.sqrt(math.log(10) / 400))
    assert upper_bound(1, 1, 0.1, "hoeffding") == 1.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stages", [1, 7, 50, 5000])
def test_with_a_bound_stages_are_tested_in_sequence_until_one_fails(seed: int, stages: int) -> None:
    error_prob, incorrect = drawn(600, seed=seed)
    error_prob = (error_prob * 100).round() / 100 if seed % 2 else error_prob  # ties
    found = fit(error_prob, incorrect, 0.06, bound="clopper-pearson", stages=stages)
    assert found.at == slow_stages(error_prob, incorrect, 0.06, 0.05, min(stages, 600))
    if found.at is not None:
        assert found.upper is not None
        assert found.observed is not None
        assert found.observed < found.upper <= 0.06
        taken = incorrect[found.accepts(error_prob)]
        assert (found.coverage, found.observed) == (len(taken) / 600, float(taken.double().mean()))


@pytest.mark.slow
def test_a_bound_controls_the_true_risk() -> None:
    wanted, delta, rounds = 0.05, 0.1, 120
    over: dict[str, int] = {}
    kept: dict[str, float] = {}
    for bound in ("none", *WITH_GUARANTEE):
        found = [fit(*drawn(1000, seed=seed), wanted, bound=bound, delta=delta, stages=20) for seed in range(rounds)]  # type: ignore[arg-type]
        over[bound] = sum(0.1 * (each.at or 0.0) ** 2 > wanted for each in found)
        kept[bound] = float(np.mean([each.coverage for each in found]))
    slack = 3 * math.sqrt(delta * (1 - delta) * rounds)
    assert over["none"] > 0.3 * rounds
    assert over["hoeffding"] <= over["clopper-pearson"] <= delta * rounds + slack
    best = math.sqrt(wanted / 0.1)
    assert kept["none"] == pytest.approx(best, abs=0.03)
    assert 0.4 < kept["clopper-pearson"] < best
    assert kept["hoeffding"] < kept["clopper-pearson"]


def test_an_unattainable_risk_rejects_every_prediction_with_a_reason() -> None:
    error_prob, incorrect = torch.arange(40.0), torch.ones(40)
    found = fit(error_prob, incorrect, 0.1)
    assert found == RejectionThreshold(
        0.1, None, 0.0, None, None, 40, "none", 0.05,
        "A risk of 0.1 is not attainable: even the most confident held-out predictions have a higher error rate. Every "
        "prediction is rejected.",
    )  # fmt: skip
    assert not found.accepts(torch.tensor([-INF, 0.0, INF])).any()
    few = fit(error_prob, torch.zeros(40), 0.05, bound="clopper-pearson")
    assert few.at is None
    assert few.remark.startswith(
        "A risk of 0.05 with confidence 0.95 is not attainable: 40 held-out samples are too few"
    )
    many = fit(torch.arange(400.0), torch.arange(400) % 2, 0.05, bound="clopper-pearson")
    assert "too high to exclude a higher risk" in many.remark


@pytest.mark.parametrize("bound", ["none", *WITH_GUARANTEE])
def test_risks_of_zero_and_one(bound: Bound) -> None:
    error_prob, incorrect = drawn(300)
    assert fit(error_prob, incorrect, 1.0, bound=bound).coverage == 1.0
    assert fit(error_prob, torch.ones(300), 1.0, bound=bound).coverage == 1.0
    nothing = fit(error_prob, incorrect, 0.0, bound=bound)
    if bound == "none":  # up to the first mistake
        assert nothing.coverage == float((error_prob < error_prob[incorrect].min()).double().mean())
    else:  # a risk of zero cannot be guaranteed
        assert nothing.at is None


@pytest.mark.parametrize("incorrect", [0, 1])
def test_a_single_sample_is_supported(incorrect: int) -> None:
    found = fit(torch.tensor([0.3], dtype=torch.float64), torch.tensor([incorrect]), 0.1)
    assert found.at == (None if incorrect else 0.3)
    assert fit(torch.tensor([0.3]), torch.tensor([incorrect]), 0.1, bound="clopper-pearson").at is None


def test_infinite_error_probabilities_are_ordered_and_nan_is_rejected() -> None:
    error_prob, incorrect = torch.tensor([-INF, 0.0, INF, INF]), torch.tensor([0, 0, 1, 1])
    found = fit(error_prob, incorrect, 0.0)
    assert found.accepts(torch.tensor([-INF, 0.0, INF, math.nan])).tolist() == [True, True, False, False]
    everything = fit(error_prob, incorrect, 0.5)
    assert everything.at == INF
    assert everything.accepts(torch.tensor([INF, math.nan])).tolist() == [True, False]
    assert json.dumps(everything.to_dict(), allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_threshold_from_half_precision_accepts_its_own_sample(dtype: torch.dtype) -> None:
    error_prob = (torch.rand(50) * 3).to(dtype)
    found = fit(error_prob, torch.zeros(50, dtype=torch.bool), 0.1)
    assert found.accepts(error_prob).all()


@pytest.mark.parametrize("bound", ["none", *WITH_GUARANTEE])
def test_thresholds_round_trip_through_json(bound: Bound) -> None:
    for risk in (0.0, 0.2):
        found = fit(*drawn(500), risk, bound=bound)
        assert RejectionThreshold.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found


def test_invalid_options_are_rejected() -> None:
    error_prob, incorrect = drawn(10)
    for options in ({"risk": -0.1}, {"risk": 5}, {"risk": 0.1, "delta": 0.0}, {"risk": 0.1, "stages": 0}):
        with pytest.raises(RecipeError, match="risk must be from 0 to 1"):
            fit(error_prob, incorrect, **options)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="did you mean 'hoeffding'"):
        fit(error_prob, incorrect, 0.1, bound="hoefding")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error_prob", "incorrect", "words"),
    [
        (torch.zeros(0), torch.zeros(0), "at least"),
        (torch.zeros(3), torch.zeros(2), r"\[3\].*\[2\]"),
        (torch.zeros(3, 1), torch.zeros(3, 1), r"\[3, 1\]"),
        (torch.tensor([0.0, math.nan]), torch.zeros(2), "NaN"),
        (torch.zeros(2), torch.tensor([0.0, 0.5]), "neither 0 nor 1"),
    ],
)
def test_invalid_samples_are_rejected(error_prob: Tensor, incorrect: Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        fit(error_prob, incorrect, 0.1)
