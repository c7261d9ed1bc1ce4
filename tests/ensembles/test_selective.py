"""Thresholds on doubt against brute force, scipy's Clopper-Pearson bound and risks that are known in closed form."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.ensembles.selective import Bound, RejectionThreshold, fit, upper_bound

INF = math.inf
CAREFUL: list[Bound] = ["clopper-pearson", "hoeffding"]


def drawn(samples: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Doubts d uniform on [0, 1], wrong with probability 0.3 d^2: up to t, the risk is 0.1 t^2."""
    chance = torch.Generator().manual_seed(seed)
    doubt = torch.rand(samples, generator=chance, dtype=torch.float64)
    return doubt, torch.rand(samples, generator=chance, dtype=torch.float64) < 0.3 * doubt**2


def brute(doubt: list[float], wrong: list[bool], risk: float) -> tuple[float | None, float]:
    """The slow twin: every doubt is tried as a threshold."""
    best: tuple[float | None, float] = None, 0.0
    for at in sorted(set(doubt)):
        taken = [w for d, w in zip(doubt, wrong, strict=True) if d <= at]
        if sum(taken) / len(taken) <= risk:
            best = at, len(taken) / len(doubt)
    return best


def slow_stages(doubt: Tensor, wrong: Tensor, risk: float, delta: float, stages: int) -> float | None:
    """The slow twin of the fixed sequence, with scipy's bound."""
    order, passed = sorted(doubt.tolist()), None
    for stage in range(1, stages + 1):
        at = order[math.ceil(stage * len(order) / stages) - 1]
        taken = wrong[doubt <= at]
        count, mistakes = len(taken), int(taken.sum())
        if beta.ppf(1 - delta, 1, count) > risk:
            continue
        if mistakes == count or beta.ppf(1 - delta, mistakes + 1, count - mistakes) > risk:
            break
        passed = at
    return passed


def test_the_threshold_by_hand() -> None:
    doubt = torch.tensor([0.5, 0.1, 0.4, 0.2, 0.3])
    wrong = torch.tensor([True, False, False, True, False])
    # From the most certain: right, wrong, right, right, wrong; risks 0, 1/2, 1/3, 1/4, 2/5.
    found = fit(doubt, wrong, 0.25)
    assert found.at == pytest.approx(0.4)
    assert (found.coverage, found.observed, found.upper, found.samples) == (0.8, 0.25, None, 5)
    assert found.accepts(doubt).tolist() == [False, True, True, True, True]
    assert fit(doubt, wrong, 0.24).coverage == 0.2
    assert fit(doubt, wrong, 0.4).coverage == 1.0
    assert fit(doubt, wrong, 0.4).at == pytest.approx(0.5)  # and no further: nobody knows what lies beyond


def test_samples_of_equal_doubt_are_accepted_or_refused_together() -> None:
    doubt, wrong = torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0]), torch.tensor([0, 0, 0, 1, 0])
    # Two of the three would keep the risk at 0; all of them make it a quarter.
    assert fit(doubt, wrong, 0.2).coverage == 1.0
    assert fit(doubt[:4], wrong[:4], 0.2).coverage == 0.25
    assert fit(doubt[:4], wrong[:4], 0.25).coverage == 1.0
    same = fit(torch.ones(10), torch.tensor([1] + [0] * 9), 0.05)
    assert (same.at, same.coverage) == (None, 0.0)


@given(
    rows=st.lists(st.tuples(st.sampled_from([-INF, 0.0, 0.5, 1.0, 3.0, INF]), st.booleans()), min_size=1, max_size=14),
    risk=st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0]),
    data=st.data(),
)  # fmt: skip
@settings(deadline=None, max_examples=80)
def test_no_threshold_of_larger_coverage_keeps_the_risk(
    rows: list[tuple[float, bool]], risk: float, data: st.DataObject
) -> None:
    doubt, wrong = [d for d, _ in rows], [w for _, w in rows]
    found = fit(torch.tensor(doubt), torch.tensor(wrong), risk)
    assert (found.at, found.coverage) == brute(doubt, wrong, risk)
    order = data.draw(st.permutations(range(len(rows))))
    assert fit(torch.tensor(doubt)[order], torch.tensor(wrong)[order], risk) == found
    assert found.accepts(torch.tensor(doubt)).double().mean() == pytest.approx(found.coverage)
    assert RejectionThreshold.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found


@pytest.mark.parametrize("delta", [0.001, 0.05, 0.3, 0.7])
@pytest.mark.parametrize(("wrong", "count"), [(0, 1), (1, 1), (0, 59), (3, 100), (100, 100), (57, 5000), (4999, 5000)])
def test_the_upper_bound_is_clopper_and_pearsons(wrong: int, count: int, delta: float) -> None:
    truth = 1.0 if wrong == count else float(beta.ppf(1 - delta, wrong + 1, count - wrong))
    assert upper_bound(wrong, count, delta) == pytest.approx(truth, rel=1e-9)


def test_the_upper_bound_without_a_mistake_has_a_closed_form_and_hoeffdings_always() -> None:
    assert upper_bound(0, 59, 0.05) == pytest.approx(1 - 0.05 ** (1 / 59), rel=1e-12)
    assert upper_bound(3, 200, 0.1, "hoeffding") == pytest.approx(0.015 + math.sqrt(math.log(10) / 400))
    assert upper_bound(1, 1, 0.1, "hoeffding") == 1.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stages", [1, 7, 50, 5000])
def test_with_a_bound_stages_pass_one_after_the_other_until_one_fails(seed: int, stages: int) -> None:
    doubt, wrong = drawn(600, seed=seed)
    doubt = (doubt * 100).round() / 100 if seed % 2 else doubt  # ties
    found = fit(doubt, wrong, 0.06, bound="clopper-pearson", stages=stages)
    assert found.at == slow_stages(doubt, wrong, 0.06, 0.05, min(stages, 600))
    if found.at is not None:
        assert found.upper is not None
        assert found.observed is not None
        assert found.observed < found.upper <= 0.06
        taken = wrong[found.accepts(doubt)]
        assert (found.coverage, found.observed) == (len(taken) / 600, float(taken.double().mean()))


def test_with_a_bound_the_true_risk_is_rarely_too_high_and_without_one_often() -> None:
    wanted, delta, rounds = 0.05, 0.1, 120
    over: dict[str, int] = {}
    kept: dict[str, float] = {}
    for bound in ("none", *CAREFUL):
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


def test_a_risk_that_cannot_be_had_withholds_everything_and_says_why() -> None:
    doubt, wrong = torch.arange(40.0), torch.ones(40)
    found = fit(doubt, wrong, 0.1)
    assert found == RejectionThreshold(
        0.1, None, 0.0, None, None, 40, "none", 0.05,
        "A risk of 0.1 cannot be had: even the most certain held-out predictions are wrong more often. Every "
        "prediction is withheld.",
    )  # fmt: skip
    assert not found.accepts(torch.tensor([-INF, 0.0, INF])).any()
    few = fit(doubt, torch.zeros(40), 0.05, bound="clopper-pearson")
    assert few.at is None
    assert few.remark.startswith(
        "A risk of 0.05 with confidence 0.95 cannot be had: 40 held-out samples would be too few"
    )
    many = fit(torch.arange(400.0), torch.arange(400) % 2, 0.05, bound="clopper-pearson")
    assert "wrong too often to exclude a higher one" in many.remark


@pytest.mark.parametrize("bound", ["none", *CAREFUL])
def test_the_ends_of_the_scale(bound: Bound) -> None:
    doubt, wrong = drawn(300)
    assert fit(doubt, wrong, 1.0, bound=bound).coverage == 1.0
    assert fit(doubt, torch.ones(300), 1.0, bound=bound).coverage == 1.0
    nothing = fit(doubt, wrong, 0.0, bound=bound)
    if bound == "none":  # up to the first mistake
        assert nothing.coverage == float((doubt < doubt[wrong].min()).double().mean())
    else:  # nobody can promise that nothing goes wrong
        assert nothing.at is None


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_sample(wrong: int) -> None:
    found = fit(torch.tensor([0.3], dtype=torch.float64), torch.tensor([wrong]), 0.1)
    assert found.at == (None if wrong else 0.3)
    assert fit(torch.tensor([0.3]), torch.tensor([wrong]), 0.1, bound="clopper-pearson").at is None


def test_infinite_doubts_have_their_place_and_nan_is_never_accepted() -> None:
    doubt, wrong = torch.tensor([-INF, 0.0, INF, INF]), torch.tensor([0, 0, 1, 1])
    found = fit(doubt, wrong, 0.0)
    assert found.accepts(torch.tensor([-INF, 0.0, INF, math.nan])).tolist() == [True, True, False, False]
    everything = fit(doubt, wrong, 0.5)
    assert everything.at == INF
    assert everything.accepts(torch.tensor([INF, math.nan])).tolist() == [True, False]
    assert json.dumps(everything.to_dict(), allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_threshold_of_few_digits_accepts_the_sample_it_was_taken_from(dtype: torch.dtype) -> None:
    doubt = (torch.rand(50) * 3).to(dtype)
    found = fit(doubt, torch.zeros(50, dtype=torch.bool), 0.1)
    assert found.accepts(doubt).all()


@pytest.mark.parametrize("bound", ["none", *CAREFUL])
def test_thresholds_go_through_json(bound: Bound) -> None:
    for risk in (0.0, 0.2):
        found = fit(*drawn(500), risk, bound=bound)
        assert RejectionThreshold.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found


def test_impossible_wishes_are_refused() -> None:
    doubt, wrong = drawn(10)
    for options in ({"risk": -0.1}, {"risk": 5}, {"risk": 0.1, "delta": 0.0}, {"risk": 0.1, "stages": 0}):
        with pytest.raises(RecipeError, match="give a risk from 0 to 1"):
            fit(doubt, wrong, **options)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="did you mean 'hoeffding'"):
        fit(doubt, wrong, 0.1, bound="hoefding")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("doubt", "wrong", "words"),
    [
        (torch.zeros(0), torch.zeros(0), "at least"),
        (torch.zeros(3), torch.zeros(2), r"\[3\].*\[2\]"),
        (torch.zeros(3, 1), torch.zeros(3, 1), r"\[3, 1\]"),
        (torch.tensor([0.0, math.nan]), torch.zeros(2), "nan"),
        (torch.zeros(2), torch.tensor([0.0, 0.5]), "neither 0 nor 1"),
    ],
)
def test_samples_that_do_not_fit_are_refused(doubt: Tensor, wrong: Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        fit(doubt, wrong, 0.1)
