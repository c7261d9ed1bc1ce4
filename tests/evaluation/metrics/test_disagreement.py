"""Disagreement, its ratio to error, and divergence: against slow twins, scikit-learn and scipy, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import diversity as slow
from reference.diversity import ALL_MEMBERS, MEAN, bootstrap, check_cuts, check_order, cut_tables, measured, table_of
from scipy.stats import entropy
from sklearn.metrics import hamming_loss
from torch import Tensor

from plateaux.evaluation.metrics.disagreement import der, disagreement, kl

ALL = {"disagreement": disagreement, "der": der, "kl": kl}
Cut = tuple[Tensor, Tensor, tuple[int, ...]]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("members", "samples", "classes"), [(2, 50, 3), (4, 60, 10), (3, 1, 2), (2, 30, 1)])
def test_every_row_is_what_the_slow_twin_says(name: str, members: int, samples: int, classes: int) -> None:
    table, y = table_of(members, samples, classes)
    rows, truth = measured(ALL[name](), table, y, [samples // 3]), getattr(slow, name)(table.numpy(), y.numpy())
    assert list(rows) == list(truth)
    for row, number in truth.items():
        assert rows[row].value == pytest.approx(number, rel=1e-10, abs=1e-14, nan_ok=True), row


def test_disagreement_is_the_hamming_loss_between_two_members() -> None:
    table, y = table_of(2, 80, 5)
    a, b = table.argmax(-1).numpy()
    assert measured(disagreement(), table, y)["members 0 and 1"].value == pytest.approx(hamming_loss(a, b))


def test_divergence_is_what_scipy_says() -> None:
    table, y = table_of(2, 40, 6)
    p = slow.probabilities(table.numpy())
    rows = measured(kl(), table, y)
    assert rows["member 0 to 1"].value == pytest.approx(entropy(p[0], p[1], axis=-1).mean(), rel=1e-10)
    assert rows["member 1 to 0"].value == pytest.approx(entropy(p[1], p[0], axis=-1).mean(), rel=1e-10)


def test_identical_members_never_disagree() -> None:
    table, y = table_of(1, 70, 4)
    same = table.expand(3, -1, -1)
    for name, make in ALL.items():
        for row, value in measured(make(), same, y).items():
            assert value.value == 0.0, (name, row)


def test_three_members_by_hand() -> None:
    # Guesses 0 0 1 | 0 1 1 | 2 1 1, labels 0 0 1: the members err 0, 1 and 2 times of 3.
    guesses = torch.tensor([[0, 0, 1], [0, 1, 1], [2, 1, 1]])
    table = torch.nn.functional.one_hot(guesses, 3).double()
    y = torch.tensor([0, 0, 1])
    rows = {name: value.value for name, value in measured(disagreement(), table, y).items()}
    assert rows == pytest.approx(
        {"members 0 and 1": 1 / 3, "members 0 and 2": 2 / 3, "members 1 and 2": 1 / 3, MEAN: 4 / 9}
    )
    rows = {name: value.value for name, value in measured(der(), table, y).items()}
    assert rows == pytest.approx(
        {"members 0 and 1": 2, "members 0 and 2": 2, "members 1 and 2": 2 / 3, ALL_MEMBERS: (4 / 9) / (1 / 3)}
    )


def test_the_ratio_is_of_means_and_not_a_mean_of_ratios() -> None:
    table, y = table_of(4, 90, 5)
    rows = measured(der(), table, y)
    of_pairs = [value.value for name, value in rows.items() if name != ALL_MEMBERS]
    assert rows[ALL_MEMBERS].value != pytest.approx(np.mean(of_pairs), rel=1e-6)


def test_there_is_no_ratio_where_nobody_errs() -> None:
    table, y = torch.eye(3).double().expand(2, 3, 3), torch.arange(3)
    assert all(math.isnan(value.value) and value.stderr is None for value in measured(der(), table, y).values())


def test_divergence_of_margins_of_ten_thousand_is_finite() -> None:
    table = torch.tensor([[[1e4, 0.0, 0.0]], [[0.0, 1e4, 0.0]]])
    for dtype in (torch.float64, torch.float32, torch.float16):
        rows = measured(kl(), table.to(dtype), torch.tensor([0]))
        assert {value.value for value in rows.values()} == {1e4}


def test_a_class_that_nobody_allows_adds_nothing() -> None:
    table, y = table_of(2, 20, 4)
    barred = torch.cat([table, torch.full((2, 20, 1), -math.inf, dtype=torch.float64)], -1)
    for row, value in measured(kl(), barred, y).items():
        assert value.value == pytest.approx(measured(kl(), table, y)[row].value, rel=1e-12)
    barred[1, :, 0] = -math.inf
    rows = measured(kl(), barred, y)
    assert rows["member 0 to 1"].value == math.inf
    assert math.isfinite(rows["member 1 to 0"].value)


def test_of_equal_classes_the_first_is_the_guess() -> None:
    table = torch.tensor([[[1.0, 1.0, 0.0]], [[1.0, 0.0, 1.0]], [[0.0, 1.0, 1.0]]])
    rows = measured(disagreement(), table, torch.tensor([0]))
    assert [value.value for value in rows.values()] == pytest.approx([0, 1, 1, 2 / 3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_few_digits_are_measured_in_many(dtype: torch.dtype) -> None:
    table, y = table_of(3, 60, 5)
    table = table.to(dtype)
    for name, make in ALL.items():
        truth = getattr(slow, name)(table.double().numpy(), y.numpy())
        for row, value in measured(make(), table, y).items():
            assert value.value == pytest.approx(truth[row], rel=1e-10), (name, row)


def test_standard_errors_are_those_of_the_mean_over_samples() -> None:
    table, y = table_of(3, 90, 4)
    found = table.argmax(-1).numpy()
    differ = np.array([found[i] != found[j] for i, j in ((0, 1), (0, 2), (1, 2))])
    rows = measured(disagreement(), table, y)
    assert rows["members 0 and 2"].stderr == pytest.approx(differ[1].std(ddof=1) / math.sqrt(90))
    assert rows[MEAN].stderr == pytest.approx(differ.mean(0).std(ddof=1) / math.sqrt(90))


@pytest.mark.parametrize("row", ["members 0 and 1", ALL_MEMBERS])
def test_the_error_of_the_ratio_is_what_the_bootstrap_finds(row: str) -> None:
    table, y = table_of(3, 400, 4)
    assert measured(der(), table, y)[row].stderr == pytest.approx(bootstrap(der(), table, y, row), rel=0.12)


@given(cut_tables(), st.permutations(range(4)))
@settings(deadline=None, max_examples=30)
def test_neither_batches_nor_the_order_of_members_matter(given: Cut, order: list[int]) -> None:
    table, y, cuts = given
    for make in ALL.values():
        check_cuts(make(), table, y, cuts)
        check_order(make(), table, y, [i for i in order if i < len(table)])


@given(cut_tables())
@settings(deadline=None, max_examples=40)
def test_divergence_is_never_negative(given: Cut) -> None:
    table, y, _ = given
    assert all(value.value >= 0 for value in measured(kl(), table.float(), y).values())


def test_what_the_measures_say_of_themselves() -> None:
    assert disagreement().percent
    for make in ALL.values():
        measure = make()
        assert (measure.group, measure.min_members, measure.higher_is_better) == ("diversity", 2, None)
        assert measure.definition
