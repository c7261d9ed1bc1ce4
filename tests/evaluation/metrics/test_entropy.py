"""Entropies and mutual information: against reference implementations and scipy, single members, certainty."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import diversity as reference
from reference.diversity import ALL_MEMBERS, check_cuts, check_order, evaluate, logits_and_cuts, random_logits
from scipy.stats import entropy
from torch import Tensor

from plateaux.evaluation.metrics.entropy import expected_entropy, mutual_information, predictive_entropy

ALL = {
    "predictive_entropy": predictive_entropy,
    "expected_entropy": expected_entropy,
    "mutual_information": mutual_information,
}
Case = tuple[Tensor, Tensor, tuple[int, ...]]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("members", "samples", "classes"), [(1, 20, 3), (2, 50, 3), (4, 60, 10), (3, 1, 2), (2, 30, 1)]
)
def test_every_row_equals_the_reference(name: str, members: int, samples: int, classes: int) -> None:
    logits, y = random_logits(members, samples, classes)
    rows, truth = evaluate(ALL[name](), logits, y, [samples // 3]), getattr(reference, name)(logits.numpy(), y.numpy())
    assert list(rows) == list(truth)
    for row, number in truth.items():
        assert rows[row].value == pytest.approx(number, rel=1e-10, abs=1e-13), row


def test_entropies_equal_scipy() -> None:
    logits, y = random_logits(3, 40, 6)
    p = reference.probabilities(logits.numpy())
    assert evaluate(predictive_entropy(), logits, y)[ALL_MEMBERS].value == pytest.approx(
        entropy(p.mean(0), axis=-1).mean()
    )
    rows = evaluate(expected_entropy(), logits, y)
    assert rows["member 1"].value == pytest.approx(entropy(p[1], axis=-1).mean())
    assert rows[ALL_MEMBERS].value == pytest.approx(entropy(p, axis=-1).mean())


def test_one_member_has_equal_entropies_and_no_mutual_information() -> None:
    logits, y = random_logits(1, 30, 4)
    own = evaluate(expected_entropy(), logits, y)
    assert list(own) == ["member 0", ALL_MEMBERS]
    assert own["member 0"] == own[ALL_MEMBERS] == evaluate(predictive_entropy(), logits, y)[ALL_MEMBERS]
    nothing = evaluate(mutual_information(), logits, y)[ALL_MEMBERS]
    assert (nothing.value, nothing.stderr) == (0.0, 0.0)


def test_mutual_information_is_the_difference_of_the_two() -> None:
    logits, y = random_logits(3, 50, 4)
    mutual, full, parts = (
        evaluate(build(), logits, y)[ALL_MEMBERS].value
        for build in (mutual_information, predictive_entropy, expected_entropy)
    )
    assert mutual == pytest.approx(full - parts, rel=1e-10)


def test_mutual_information_is_computed_for_each_sample() -> None:
    # Sample 0: two confident members that disagree; sample 1: two uncertain ones that agree. Subtracting the mean
    # entropy of the batch, as one published script does, gives the same mean and another standard error.
    logits = torch.tensor([[[1e4, 0.0], [0.0, 0.0]], [[0.0, 1e4], [0.0, 0.0]]])
    value = evaluate(mutual_information(), logits, torch.tensor([0, 1]))[ALL_MEMBERS]
    assert value.value == pytest.approx(math.log(2) / 2)
    assert value.stderr == pytest.approx(math.log(2) / 2)  # of log 2 and 0


def test_certain_members_of_different_classes_have_maximal_mutual_information() -> None:
    logits = 1e4 * torch.eye(4)[:, None]  # member i is certain of class i
    y = torch.tensor([0])
    assert evaluate(predictive_entropy(), logits, y)[ALL_MEMBERS].value == pytest.approx(math.log(4))
    assert {value.value for value in evaluate(expected_entropy(), logits, y).values()} == {0.0}
    assert evaluate(mutual_information(), logits, y)[ALL_MEMBERS].value == pytest.approx(math.log(4))


def test_equal_logits_have_maximal_entropy() -> None:
    logits, y = torch.zeros(3, 5, 8, dtype=torch.float16), torch.zeros(5, dtype=torch.int64)
    for build in (predictive_entropy, expected_entropy):
        for value in evaluate(build(), logits, y).values():
            assert value.value == pytest.approx(math.log(8))
            assert value.stderr == pytest.approx(0, abs=1e-7)
    assert evaluate(mutual_information(), logits, y)[ALL_MEMBERS].value == pytest.approx(0, abs=1e-14)


def test_a_class_of_probability_zero_adds_nothing() -> None:
    logits, y = random_logits(2, 20, 4)
    barred = torch.cat([logits, torch.full((2, 20, 1), -math.inf, dtype=torch.float64)], -1)
    for name, build in ALL.items():
        for row, value in evaluate(build(), logits, y).items():
            assert evaluate(build(), barred, y)[row].value == pytest.approx(value.value, rel=1e-10), (name, row)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_logits_equal_the_reference(dtype: torch.dtype) -> None:
    logits, y = random_logits(3, 60, 5, correlation=0.99)  # nearly equal members: a small difference of large numbers
    logits = logits.to(dtype)
    for name, build in ALL.items():
        truth = getattr(reference, name)(logits.double().numpy(), y.numpy())
        for row, value in evaluate(build(), logits, y).items():
            assert value.value == pytest.approx(truth[row], rel=1e-8, abs=1e-13), (name, row)


@given(logits_and_cuts(min_members=1), st.permutations(range(4)))
@settings(max_examples=30)
def test_batches_and_the_order_of_members_do_not_matter(case: Case, order: list[int]) -> None:
    logits, y, cuts = case
    for build in ALL.values():
        check_cuts(build(), logits, y, cuts)
        check_order(build(), logits, y, [i for i in order if i < len(logits)])


@given(logits_and_cuts(min_members=1), st.sampled_from([1e-6, 1.0, 30.0]))
@settings(max_examples=40)
def test_mutual_information_is_never_negative_and_at_most_log_m(case: Case, scale: float) -> None:
    logits, y, _ = case
    logits = scale * logits
    state = mutual_information().update(logits, reference.Batch(y, y, y))
    assert float(state["sum"]) >= 0
    value = evaluate(mutual_information(), logits, y)[ALL_MEMBERS]
    assert 0 <= value.value <= math.log(len(logits)) + 1e-12


def test_mutual_information_is_not_negative_after_rounding() -> None:
    logits, y = random_logits(1, 300, 5)
    same = logits.expand(3, -1, -1)  # the difference of equal entropies
    for s in range(300):
        value = evaluate(mutual_information(), same[:, s : s + 1], y[s : s + 1])[ALL_MEMBERS]
        assert 0 <= value.value < 1e-14
