"""Calibration errors and the bins behind them: slow twins, torchmetrics, ties, certainty, and the bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.optional import optional_import
from plateaux.core.row_names import MEAN_PROBABILITY, row_name
from plateaux.core.types import Batch
from plateaux.evaluation.confidence import (
    bin_sums,
    confidence_and_prediction,
    equal_width,
    pack_confidence,
    unpack_confidence,
)
from plateaux.evaluation.metrics.calibration import MAX_CELLS
from tests.evaluation.metrics.test_every_metric import measured, near, probabilities, table_of, twin

NAMES = ["ece", "adaptive_ece", "classwise_ece", "reliability"]
SHAPES = [(1, 50, 3), (3, 200, 10), (2, 1, 2), (2, 20, 1), (2, 40, 2)]


def slow_adaptive(p: np.ndarray, y: np.ndarray, bins: int = 15) -> float:
    """The slow twin: a sample's bin follows from how many are less confident."""
    confidence, right = p.max(-1), p.argmax(-1) == y
    home = np.array([(confidence < c).sum() * bins // len(y) for c in confidence])
    return sum(abs((right - confidence)[home == i].sum()) for i in range(bins)) / len(y)


def slow_classwise(p: np.ndarray, y: np.ndarray, bins: int = 15) -> float:
    """The slow twin: each class against the rest, bin by bin."""
    total = 0.0
    for c in range(p.shape[1]):
        for i in range(bins):
            inside = (p[:, c] >= i / bins) & ((p[:, c] < (i + 1) / bins) | (i == bins - 1))
            if inside.any():
                total += inside.mean() * abs((y == c)[inside].mean() - p[inside, c].mean())
    return total / p.shape[1]


@pytest.mark.parametrize(("members", "samples", "classes"), SHAPES)
@pytest.mark.parametrize("bins", [1, 4, 15])
def test_every_row_is_what_the_slow_twin_says(members: int, samples: int, classes: int, bins: int) -> None:
    table, y = table_of(members, samples, classes)
    twins = {"adaptive_ece": slow_adaptive, "classwise_ece": slow_classwise}
    for name, slow in twins.items():
        rows, truth = measured(name, table, y, bins=bins), probabilities(table)
        assert list(rows) == list(truth)
        for row, p in truth.items():
            # The logarithm of a confidence is kept in float32 by the one that keeps it.
            assert rows[row].value == pytest.approx(slow(p, y.numpy(), bins), rel=1e-6, abs=1e-7), (name, row)


def test_ece_is_what_torchmetrics_says_except_of_certainty() -> None:
    functional = optional_import("torchmetrics.functional.classification", extra="dev")
    table, y = table_of(1, 300, 5)
    p = table[0].softmax(-1)
    theirs = float(functional.multiclass_calibration_error(p, y, num_classes=5, n_bins=15, norm="l1"))
    assert measured("ece", table, y)["member 0"].value == pytest.approx(theirs, abs=1e-6)
    # A confidence of exactly 1 has a bin of its own there (torchmetrics#3510), here it is in the last of the bins.
    p = torch.tensor([[0.96, 0.04], [1.0, 0.0]], dtype=torch.float64)
    theirs = float(functional.multiclass_calibration_error(p, torch.tensor([0, 1]), num_classes=2, n_bins=15))
    assert theirs == pytest.approx((0.04 + 1) / 2)
    assert measured("ece", p.log()[None], torch.tensor([0, 1]))["member 0"].value == pytest.approx(abs(1 - 1.96) / 2)


@pytest.mark.parametrize("bins", range(1, 60))
def test_a_probability_on_an_edge_is_in_the_bin_above(bins: int) -> None:
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    assert equal_width(edges, bins).tolist() == [*range(bins), bins - 1]
    below = torch.nextafter(edges[1:], torch.zeros(bins, dtype=torch.float64))
    assert equal_width(below, bins).tolist() == list(range(bins))


def test_bins_of_equally_many_are_the_sorted_samples_cut_in_pieces() -> None:
    table, y = table_of(1, 150, 4)
    p = probabilities(table)["member 0"]
    order = p.max(-1).argsort()
    gap = ((p.argmax(-1) == y.numpy()) - p.max(-1))[order]
    truth = sum(abs(piece.sum()) for piece in np.array_split(gap, 15)) / 150
    assert measured("adaptive_ece", table, y)["member 0"].value == pytest.approx(truth, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_equals_may_come_in_any_order(name: str) -> None:
    chance = torch.Generator().manual_seed(0)
    table, y = torch.randint(3, (2, 60, 3), generator=chance).float(), torch.randint(3, (60,), generator=chance)
    order = torch.randperm(60, generator=chance)
    rows, other = measured(name, table, y), measured(name, table[:, order], y[order])
    for row in rows:
        assert rows[row].value == pytest.approx(other[row].value, rel=1e-12, abs=1e-15)
        assert rows[row].stderr == near(other[row].stderr, rel=1e-6, abs=1e-8)


def test_the_error_of_ece_is_the_spread_inside_bins() -> None:
    table, y = table_of(1, 200, 4)
    p = probabilities(table)["member 0"]
    confidence = p.max(-1)
    gap, home = (p.argmax(-1) == y.numpy()) - confidence, np.minimum((confidence * 15).astype(int), 14)
    inside = [gap[home == i] for i in range(15)]
    truth = math.sqrt(sum(len(g) * g.var(ddof=1) for g in inside if len(g) > 1)) / 200
    assert measured("ece", table, y)["member 0"].stderr == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("name", ["ece", "adaptive_ece", "classwise_ece"])
def test_standard_errors_are_what_the_bootstrap_finds(name: str) -> None:
    table, y = table_of(1, 1500, 3, scale=3)  # far too sure of itself: few bins change sides
    measure = registry.metric.get(name)(bins=5)
    chance = torch.Generator().manual_seed(1)
    again = []
    for _ in range(200):
        some = torch.randint(1500, (1500,), generator=chance)
        again.append(measure.compute(measure.update(table[:, some], Batch(some, y[some], some)))["member 0"].value)
    assert measured(name, table, y, bins=5)["member 0"].stderr == pytest.approx(float(np.std(again)), rel=0.2)


def test_the_classwise_error_is_the_spread_of_signed_gaps() -> None:
    table, y = table_of(2, 90, 4)
    value = measured("classwise_ece", table, y, bins=6)[MEAN_PROBABILITY]
    p = probabilities(table)[MEAN_PROBABILITY]
    gap, home = np.eye(4)[y.numpy()] - p, np.minimum((p * 6).astype(int), 5)
    sign = np.array([[np.sign(gap[home[:, c] == i, c].sum()) for i in range(6)] for c in range(4)])
    influence = [sum(sign[c, home[n, c]] * gap[n, c] for c in range(4)) / 4 for n in range(90)]
    assert value.value == pytest.approx(np.mean(influence), rel=1e-9)
    assert value.stderr == pytest.approx(np.std(influence, ddof=1) / math.sqrt(90), rel=1e-9)


def test_the_classwise_error_of_very_many_classes_has_no_error_of_its_own() -> None:
    for classes in (MAX_CELLS // 15, MAX_CELLS // 15 + 1):
        table, y = table_of(1, 30, classes)
        value = measured("classwise_ece", table, y)["member 0"]
        truth = slow_classwise(probabilities(table)["member 0"], y.numpy())
        assert value.value == pytest.approx(truth, rel=1e-9)
        assert (value.stderr is None) == (classes > MAX_CELLS // 15)


def test_the_diagram_gives_the_calibration_error_back() -> None:
    table, y = table_of(3, 200, 5)
    rows, errors = measured("reliability", table, y, bins=10), measured("ece", table, y, bins=10)
    for row, value in errors.items():
        bins = [i for i in range(10) if row_name(row, f"bin {i}", "share") in rows]
        share, confidence, accuracy = (
            np.array([rows[row_name(row, f"bin {i}", what)].value for i in bins])
            for what in ("share", "confidence", "accuracy")
        )
        assert share.sum() == pytest.approx(1)
        assert (share * abs(accuracy - confidence)).sum() == pytest.approx(value.value)
        assert all(i / 10 <= c <= (i + 1) / 10 for i, c in zip(bins, confidence, strict=True))


def test_the_diagram_by_hand() -> None:
    p = torch.tensor([[0.55, 0.45], [0.59, 0.41], [0.0, 1.0], [0.05, 0.95]], dtype=torch.float64)
    rows = measured("reliability", p.log()[None], torch.tensor([0, 1, 1, 1]), bins=10)
    assert list(rows) == [
        f"member 0 · bin {i} · {what}" for i in (5, 9) for what in ("share", "confidence", "accuracy")
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
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("members", [1, 3])
def test_certainty_is_either_deserved_or_not(name: str, right: bool, members: int) -> None:
    table = torch.zeros(members, 6, 3)
    table[..., 0] = 1e4
    y = torch.zeros(6, dtype=torch.int64) if right else torch.ones(6, dtype=torch.int64)
    wrong = 2 / 3 if name == "classwise_ece" else 1.0  # two of the three classes are wrong all the time
    for value in measured(name, table, y).values():
        assert value.value == pytest.approx(0.0 if right else wrong, abs=1e-6)
        assert value.stderr == pytest.approx(0.0, abs=1e-6)


def test_a_wrong_certainty_is_still_wrong_when_processes_add_up_their_rows() -> None:
    packed = pack_confidence(torch.zeros(2), torch.tensor([True, False]))
    doubt, right = unpack_confidence(packed + torch.zeros(2))  # a minus zero would come out as plus zero
    assert right.tolist() == [True, False]
    assert doubt.neg().exp().tolist() == [1.0, 1.0]
    assert doubt[0] == doubt[1]


@given(st.lists(st.tuples(st.floats(-20, 0, width=32), st.booleans()), min_size=1))
def test_a_confidence_and_its_rightness_fit_in_one_number(pairs: list[tuple[float, bool]]) -> None:
    log_confidence, right = torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs])
    packed = pack_confidence(log_confidence, right)
    assert packed.dtype == torch.float32
    doubt, again = unpack_confidence(packed)
    assert again.tolist() == right.tolist()
    torch.testing.assert_close(-doubt, log_confidence.double(), rtol=0, atol=2e-38)


def test_confidences_that_round_to_one_are_still_told_apart() -> None:
    log_confidence = torch.tensor([-1e-12, -1e-13], dtype=torch.float64)
    assert log_confidence.exp().float().unique().numel() == 1
    assert unpack_confidence(pack_confidence(log_confidence, torch.tensor([True, True])))[0].diff() < 0


def test_a_probability_that_rounds_above_one_is_one() -> None:
    best, guess = confidence_and_prediction(torch.tensor([[[-20.0, 1e-7]]]))
    assert (best.item(), guess.item()) == (0.0, 1)


def test_sums_are_taken_bin_by_bin() -> None:
    home = torch.tensor([[0, 2, 2], [1, 1, 1]])
    sums = bin_sums(home, [torch.ones(2, 3), torch.tensor([[1.0, 2, 3], [4, 5, 6]])], 3)
    assert sums[..., 0].tolist() == [[1, 0, 2], [0, 3, 0]]
    assert sums[..., 1].tolist() == [[1, 0, 5], [0, 15, 0]]


@given(members=st.integers(1, 3), samples=st.integers(1, 30), classes=st.integers(1, 5), seed=st.integers(0, 99),
       data=st.data())  # fmt: skip
@settings(deadline=None, max_examples=25)
def test_how_samples_are_cut_into_batches_does_not_matter(
    members: int, samples: int, classes: int, seed: int, data: st.DataObject
) -> None:
    table, y = table_of(members, samples, classes, seed=seed)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, samples), max_size=4))))
    for name in NAMES:
        whole, parts = measured(name, table, y), measured(name, table, y, cuts=cuts)
        for row in whole:
            assert parts[row].value == pytest.approx(whole[row].value, rel=1e-12, abs=1e-14)
            assert parts[row].stderr == near(whole[row].stderr, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_members_does_not_matter(name: str) -> None:
    table, y = table_of(3, 60, 4)
    rows, other = measured(name, table, y), measured(name, table[[2, 0, 1]], y)
    for row, value in rows.items():
        there = other[row.replace("member 0", "member 1")] if row.startswith("member 0") else None
        there = other[row] if row.startswith(MEAN_PROBABILITY) else there
        assert there is None or value.value == pytest.approx(there.value, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_few_digits_are_measured_in_many(dtype: torch.dtype) -> None:
    table, y = table_of(2, 300, 10, scale=4)
    table = table.to(dtype)
    p = probabilities(table.double())
    for row in p:
        assert measured("adaptive_ece", table, y)[row].value == pytest.approx(
            slow_adaptive(p[row], y.numpy()), abs=1e-5
        )
        assert measured("classwise_ece", table, y)[row].value == pytest.approx(
            slow_classwise(p[row], y.numpy()), abs=1e-5
        )


def test_one_sample_has_no_spread() -> None:
    table, y = table_of(2, 1, 4)
    p = probabilities(table)["member 0"]
    for name in ("ece", "adaptive_ece"):
        value = measured(name, table, y)["member 0"]
        assert value.value == pytest.approx(twin("ece", p, y.numpy()), abs=1e-6)
        assert value.stderr == 0
    assert measured("classwise_ece", table, y)["member 0"].stderr in (None, pytest.approx(0, abs=1e-8))


def test_what_is_no_number_stays_none() -> None:
    table = torch.full((1, 4, 3), float("nan"))
    for name in ("ece", "adaptive_ece", "classwise_ece"):
        assert math.isnan(measured(name, table, torch.zeros(4, dtype=torch.int64))["member 0"].value)


def test_no_more_than_four_bytes_are_kept_of_a_sample_and_row() -> None:
    table, y = table_of(3, 100, 10)
    kept = registry.metric.get("adaptive_ece")().update(table, Batch(y, y, y))
    assert sum(tensor.nbytes for tensor in kept.values()) == 4 * 100 * 5


@pytest.mark.parametrize("name", NAMES)
def test_no_bins_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="bins = 0"):
        registry.metric.get(name)(bins=0)


def test_every_measure_says_how_it_is_to_be_read() -> None:
    found = {name: registry.metric.get(name)(bins=7) for name in NAMES}
    assert {measure.group for measure in found.values()} == {"uncertainty"}
    assert all(measure.percent and measure.min_members == 1 for measure in found.values())
    assert [measure.higher_is_better for measure in found.values()] == [False, False, False, None]
    assert all("7" in measure.definition for measure in found.values())
