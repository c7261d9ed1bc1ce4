"""Linear CKA from sums: against centered features, rotations, constants, and networks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import diversity as reference
from reference.diversity import MEAN, check_cuts, check_order, evaluate
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.evaluation.metric_loop import evaluate_metrics
from plateaux.evaluation.metrics.cka import MAX_WIDTH, cka


def random_features(
    members: int, samples: int, width: int, *, seed: int = 0, shift: float = 3.0
) -> tuple[Tensor, Tensor]:
    """Features that members share in part, far from centered."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(samples, width, generator=generator, dtype=torch.float64)
    own = torch.randn(members, samples, width, generator=generator, dtype=torch.float64)
    return common + own + shift, torch.zeros(samples, dtype=torch.int64)


@pytest.mark.parametrize(("members", "samples", "width"), [(2, 50, 3), (4, 30, 8), (3, 5, 20), (2, 40, 1)])
def test_every_row_equals_cka_of_centered_features(members: int, samples: int, width: int) -> None:
    x, y = random_features(members, samples, width)
    rows, truth = evaluate(cka(), x, y, [samples // 3]), reference.cka(x.numpy(), y.numpy())
    assert list(rows) == list(truth)
    assert {row: value.value for row, value in rows.items()} == pytest.approx(truth, rel=1e-9)
    assert all(value.stderr is None for value in rows.values())


def test_cka_is_the_alignment_of_centered_kernels() -> None:
    x, y = random_features(2, 25, 4)
    centre = np.eye(25) - 1 / 25
    k, other = (centre @ f @ f.T @ centre for f in x.numpy())
    value = (k * other).sum() / math.sqrt((k * k).sum() * (other * other).sum())
    assert evaluate(cka(), x, y)["members 0 and 1"].value == pytest.approx(value, rel=1e-10)


def test_rotation_scale_and_shift_change_nothing() -> None:
    x, y = random_features(1, 40, 6)
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    both = torch.stack([x[0], 7 * x[0] @ rotation - 2])
    assert evaluate(cka(), both, y)["members 0 and 1"].value == pytest.approx(1, rel=1e-10)


def test_features_without_a_common_direction_are_unrelated() -> None:
    a = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    b = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    assert evaluate(cka(), torch.stack([a, b]), torch.zeros(4))["members 0 and 1"].value == 0


def test_columns_of_zeros_change_nothing() -> None:
    x, y = random_features(3, 30, 5)
    wide = torch.nn.functional.pad(x, (0, 4))
    wide[1, :, 4] = 0  # a narrower member
    narrow = evaluate(cka(), wide, y)
    truth = reference.cka(wide.numpy(), y.numpy())
    assert {row: value.value for row, value in narrow.items()} == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6])
def test_constant_features_give_nan_and_are_omitted_from_the_mean(constant: float) -> None:
    x, y = random_features(3, 37, 4)
    x[2] = constant
    rows = evaluate(cka(), x, y, [10, 20])
    assert math.isnan(rows["members 0 and 2"].value)
    assert math.isnan(rows["members 1 and 2"].value)
    assert rows[MEAN].value == rows["members 0 and 1"].value
    assert all(math.isnan(value.value) for value in evaluate(cka(), x[[2, 2]], y).values())


def test_a_constant_column_changes_nothing() -> None:
    x, y = random_features(2, 60, 4, shift=0)
    x = 1e-3 * x
    truth = reference.cka(x.numpy(), y.numpy())[MEAN]
    with_column = torch.cat([x, torch.full((2, 60, 1), 1234567.1, dtype=torch.float64)], -1)
    assert evaluate(cka(), with_column, y, [25])[MEAN].value == pytest.approx(truth, rel=1e-6)


def test_cka_of_one_sample_is_nan() -> None:
    x, y = random_features(2, 1, 3)
    assert math.isnan(evaluate(cka(), x, y)[MEAN].value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_features_are_summed_in_float64(dtype: torch.dtype) -> None:
    x, y = random_features(2, 300, 5, shift=30)
    x = x.to(dtype)
    truth = reference.cka(x.double().numpy(), y.numpy())[MEAN]
    assert evaluate(cka(), x, y, [100])[MEAN].value == pytest.approx(truth, rel=1e-9)


def test_features_too_wide_are_refused_with_what_to_do() -> None:
    with pytest.raises(RecipeError, match=rf"width {MAX_WIDTH + 1}; allowed: up to {MAX_WIDTH}.*Remove cka"):
        evaluate(cka(), torch.zeros(2, 1, MAX_WIDTH + 1), torch.zeros(1))


@given(
    members=st.integers(2, 4),
    samples=st.integers(2, 20),
    seed=st.integers(0, 99),
    cuts=st.sets(st.integers(1, 20), max_size=3),
    order=st.permutations(range(4)),
)
@settings(max_examples=30)
def test_batches_and_the_order_of_members_do_not_matter(
    members: int, samples: int, seed: int, cuts: set[int], order: list[int]
) -> None:
    x, y = random_features(members, samples, 3, seed=seed)
    check_cuts(cka(), x, y, sorted(cut for cut in cuts if cut <= samples))
    check_order(cka(), x, y, [i for i in order if i < members])
    assert all(-1e-9 <= value.value <= 1 + 1e-9 for value in evaluate(cka(), x, y).values())


def test_networks_of_different_widths_are_compared_by_inputs_of_the_last_layer() -> None:
    networks = [nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)) for width in (5, 9)]
    x, y = torch.randn(40, 6), torch.zeros(40, dtype=torch.int64)
    batches = [Batch(x[a:b], y[a:b], torch.arange(a, b)) for a, b in ((0, 16), (16, 40))]
    results = evaluate_metrics(SINGLE_PROCESS, [MemberModule(network) for network in networks], batches, {"cka": cka()})
    with torch.no_grad():
        batch_sizes = [network[:2](x).double() for network in networks]
    a, b = (f - f.mean(0) for f in batch_sizes)
    truth = (a.T @ b).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())
    assert results["cka"]["members 0 and 1"].value == pytest.approx(float(truth), rel=1e-5)
