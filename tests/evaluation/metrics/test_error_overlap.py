"""Error overlap, Q, EIR and oracle: against reference implementations, scikit-learn, scipy, and the bootstrap."""

from __future__ import annotations

import math

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
from scipy.stats.contingency import odds_ratio
from sklearn.metrics import jaccard_score
from torch import Tensor

from plateaux.core.row_names import MEAN_LOGIT, MEAN_PROBABILITY
from plateaux.evaluation.metrics.error_overlap import best_member, eir, error_overlap, oracle, q_statistic

ALL = {"error_overlap": error_overlap, "q_statistic": q_statistic, "eir": eir, "oracle": oracle}
Case = tuple[Tensor, Tensor, tuple[int, ...]]


def logits_from_correctness(*members: str) -> tuple[Tensor, Tensor]:
    """Logits of two classes from strings of 1 (correct) and 0 (incorrect); the label is always the second class."""
    correct = torch.tensor([[int(sign) for sign in line] for line in members])
    return torch.stack([1 - correct, correct], -1).double(), torch.ones(correct.shape[1], dtype=torch.int64)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("members", "samples", "classes"), [(2, 50, 3), (4, 60, 10), (3, 1, 2), (2, 30, 1)])
def test_every_row_equals_the_reference(name: str, members: int, samples: int, classes: int) -> None:
    logits, y = random_logits(members, samples, classes)
    rows, truth = evaluate(ALL[name](), logits, y, [samples // 3]), getattr(reference, name)(logits.numpy(), y.numpy())
    assert list(rows) == list(truth)
    for row, number in truth.items():
        assert rows[row].value == pytest.approx(number, rel=1e-10, abs=1e-14, nan_ok=True), row


def test_error_overlap_equals_the_jaccard_score_of_scikit_learn() -> None:
    logits, y = random_logits(2, 90, 4)
    a, b = (logits.argmax(-1) != y).numpy()
    value = evaluate(error_overlap(), logits, y)["members 0 and 1"]
    assert value.value == pytest.approx(jaccard_score(a, b))
    # It is a fraction of the samples in the union: the delta method gives its binomial standard error.
    assert value.stderr == pytest.approx(math.sqrt(value.value * (1 - value.value) / (a | b).sum()))


def test_q_is_a_function_of_the_odds_ratio() -> None:
    logits, y = random_logits(2, 120, 4)
    n11, n10, n01, n00 = reference.q_counts(logits.numpy(), y.numpy(), 0, 1)
    odds = odds_ratio([[n11, n10], [n01, n00]], kind="sample").statistic
    value = evaluate(q_statistic(), logits, y)["members 0 and 1"]
    assert value.value == pytest.approx((odds - 1) / (odds + 1))
    spread = math.sqrt(1 / n11 + 1 / n10 + 1 / n01 + 1 / n00)
    assert value.stderr == pytest.approx(0.5 * (1 - value.value**2) * spread)


def test_error_overlap_of_two_members_equals_hand_computed_values() -> None:
    logits, y = logits_from_correctness("1111100011", "1110110001")
    # both correct 5, only the first 2, only the second 1, neither 2
    assert evaluate(error_overlap(), logits, y)["members 0 and 1"].value == pytest.approx(2 / 5)
    assert evaluate(q_statistic(), logits, y)["members 0 and 1"].value == pytest.approx((10 - 2) / (10 + 2))
    assert evaluate(oracle(), logits, y)[ALL_MEMBERS].value == pytest.approx(0.8)
    assert evaluate(oracle(), logits, y)[ALL_MEMBERS].stderr == pytest.approx(math.sqrt(0.8 * 0.2 / 10))


def test_identical_members_make_the_same_errors() -> None:
    logits, y = random_logits(1, 100, 4)
    same = logits.expand(3, -1, -1)
    for value in evaluate(error_overlap(), same, y).values():
        assert value.value == 1
        assert value.stderr == pytest.approx(0, abs=1e-7)
    assert {value.value for value in evaluate(q_statistic(), same, y).values()} == {1.0}
    assert {value.stderr for value in evaluate(q_statistic(), same, y).values()} == {None}
    assert {value.value for value in evaluate(eir(), same, y).values()} == {0.0}
    assert evaluate(oracle(), same, y)[ALL_MEMBERS].value == float((logits[0].argmax(-1) == y).double().mean())


def test_independent_errors_have_a_q_of_zero() -> None:
    logits, y = logits_from_correctness("11110000" * 3, "11001100" * 3)
    assert evaluate(q_statistic(), logits, y)["members 0 and 1"].value == 0
    assert evaluate(error_overlap(), logits, y)["members 0 and 1"].value == pytest.approx(1 / 3)


def test_disjoint_errors_have_a_q_of_minus_one() -> None:
    logits, y = logits_from_correctness("110", "011")
    assert evaluate(q_statistic(), logits, y)["members 0 and 1"].value == -1
    assert evaluate(error_overlap(), logits, y)["members 0 and 1"].value == 0


def test_a_pair_without_errors_is_omitted_from_the_mean() -> None:
    logits, y = logits_from_correctness("1111", "1111", "1100", "0110")
    overlap, q = evaluate(error_overlap(), logits, y), evaluate(q_statistic(), logits, y)
    assert math.isnan(overlap["members 0 and 1"].value)
    assert overlap["members 0 and 1"].stderr is None
    assert overlap[MEAN].value == pytest.approx((0 + 0 + 0 + 0 + 1 / 3) / 5)
    assert overlap[MEAN].stderr is not None
    assert [name for name, value in q.items() if not math.isnan(value.value)] == ["members 2 and 3", MEAN]
    logits, y = logits_from_correctness("1111", "1111")
    for build in (error_overlap, q_statistic):
        assert all(math.isnan(value.value) for value in evaluate(build(), logits, y).values())


def test_a_pair_without_a_standard_error_removes_that_of_the_mean() -> None:
    logits, y = logits_from_correctness("11110000", "11001100", "11110001")
    rows = evaluate(q_statistic(), logits, y)
    assert rows["members 0 and 1"].stderr is not None
    assert rows["members 0 and 2"].stderr is None
    assert rows[MEAN].stderr is None


def test_eir_of_a_perfect_ensemble_is_one() -> None:
    # One of three members makes an error at a time: the other two outvote it.
    logits, y = logits_from_correctness("0110", "1010", "1100")
    y = torch.tensor([1, 1, 1, 0])
    logits[:, 3] = torch.tensor([1.0, 0.0])
    rows = evaluate(eir(), logits, y)
    assert list(rows) == [MEAN_PROBABILITY, MEAN_LOGIT]
    assert {value.value for value in rows.values()} == {1.0}
    y = torch.tensor([0, 0, 0, 0])  # if most members are incorrect, the ensemble makes more errors
    assert evaluate(eir(), logits, y)[MEAN_LOGIT].value == pytest.approx((1 / 2 - 3 / 4) / (1 / 2))


def test_eir_is_nan_without_errors() -> None:
    logits, y = logits_from_correctness("11", "11")
    assert all(math.isnan(value.value) for value in evaluate(eir(), logits, y).values())


@pytest.mark.parametrize(
    ("name", "row"),
    [("error_overlap", "members 0 and 1"), ("error_overlap", MEAN), ("q_statistic", "members 0 and 2"),
     ("q_statistic", MEAN), ("eir", MEAN_PROBABILITY), ("oracle", ALL_MEMBERS)],
)  # fmt: skip
def test_standard_errors_agree_with_the_bootstrap(name: str, row: str) -> None:
    logits, y = random_logits(4, 500, 4, correlation=0.4)
    metric = ALL[name]()
    assert evaluate(metric, logits, y)[row].stderr == pytest.approx(bootstrap(metric, logits, y, row), rel=0.12)


@pytest.mark.parametrize("name", ["error_overlap", "q_statistic"])
def test_the_mean_of_one_pair_equals_that_pair_with_its_standard_error(name: str) -> None:
    logits, y = logits_from_correctness(
        "1" * 20 + "0" * 9, "1" * 12 + "0" * 11 + "1" * 2 + "0" * 4
    )  # 12, 8, 2, 7 samples
    rows = evaluate(ALL[name](), logits, y)
    assert rows[MEAN].value == rows["members 0 and 1"].value
    assert rows[MEAN].stderr == pytest.approx(rows["members 0 and 1"].stderr, rel=1e-9)


def test_the_standard_error_of_the_mean_includes_covariances_of_pairs() -> None:
    logits, y = random_logits(4, 500, 4)
    rows = evaluate(error_overlap(), logits, y)
    errors = [value.stderr or 0.0 for name, value in rows.items() if name != MEAN]
    assert math.sqrt(sum(e * e for e in errors)) / 6 < (rows[MEAN].stderr or 0.0) < sum(errors) / 6


def test_probabilities_of_exactly_zero_and_one_and_float16() -> None:
    logits, y = logits_from_correctness("1111100011", "1110110001")
    for name, build in ALL.items():
        truth = getattr(reference, name)(logits.numpy(), y.numpy())
        for row, value in evaluate(build(), (logits * 1e4).half(), y).items():
            assert value.value == pytest.approx(truth[row]), (name, row)


@given(logits_and_cuts(), st.permutations(range(4)))
@settings(max_examples=30)
def test_batches_and_the_order_of_members_do_not_matter(case: Case, order: list[int]) -> None:
    logits, y, cuts = case
    untied = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, build in ALL.items():
        # If classes of the ensemble tie, rounding decides, which depends on the order of members.
        values = untied if name == "eir" else logits
        check_cuts(build(), values, y, cuts)
        check_order(build(), values, y, [i for i in order if i < len(logits)])


def test_the_best_member_is_the_most_accurate_one() -> None:
    logits, y = random_logits(4, 90, 5)
    best = float((logits.argmax(-1) == y).double().mean(-1).max())
    assert evaluate(best_member(), logits, y)[ALL_MEMBERS].value == best
