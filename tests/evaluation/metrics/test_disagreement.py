"""Disagreement, DER and KL divergence: against reference implementations, scikit-learn, scipy, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import diversity as reference
from reference.diversity import (
    ALL_MEMBERS,
    MEAN,
    bootstrap,
    check_cuts,
    check_order,
    evaluate,
    logits_and_cuts,
    random_logits,
)
from scipy.stats import entropy
from sklearn.metrics import hamming_loss
from torch import Tensor

from plateaux.evaluation.metrics.disagreement import der, disagreement, kl

ALL = {"disagreement": disagreement, "der": der, "kl": kl}
Case = tuple[Tensor, Tensor, tuple[int, ...]]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("members", "samples", "classes"), [(2, 50, 3), (4, 60, 10), (3, 1, 2), (2, 30, 1)])
def test_every_row_equals_the_reference(name: str, members: int, samples: int, classes: int) -> None:
    logits, y = random_logits(members, samples, classes)
    rows, truth = evaluate(ALL[name](), logits, y, [samples // 3]), getattr(reference, name)(logits.numpy(), y.numpy())
    assert list(rows) == list(truth)
    for row, number in truth.items():
        assert rows[row].value == pytest.approx(number, rel=1e-10, abs=1e-14, nan_ok=True), row


def test_disagreement_is_the_hamming_loss_between_two_members() -> None:
    logits, y = random_logits(2, 80, 5)
    a, b = logits.argmax(-1).numpy()
    assert evaluate(disagreement(), logits, y)["members 0 and 1"].value == pytest.approx(hamming_loss(a, b))


def test_kl_equals_scipy() -> None:
    logits, y = random_logits(2, 40, 6)
    p = reference.probabilities(logits.numpy())
    rows = evaluate(kl(), logits, y)
    assert rows["member 0 to 1"].value == pytest.approx(entropy(p[0], p[1], axis=-1).mean(), rel=1e-10)
    assert rows["member 1 to 0"].value == pytest.approx(entropy(p[1], p[0], axis=-1).mean(), rel=1e-10)


def test_identical_members_never_disagree() -> None:
    logits, y = random_logits(1, 70, 4)
    same = logits.expand(3, -1, -1)
    for name, build in ALL.items():
        for row, value in evaluate(build(), same, y).items():
            assert value.value == 0.0, (name, row)


def test_disagreement_of_three_members_equals_hand_computed_values() -> None:
    # Predictions 0 0 1 | 0 1 1 | 2 1 1, labels 0 0 1: the members make 0, 1 and 2 errors on 3 samples.
    preds = torch.tensor([[0, 0, 1], [0, 1, 1], [2, 1, 1]])
    logits = torch.nn.functional.one_hot(preds, 3).double()
    y = torch.tensor([0, 0, 1])
    rows = {name: value.value for name, value in evaluate(disagreement(), logits, y).items()}
    assert rows == pytest.approx(
        {"members 0 and 1": 1 / 3, "members 0 and 2": 2 / 3, "members 1 and 2": 1 / 3, MEAN: 4 / 9}
    )
    rows = {name: value.value for name, value in evaluate(der(), logits, y).items()}
    assert rows == pytest.approx(
        {"members 0 and 1": 2, "members 0 and 2": 2, "members 1 and 2": 2 / 3, ALL_MEMBERS: (4 / 9) / (1 / 3)}
    )


def test_the_ratio_is_of_means_and_not_a_mean_of_ratios() -> None:
    logits, y = random_logits(4, 90, 5)
    rows = evaluate(der(), logits, y)
    pair_values = [value.value for name, value in rows.items() if name != ALL_MEMBERS]
    assert rows[ALL_MEMBERS].value != pytest.approx(np.mean(pair_values), rel=1e-6)


def test_der_is_nan_without_errors() -> None:
    logits, y = torch.eye(3).double().expand(2, 3, 3), torch.arange(3)
    assert all(math.isnan(value.value) and value.stderr is None for value in evaluate(der(), logits, y).values())


def test_kl_of_very_large_logits_is_finite() -> None:
    logits = torch.tensor([[[1e4, 0.0, 0.0]], [[0.0, 1e4, 0.0]]])
    for dtype in (torch.float64, torch.float32, torch.float16):
        rows = evaluate(kl(), logits.to(dtype), torch.tensor([0]))
        assert {value.value for value in rows.values()} == {1e4}


def test_a_class_of_probability_zero_adds_nothing() -> None:
    logits, y = random_logits(2, 20, 4)
    barred = torch.cat([logits, torch.full((2, 20, 1), -math.inf, dtype=torch.float64)], -1)
    for row, value in evaluate(kl(), barred, y).items():
        assert value.value == pytest.approx(evaluate(kl(), logits, y)[row].value, rel=1e-12)
    barred[1, :, 0] = -math.inf
    rows = evaluate(kl(), barred, y)
    assert rows["member 0 to 1"].value == math.inf
    assert math.isfinite(rows["member 1 to 0"].value)


def test_ties_go_to_the_first_class() -> None:
    logits = torch.tensor([[[1.0, 1.0, 0.0]], [[1.0, 0.0, 1.0]], [[0.0, 1.0, 1.0]]])
    rows = evaluate(disagreement(), logits, torch.tensor([0]))
    assert [value.value for value in rows.values()] == pytest.approx([0, 1, 1, 2 / 3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_logits_equal_the_reference(dtype: torch.dtype) -> None:
    logits, y = random_logits(3, 60, 5)
    logits = logits.to(dtype)
    for name, build in ALL.items():
        truth = getattr(reference, name)(logits.double().numpy(), y.numpy())
        for row, value in evaluate(build(), logits, y).items():
            assert value.value == pytest.approx(truth[row], rel=1e-10), (name, row)


def test_standard_errors_are_those_of_the_mean_over_samples() -> None:
    logits, y = random_logits(3, 90, 4)
    preds = logits.argmax(-1).numpy()
    differ = np.array([preds[i] != preds[j] for i, j in ((0, 1), (0, 2), (1, 2))])
    rows = evaluate(disagreement(), logits, y)
    assert rows["members 0 and 2"].stderr == pytest.approx(differ[1].std(ddof=1) / math.sqrt(90))
    assert rows[MEAN].stderr == pytest.approx(differ.mean(0).std(ddof=1) / math.sqrt(90))


@pytest.mark.parametrize("row", ["members 0 and 1", ALL_MEMBERS])
def test_the_standard_error_of_der_agrees_with_the_bootstrap(row: str) -> None:
    logits, y = random_logits(3, 400, 4)
    assert evaluate(der(), logits, y)[row].stderr == pytest.approx(bootstrap(der(), logits, y, row), rel=0.12)


@given(logits_and_cuts(), st.permutations(range(4)))
@settings(max_examples=30)
def test_batches_and_the_order_of_members_do_not_matter(case: Case, order: list[int]) -> None:
    logits, y, cuts = case
    for build in ALL.values():
        check_cuts(build(), logits, y, cuts)
        check_order(build(), logits, y, [i for i in order if i < len(logits)])


@given(logits_and_cuts())
@settings(max_examples=40)
def test_kl_is_never_negative(case: Case) -> None:
    logits, y, _ = case
    assert all(value.value >= 0 for value in evaluate(kl(), logits.float(), y).values())
