"""Variance, distinct answers and the diversity score: against slow twins, numpy, and tables made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import diversity as slow
from reference.diversity import ALL_MEMBERS, check_cuts, check_order, cut_tables, measured, table_of
from torch import Tensor
from torch.nn.functional import one_hot

from plateaux.core.errors import RecipeError
from plateaux.evaluation.metrics.variance import pds, unique, variance

ALL = {"variance": variance, "unique": unique, "pds": pds}
Cut = tuple[Tensor, Tensor, tuple[int, ...]]


@pytest.mark.parametrize(
    ("name", "options"),
    [("variance", {}), ("variance", {"space": "probabilities", "ddof": 0}), ("variance", {"ddof": 0}), ("unique", {}),
     ("pds", {}), ("pds", {"normalize": True})],
)  # fmt: skip
@pytest.mark.parametrize(("members", "samples", "classes"), [(2, 50, 3), (4, 60, 10), (3, 1, 2), (2, 30, 1)])
def test_every_row_is_what_the_slow_twin_says(
    name: str, options: dict[str, object], members: int, samples: int, classes: int
) -> None:
    table, y = table_of(members, samples, classes)
    truth = getattr(slow, name)(table.numpy(), y.numpy(), **options)
    rows = measured(ALL[name](**options), table, y, [samples // 3])
    assert {row: value.value for row, value in rows.items()} == pytest.approx(truth, rel=1e-10, abs=1e-14)


def test_variance_is_numpys_summed_over_classes() -> None:
    table, y = table_of(5, 80, 7)
    value = measured(variance(), table, y)[ALL_MEMBERS]
    of_samples = np.var(table.numpy(), axis=0, ddof=1).sum(-1)
    assert value.value == pytest.approx(of_samples.mean())
    assert value.stderr == pytest.approx(of_samples.std(ddof=1) / math.sqrt(80))


def test_the_unbiased_variance_is_m_over_m_less_one_of_the_other() -> None:
    table, y = table_of(4, 30, 3)
    one, zero = (measured(variance(ddof=ddof), table, y)[ALL_MEMBERS].value for ddof in (1, 0))
    assert one == pytest.approx(zero * 4 / 3)


def test_a_constant_added_to_one_members_logits_is_seen_in_logits_alone() -> None:
    table, y = table_of(2, 30, 3)
    moved = table + torch.tensor([0.0, 5.0])[:, None, None]
    before, after = (measured(variance(space="probabilities"), t, y)[ALL_MEMBERS].value for t in (table, moved))
    assert after == pytest.approx(before)
    before, after = (measured(variance(), t, y)[ALL_MEMBERS].value for t in (table, moved))
    assert after > before + 10


@pytest.mark.parametrize("ddof", [-1, 2, 3])
def test_a_ddof_that_leaves_nothing_to_divide_by_is_refused(ddof: int) -> None:
    table, y = table_of(2, 5, 3)
    with pytest.raises(RecipeError, match=f"ddof = {ddof} and 2 members; allowed: 0 to 1"):
        measured(variance(ddof=ddof), table, y)


def test_identical_members_are_one_answer() -> None:
    table, y = table_of(1, 60, 4)
    same = table.expand(3, -1, -1)
    assert measured(unique(), same, y)[ALL_MEMBERS].value == 1
    assert measured(pds(), same, y)[ALL_MEMBERS].value == pytest.approx(1, rel=1e-14)
    assert measured(variance(), same, y)[ALL_MEMBERS].value == pytest.approx(0, abs=1e-25)


@pytest.mark.parametrize("scale", [40.0, 1e4])
def test_members_sure_of_different_classes_are_so_many_answers(scale: float) -> None:
    table = scale * torch.eye(5)[:3, None].expand(3, 4, 5)  # member i is sure of class i
    y = torch.zeros(4, dtype=torch.int64)
    for dtype in (torch.float32, torch.float16):
        assert measured(unique(), table.to(dtype), y)[ALL_MEMBERS].value == 3
        assert measured(pds(), table.to(dtype), y)[ALL_MEMBERS].value == pytest.approx(3, rel=1e-12)
        assert measured(pds(normalize=True), table.to(dtype), y)[ALL_MEMBERS].value == pytest.approx(3 / 5, rel=1e-12)
        assert measured(unique(), table.to(dtype), y)[ALL_MEMBERS].stderr == 0


def test_more_members_than_classes_fill_the_classes() -> None:
    table = 1e4 * one_hot(torch.tensor([0, 1, 0, 1, 1]), 2)[:, None].double()
    y = torch.tensor([0])
    assert measured(unique(), table, y)[ALL_MEMBERS].value == 2
    assert measured(pds(), table, y)[ALL_MEMBERS].value == 2


def test_of_equal_classes_the_first_is_the_answer() -> None:
    table = torch.tensor([[[1.0, 1.0, 0.0]], [[1.0, 0.0, 1.0]], [[0.0, 1.0, 1.0]]])
    assert measured(unique(), table, torch.tensor([0]))[ALL_MEMBERS].value == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_few_digits_are_measured_in_many(dtype: torch.dtype) -> None:
    table, y = table_of(3, 60, 5)
    table = table.to(dtype)
    for name, make in ALL.items():
        truth = getattr(slow, name)(table.double().numpy(), y.numpy())
        assert measured(make(), table, y)[ALL_MEMBERS].value == pytest.approx(truth[ALL_MEMBERS], rel=1e-10), name


@given(cut_tables(), st.permutations(range(4)))
@settings(deadline=None, max_examples=30)
def test_neither_batches_nor_the_order_of_members_matter(given: Cut, order: list[int]) -> None:
    table, y, cuts = given
    for make in ALL.values():
        check_cuts(make(), table, y, cuts)
        check_order(make(), table, y, [i for i in order if i < len(table)])


@given(cut_tables())
@settings(deadline=None, max_examples=40)
def test_the_scores_stay_in_their_range(given: Cut) -> None:
    table, y, _ = given
    most = min(len(table), table.shape[-1])
    for make in (unique, pds):
        assert 1 - 1e-12 <= measured(make(), table, y)[ALL_MEMBERS].value <= most + 1e-12
    assert measured(variance(), table, y)[ALL_MEMBERS].value >= 0


def test_what_the_measures_say_of_themselves() -> None:
    for make in ALL.values():
        measure = make()
        assert (measure.group, measure.min_members, measure.higher_is_better) == ("diversity", 2, None)
        assert measure.definition
    assert "ddof = 0" in variance(ddof=0).definition
    assert "probabilities" in variance(space="probabilities").definition
