"""Variance, distinct predictions and PDS: against reference implementations, numpy, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import diversity as reference
from reference.diversity import ALL_MEMBERS, check_cuts, check_order, evaluate, logits_and_cuts, random_logits
from torch import Tensor
from torch.nn.functional import one_hot

from plateaux.core.errors import RecipeError
from plateaux.evaluation.metrics.variance import pds, unique, variance

ALL = {"variance": variance, "unique": unique, "pds": pds}
Case = tuple[Tensor, Tensor, tuple[int, ...]]


@pytest.mark.parametrize(
    ("name", "options"),
    [("variance", {}), ("variance", {"space": "probabilities", "ddof": 0}), ("variance", {"ddof": 0}), ("unique", {}),
     ("pds", {}), ("pds", {"normalize": True})],
)  # fmt: skip
@pytest.mark.parametrize(("members", "samples", "classes"), [(2, 50, 3), (4, 60, 10), (3, 1, 2), (2, 30, 1)])
def test_every_row_equals_the_reference(
    name: str, options: dict[str, object], members: int, samples: int, classes: int
) -> None:
    logits, y = random_logits(members, samples, classes)
    truth = getattr(reference, name)(logits.numpy(), y.numpy(), **options)
    rows = evaluate(ALL[name](**options), logits, y, [samples // 3])
    assert {row: value.value for row, value in rows.items()} == pytest.approx(truth, rel=1e-10, abs=1e-14)


def test_variance_equals_numpy_summed_over_classes() -> None:
    logits, y = random_logits(5, 80, 7)
    value = evaluate(variance(), logits, y)[ALL_MEMBERS]
    variances = np.var(logits.numpy(), axis=0, ddof=1).sum(-1)
    assert value.value == pytest.approx(variances.mean())
    assert value.stderr == pytest.approx(variances.std(ddof=1) / math.sqrt(80))


def test_ddof_scales_the_variance() -> None:
    logits, y = random_logits(4, 30, 3)
    one, zero = (evaluate(variance(ddof=ddof), logits, y)[ALL_MEMBERS].value for ddof in (1, 0))
    assert one == pytest.approx(zero * 4 / 3)


def test_a_constant_added_to_logits_changes_only_the_variance_of_logits() -> None:
    logits, y = random_logits(2, 30, 3)
    shifted = logits + torch.tensor([0.0, 5.0])[:, None, None]
    before, after = (evaluate(variance(space="probabilities"), t, y)[ALL_MEMBERS].value for t in (logits, shifted))
    assert after == pytest.approx(before)
    before, after = (evaluate(variance(), t, y)[ALL_MEMBERS].value for t in (logits, shifted))
    assert after > before + 10


@pytest.mark.parametrize("ddof", [-1, 2, 3])
def test_an_invalid_ddof_is_refused(ddof: int) -> None:
    logits, y = random_logits(2, 5, 3)
    with pytest.raises(RecipeError, match=f"ddof = {ddof} and 2 members; allowed: 0 to 1"):
        evaluate(variance(ddof=ddof), logits, y)


def test_identical_members_have_one_distinct_prediction() -> None:
    logits, y = random_logits(1, 60, 4)
    same = logits.expand(3, -1, -1)
    assert evaluate(unique(), same, y)[ALL_MEMBERS].value == 1
    assert evaluate(pds(), same, y)[ALL_MEMBERS].value == pytest.approx(1, rel=1e-14)
    assert evaluate(variance(), same, y)[ALL_MEMBERS].value == pytest.approx(0, abs=1e-25)


@pytest.mark.parametrize("scale", [40.0, 1e4])
def test_certain_members_of_different_classes_count_separately(scale: float) -> None:
    logits = scale * torch.eye(5)[:3, None].expand(3, 4, 5)  # member i is certain of class i
    y = torch.zeros(4, dtype=torch.int64)
    for dtype in (torch.float32, torch.float16):
        assert evaluate(unique(), logits.to(dtype), y)[ALL_MEMBERS].value == 3
        assert evaluate(pds(), logits.to(dtype), y)[ALL_MEMBERS].value == pytest.approx(3, rel=1e-12)
        assert evaluate(pds(normalize=True), logits.to(dtype), y)[ALL_MEMBERS].value == pytest.approx(3 / 5, rel=1e-12)
        assert evaluate(unique(), logits.to(dtype), y)[ALL_MEMBERS].stderr == 0


def test_more_members_than_classes_fill_the_classes() -> None:
    logits = 1e4 * one_hot(torch.tensor([0, 1, 0, 1, 1]), 2)[:, None].double()
    y = torch.tensor([0])
    assert evaluate(unique(), logits, y)[ALL_MEMBERS].value == 2
    assert evaluate(pds(), logits, y)[ALL_MEMBERS].value == 2


def test_ties_go_to_the_first_class() -> None:
    logits = torch.tensor([[[1.0, 1.0, 0.0]], [[1.0, 0.0, 1.0]], [[0.0, 1.0, 1.0]]])
    assert evaluate(unique(), logits, torch.tensor([0]))[ALL_MEMBERS].value == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_logits_equal_the_reference(dtype: torch.dtype) -> None:
    logits, y = random_logits(3, 60, 5)
    logits = logits.to(dtype)
    for name, build in ALL.items():
        truth = getattr(reference, name)(logits.double().numpy(), y.numpy())
        assert evaluate(build(), logits, y)[ALL_MEMBERS].value == pytest.approx(truth[ALL_MEMBERS], rel=1e-10), name


@given(logits_and_cuts(), st.permutations(range(4)))
@settings(max_examples=30)
def test_batches_and_the_order_of_members_do_not_matter(case: Case, order: list[int]) -> None:
    logits, y, cuts = case
    for build in ALL.values():
        check_cuts(build(), logits, y, cuts)
        check_order(build(), logits, y, [i for i in order if i < len(logits)])


@given(logits_and_cuts())
@settings(max_examples=40)
def test_the_scores_stay_in_their_range(case: Case) -> None:
    logits, y, _ = case
    most = min(len(logits), logits.shape[-1])
    for build in (unique, pds):
        assert 1 - 1e-12 <= evaluate(build(), logits, y)[ALL_MEMBERS].value <= most + 1e-12
    assert evaluate(variance(), logits, y)[ALL_MEMBERS].value >= 0
