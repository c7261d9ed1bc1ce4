"""Entropies and mutual information: against slow twins and scipy, one member, certainty and batches included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import diversity as slow
from reference.diversity import ALL_MEMBERS, check_cuts, check_order, cut_tables, measured, table_of
from scipy.stats import entropy
from torch import Tensor

from plateaux.evaluation.metrics.entropy import expected_entropy, mutual_information, predictive_entropy

ALL = {
    "predictive_entropy": predictive_entropy,
    "expected_entropy": expected_entropy,
    "mutual_information": mutual_information,
}
Cut = tuple[Tensor, Tensor, tuple[int, ...]]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("members", "samples", "classes"), [(1, 20, 3), (2, 50, 3), (4, 60, 10), (3, 1, 2), (2, 30, 1)]
)
def test_every_row_is_what_the_slow_twin_says(name: str, members: int, samples: int, classes: int) -> None:
    table, y = table_of(members, samples, classes)
    rows, truth = measured(ALL[name](), table, y, [samples // 3]), getattr(slow, name)(table.numpy(), y.numpy())
    assert list(rows) == list(truth)
    for row, number in truth.items():
        assert rows[row].value == pytest.approx(number, rel=1e-10, abs=1e-13), row


def test_entropies_are_scipys() -> None:
    table, y = table_of(3, 40, 6)
    p = slow.probabilities(table.numpy())
    assert measured(predictive_entropy(), table, y)[ALL_MEMBERS].value == pytest.approx(
        entropy(p.mean(0), axis=-1).mean()
    )
    rows = measured(expected_entropy(), table, y)
    assert rows["member 1"].value == pytest.approx(entropy(p[1], axis=-1).mean())
    assert rows[ALL_MEMBERS].value == pytest.approx(entropy(p, axis=-1).mean())


def test_one_member_has_its_entropy_twice_and_no_mutual_information() -> None:
    table, y = table_of(1, 30, 4)
    own = measured(expected_entropy(), table, y)
    assert list(own) == ["member 0", ALL_MEMBERS]
    assert own["member 0"] == own[ALL_MEMBERS] == measured(predictive_entropy(), table, y)[ALL_MEMBERS]
    nothing = measured(mutual_information(), table, y)[ALL_MEMBERS]
    assert (nothing.value, nothing.stderr) == (0.0, 0.0)


def test_mutual_information_is_the_difference_of_the_two() -> None:
    table, y = table_of(3, 50, 4)
    mutual, whole, parts = (
        measured(make(), table, y)[ALL_MEMBERS].value
        for make in (mutual_information, predictive_entropy, expected_entropy)
    )
    assert mutual == pytest.approx(whole - parts, rel=1e-10)


def test_the_difference_is_taken_sample_by_sample() -> None:
    # Sample 0: two sure members, of different classes; sample 1: two unsure ones that agree. Taking the batch's mean
    # entropy off every sample, as one published script does, gives the same mean and another spread.
    table = torch.tensor([[[1e4, 0.0], [0.0, 0.0]], [[0.0, 1e4], [0.0, 0.0]]])
    value = measured(mutual_information(), table, torch.tensor([0, 1]))[ALL_MEMBERS]
    assert value.value == pytest.approx(math.log(2) / 2)
    assert value.stderr == pytest.approx(math.log(2) / 2)  # of log 2 and 0


def test_members_sure_of_different_classes_know_all_there_is_to_know() -> None:
    table = 1e4 * torch.eye(4)[:, None]  # member i is sure of class i
    y = torch.tensor([0])
    assert measured(predictive_entropy(), table, y)[ALL_MEMBERS].value == pytest.approx(math.log(4))
    assert {value.value for value in measured(expected_entropy(), table, y).values()} == {0.0}
    assert measured(mutual_information(), table, y)[ALL_MEMBERS].value == pytest.approx(math.log(4))


def test_equal_logits_are_the_most_unsure() -> None:
    table, y = torch.zeros(3, 5, 8, dtype=torch.float16), torch.zeros(5, dtype=torch.int64)
    for make in (predictive_entropy, expected_entropy):
        for value in measured(make(), table, y).values():
            assert value.value == pytest.approx(math.log(8))
            assert value.stderr == pytest.approx(0, abs=1e-7)
    assert measured(mutual_information(), table, y)[ALL_MEMBERS].value == pytest.approx(0, abs=1e-14)


def test_a_class_that_nobody_allows_adds_nothing() -> None:
    table, y = table_of(2, 20, 4)
    barred = torch.cat([table, torch.full((2, 20, 1), -math.inf, dtype=torch.float64)], -1)
    for name, make in ALL.items():
        for row, value in measured(make(), table, y).items():
            assert measured(make(), barred, y)[row].value == pytest.approx(value.value, rel=1e-10), (name, row)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_few_digits_are_measured_in_many(dtype: torch.dtype) -> None:
    table, y = table_of(3, 60, 5, alike=0.99)  # nearly the same: a small difference of large numbers
    table = table.to(dtype)
    for name, make in ALL.items():
        truth = getattr(slow, name)(table.double().numpy(), y.numpy())
        for row, value in measured(make(), table, y).items():
            assert value.value == pytest.approx(truth[row], rel=1e-8, abs=1e-13), (name, row)


@given(cut_tables(least=1), st.permutations(range(4)))
@settings(deadline=None, max_examples=30)
def test_neither_batches_nor_the_order_of_members_matter(given: Cut, order: list[int]) -> None:
    table, y, cuts = given
    for make in ALL.values():
        check_cuts(make(), table, y, cuts)
        check_order(make(), table, y, [i for i in order if i < len(table)])


@given(cut_tables(least=1), st.sampled_from([1e-6, 1.0, 30.0]))
@settings(deadline=None, max_examples=40)
def test_mutual_information_is_never_negative_and_at_most_log_m(given: Cut, scale: float) -> None:
    table, y, _ = given
    table = scale * table
    settled = mutual_information().update(table, slow.Batch(y, y, y))
    assert float(settled["sum"]) >= 0
    value = measured(mutual_information(), table, y)[ALL_MEMBERS]
    assert 0 <= value.value <= math.log(len(table)) + 1e-12


def test_rounding_never_makes_it_negative_for_any_sample() -> None:
    table, y = table_of(1, 300, 5)
    same = table.expand(3, -1, -1)  # the difference of equal entropies
    for s in range(300):
        value = measured(mutual_information(), same[:, s : s + 1], y[s : s + 1])[ALL_MEMBERS]
        assert 0 <= value.value < 1e-14


def test_what_the_measures_say_of_themselves() -> None:
    for make in ALL.values():
        measure = make()
        assert (measure.group, measure.min_members, measure.higher_is_better) == ("diversity", 1, None)
        assert "nats" in measure.definition
