"""Calibration errors and their bins: reference implementations, torchmetrics, ties, certainty, the bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.imports import optional_import
from plateaux.core.row_names import MEAN_PROBABILITY, row_name
from plateaux.core.types import Batch
from plateaux.evaluation.confidence import (
    bin_sums,
    confidence_and_prediction,
    equal_width,
    pack_confidence,
    unpack_confidence,
)
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.metrics.calibration import MAX_CELLS
from tests.evaluation.metrics.test_every_metric import (
    approx_or_none,
    evaluate,
    probabilities,
    random_logits,
    reference_value,
)

NAMES = ["ece", "adaptive_ece", "classwise_ece", "reliability"]
SHAPES = [(1, 50, 3), (3, 200, 10), (2, 1, 2), (2, 20, 1), (2, 40, 2)]


def reference_adaptive_ece(p: np.ndarray, y: np.ndarray, bins: int = 15) -> float:
    """Reference: the bin of a sample follows from the number of less confident samples."""
    confidence, correct = p.max(-1), p.argmax(-1) == y
    bin_index = np.array([(confidence < c).sum() * bins // len(y) for c in confidence])
    return sum(abs((correct - confidence)[bin_index == i].sum()) for i in range(bins)) / len(y)


def reference_classwise_ece(p: np.ndarray, y: np.ndarray, bins: int = 15) -> float:
    """Reference: each class against the rest, bin by bin."""
    total = 0.0
    for c in range(p.shape[1]):
        for i in range(bins):
            inside = (p[:, c] >= i / bins) & ((p[:, c] < (i + 1) / bins) | (i == bins - 1))
            if inside.any():
                total += inside.mean() * abs((y == c)[inside].mean() - p[inside, c].mean())
    return total / p.shape[1]


@pytest.mark.parametrize(("members", "samples", "classes"), SHAPES)
@pytest.mark.parametrize("bins", [1, 4, 15])
def test_every_row_equals_the_reference(members: int, samples: int, classes: int, bins: int) -> None:
    logits, y = random_logits(members, samples, classes)
    references = {"adaptive_ece": reference_adaptive_ece, "classwise_ece": reference_classwise_ece}
    for name, reference in references.items():
        rows, truth = evaluate(name, logits, y, bins=bins), probabilities(logits)
        assert list(rows) == list(truth)
        for row, p in truth.items():
            # adaptive_ece stores the log of the confidence in float32.
            assert rows[row].value == pytest.approx(reference(p, y.numpy(), bins), rel=1e-6, abs=1e-7), (name, row)


@pytest.mark.slow
def test_ece_equals_torchmetrics_except_for_a_confidence_of_one() -> None:
    functional = optional_import("torchmetrics.functional.classification", extra="dev")
    logits, y = random_logits(1, 300, 5)
    p = logits[0].softmax(-1)
    torchmetrics_ece = float(functional.multiclass_calibration_error(p, y, num_classes=5, n_bins=15, norm="l1"))
    assert evaluate("ece", logits, y)["member 0"].value == pytest.approx(torchmetrics_ece, abs=1e-6)
    # torchmetrics puts a confidence of exactly 1 into a separate bin (torchmetrics#3510); here it is in the last bin.
    p = torch.tensor([[0.96, 0.04], [1.0, 0.0]], dtype=torch.float64)
    torchmetrics_ece = float(functional.multiclass_calibration_error(p, torch.tensor([0, 1]), num_classes=2, n_bins=15))
    assert torchmetrics_ece == pytest.approx((0.04 + 1) / 2)
    assert evaluate("ece", p.log()[None], torch.tensor([0, 1]))["member 0"].value == pytest.approx(abs(1 - 1.96) / 2)


@pytest.mark.parametrize("bins", range(1, 60))
def test_a_probability_on_an_edge_is_in_the_bin_above(bins: int) -> None:
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    assert equal_width(edges, bins).tolist() == [*range(bins), bins - 1]
    below = torch.nextafter(edges[1:], torch.zeros(bins, dtype=torch.float64))
    assert equal_width(below, bins).tolist() == list(range(bins))


def test_equal_mass_bins_split_the_sorted_samples() -> None:
    logits, y = random_logits(1, 150, 4)
    p = probabilities(logits)["member 0"]
    order = p.max(-1).argsort()
    gap = ((p.argmax(-1) == y.numpy()) - p.max(-1))[order]
    truth = sum(abs(piece.sum()) for piece in np.array_split(gap, 15)) / 150
    assert evaluate("adaptive_ece", logits, y)["member 0"].value == pytest.approx(truth, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_ties_does_not_matter(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, y = torch.randint(3, (2, 60, 3), generator=generator).float(), torch.randint(3, (60,), generator=generator)
    order = torch.randperm(60, generator=generator)
    rows, other = evaluate(name, logits, y), evaluate(name, logits[:, order], y[order])
    for row in rows:
        assert rows[row].value == pytest.approx(other[row].value, rel=1e-12, abs=1e-15)
        assert rows[row].stderr == approx_or_none(other[row].stderr, rel=1e-6, abs=1e-8)


def test_the_standard_error_of_ece_is_the_variation_inside_bins() -> None:
    logits, y = random_logits(1, 200, 4)
    p = probabilities(logits)["member 0"]
    confidence = p.max(-1)
    gap, bin_index = (p.argmax(-1) == y.numpy()) - confidence, np.minimum((confidence * 15).astype(int), 14)
    inside = [gap[bin_index == i] for i in range(15)]
    truth = math.sqrt(sum(len(g) * g.var(ddof=1) for g in inside if len(g) > 1)) / 200
    assert evaluate("ece", logits, y)["member 0"].stderr == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("name", ["ece", "adaptive_ece", "classwise_ece"])
def test_standard_errors_agree_with_the_bootstrap(name: str) -> None:
    logits, y = random_logits(1, 1500, 3, scale=3)  # overconfident: few bins change sign
    metric = registry.metric.get(name)(bins=5)
    generator = torch.Generator().manual_seed(1)
    resampled = []
    for _ in range(200):
        ids = torch.randint(1500, (1500,), generator=generator)
        resampled.append(metric.compute(metric.update(logits[:, ids], Batch(ids, y[ids], ids)))["member 0"].value)
    assert evaluate(name, logits, y, bins=5)["member 0"].stderr == pytest.approx(float(np.std(resampled)), rel=0.2)


def test_the_standard_error_of_classwise_ece_is_that_of_signed_gaps() -> None:
    logits, y = random_logits(2, 90, 4)
    value = evaluate("classwise_ece", logits, y, bins=6)[MEAN_PROBABILITY]
    p = probabilities(logits)[MEAN_PROBABILITY]
    gap, bin_index = np.eye(4)[y.numpy()] - p, np.minimum((p * 6).astype(int), 5)
    sign = np.array([[np.sign(gap[bin_index[:, c] == i, c].sum()) for i in range(6)] for c in range(4)])
    influence = [sum(sign[c, bin_index[n, c]] * gap[n, c] for c in range(4)) / 4 for n in range(90)]
    assert value.value == pytest.approx(np.mean(influence), rel=1e-9)
    assert value.stderr == pytest.approx(np.std(influence, ddof=1) / math.sqrt(90), rel=1e-9)


def test_classwise_ece_of_many_classes_has_no_standard_error() -> None:
    for classes in (MAX_CELLS // 15, MAX_CELLS // 15 + 1):
        logits, y = random_logits(1, 30, classes)
        value = evaluate("classwise_ece", logits, y)["member 0"]
        truth = reference_classwise_ece(probabilities(logits)["member 0"], y.numpy())
        assert value.value == pytest.approx(truth, rel=1e-9)
        assert (value.stderr is None) == (classes > MAX_CELLS // 15)


def test_reliability_bins_reproduce_ece() -> None:
    logits, y = random_logits(3, 200, 5)
    rows, errors = evaluate("reliability", logits, y, bins=10), evaluate("ece", logits, y, bins=10)
    for row, value in errors.items():
        bins = [i for i in range(10) if row_name(row, f"bin {i}", "share") in rows]
        share, confidence, accuracy = (
            np.array([rows[row_name(row, f"bin {i}", part)].value for i in bins])
            for part in ("share", "confidence", "accuracy")
        )
        assert share.sum() == pytest.approx(1)
        assert (share * abs(accuracy - confidence)).sum() == pytest.approx(value.value)
        assert all(i / 10 <= c <= (i + 1) / 10 for i, c in zip(bins, confidence, strict=True))


def test_reliability_of_a_small_example_equals_hand_computed_values() -> None:
    p = torch.tensor([[0.55, 0.45], [0.59, 0.41], [0.0, 1.0], [0.05, 0.95]], dtype=torch.float64)
    rows = evaluate("reliability", p.log()[None], torch.tensor([0, 1, 1, 1]), bins=10)
    assert list(rows) == [
        f"member 0 · bin {i} · {part}" for i in (5, 9) for part in ("share", "confidence", "accuracy")
    ]
    assert rows["member 0 · bin 5 · share"].value == 0.5
    assert rows["member 0 · bin 5 · share"].stderr == pytest.approx(math.sqrt(0.25 / 4))
    assert rows["member 0 · bin 5 · confidence"].value == pytest.approx(0.57)
    assert rows["member 0 · bin 5 · confidence"].stderr == pytest.approx(0.02)
    assert rows["member 0 · bin 5 · accuracy"].value == 0.5
    assert rows["member 0 · bin 5 · accuracy"].stderr == pytest.approx(math.sqrt(0.25 / 2))
    assert rows["member 0 · bin 9 · confidence"].value == pytest.approx(0.975)
    assert rows["member 0 · bin 9 · accuracy"].value == 1


@pytest.mark.parametrize("name", ["ece", "adaptive_ece", "classwise_ece"])
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("members", [1, 3])
def test_ece_of_certain_predictions(name: str, correct: bool, members: int) -> None:
    logits = torch.zeros(members, 6, 3)
    logits[..., 0] = 1e4
    y = torch.zeros(6, dtype=torch.int64) if correct else torch.ones(6, dtype=torch.int64)
    incorrect = 2 / 3 if name == "classwise_ece" else 1.0  # two of the three classes are always incorrect
    for value in evaluate(name, logits, y).values():
        assert value.value == pytest.approx(0.0 if correct else incorrect, abs=1e-6)
        assert value.stderr == pytest.approx(0.0, abs=1e-6)


def test_a_certain_error_keeps_its_sign_in_sums_over_processes() -> None:
    packed = pack_confidence(torch.zeros(2), torch.tensor([True, False]))
    neg_log, correct = unpack_confidence(packed + torch.zeros(2))  # a negative zero would become positive
    assert correct.tolist() == [True, False]
    assert neg_log.neg().exp().tolist() == [1.0, 1.0]
    assert neg_log[0] == neg_log[1]


@given(st.lists(st.tuples(st.floats(-20, 0, width=32), st.booleans()), min_size=1))
def test_confidence_and_correctness_fit_in_one_float(pairs: list[tuple[float, bool]]) -> None:
    log_confidence, correct = torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs])
    packed = pack_confidence(log_confidence, correct)
    assert packed.dtype == torch.float32
    neg_log, resampled = unpack_confidence(packed)
    assert resampled.tolist() == correct.tolist()
    torch.testing.assert_close(-neg_log, log_confidence.double(), rtol=0, atol=2e-38)


def test_confidences_that_round_to_one_stay_distinct() -> None:
    log_confidence = torch.tensor([-1e-12, -1e-13], dtype=torch.float64)
    assert log_confidence.exp().float().unique().numel() == 1
    assert unpack_confidence(pack_confidence(log_confidence, torch.tensor([True, True])))[0].diff() < 0


def test_a_probability_that_rounds_above_one_is_one() -> None:
    best, pred = confidence_and_prediction(torch.tensor([[[-20.0, 1e-7]]]))
    assert (best.item(), pred.item()) == (0.0, 1)


def test_bin_sums_of_a_small_example_equal_hand_computed_values() -> None:
    bin_index = torch.tensor([[0, 2, 2], [1, 1, 1]])
    sums = bin_sums(bin_index, [torch.ones(2, 3), torch.tensor([[1.0, 2, 3], [4, 5, 6]])], 3)
    assert sums[..., 0].tolist() == [[1, 0, 2], [0, 3, 0]]
    assert sums[..., 1].tolist() == [[1, 0, 5], [0, 15, 0]]


@given(members=st.integers(1, 3), samples=st.integers(1, 30), classes=st.integers(1, 5), seed=st.integers(0, 99),
       data=st.data())  # fmt: skip
@settings(max_examples=25)
def test_the_batch_size_does_not_matter(
    members: int, samples: int, classes: int, seed: int, data: st.DataObject
) -> None:
    logits, y = random_logits(members, samples, classes, seed=seed)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, samples), max_size=4))))
    for name in NAMES:
        full, parts = evaluate(name, logits, y), evaluate(name, logits, y, cuts=cuts)
        for row in full:
            assert parts[row].value == pytest.approx(full[row].value, rel=1e-12, abs=1e-14)
            assert parts[row].stderr == approx_or_none(full[row].stderr, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_members_does_not_matter(name: str) -> None:
    logits, y = random_logits(3, 60, 4)
    rows, other = evaluate(name, logits, y), evaluate(name, logits[[2, 0, 1]], y)
    for row, value in rows.items():
        counterpart = other[row.replace("member 0", "member 1")] if row.startswith("member 0") else None
        counterpart = other[row] if row.startswith(MEAN_PROBABILITY) else counterpart
        assert counterpart is None or value.value == pytest.approx(counterpart.value, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_logits_equal_the_reference(dtype: torch.dtype) -> None:
    logits, y = random_logits(2, 300, 10, scale=4)
    logits = logits.to(dtype)
    p = probabilities(logits.double())
    for row in p:
        assert evaluate("adaptive_ece", logits, y)[row].value == pytest.approx(
            reference_adaptive_ece(p[row], y.numpy()), abs=1e-5
        )
        assert evaluate("classwise_ece", logits, y)[row].value == pytest.approx(
            reference_classwise_ece(p[row], y.numpy()), abs=1e-5
        )


def test_one_sample_has_no_standard_error() -> None:
    logits, y = random_logits(2, 1, 4)
    p = probabilities(logits)["member 0"]
    for name in ("ece", "adaptive_ece"):
        value = evaluate(name, logits, y)["member 0"]
        assert value.value == pytest.approx(reference_value("ece", p, y.numpy()), abs=1e-6)
        assert value.stderr == 0
    assert evaluate("classwise_ece", logits, y)["member 0"].stderr in (None, pytest.approx(0, abs=1e-8))


def test_nan_logits_give_nan() -> None:
    logits = torch.full((1, 4, 3), float("nan"))
    for name in ("ece", "adaptive_ece", "classwise_ece"):
        assert math.isnan(evaluate(name, logits, torch.zeros(4, dtype=torch.int64))["member 0"].value)


def test_the_state_has_four_bytes_per_sample_and_row() -> None:
    logits, y = random_logits(3, 100, 10)
    state = registry.metric.get("adaptive_ece")().update(logits, Batch(y, y, y))
    assert sum(tensor.nbytes for tensor in state.values()) == 4 * 100 * 5


@pytest.mark.parametrize("name", [*NAMES, "brier_parts"])
def test_zero_bins_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="bins = '0': Input should be greater than or equal to 1"):
        get_metrics([f"{name}(bins=0)"])
