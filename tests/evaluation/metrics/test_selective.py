"""Risk-coverage metrics against reference implementations: orders of ties, the jackknife, the bootstrap."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.row_names import MEAN_PROBABILITY
from plateaux.core.types import Batch
from tests.evaluation.metrics.test_every_metric import evaluate, probabilities, random_logits

NAMES = ["aurc", "e_aurc", "risk_at_coverage"]


def area(incorrect: np.ndarray) -> float:
    """Reference: the mean error rate of the first 1, 2, 3, ... samples in this order."""
    return float(np.mean([incorrect[:k].mean() for k in range(1, len(incorrect) + 1)]))


def reference(confidence: np.ndarray, incorrect: np.ndarray) -> dict[str, float]:
    """Reference of all three metrics, without ties."""
    ordered = incorrect[np.argsort(-confidence)].astype(float)
    covered = math.ceil(round(0.8 * len(incorrect), 6))
    return {"aurc": area(ordered), "e_aurc": area(ordered) - area(np.sort(ordered)),
            "risk_at_coverage": float(ordered[:covered].mean())}  # fmt: skip


def logits_from_confidences(confidence: list[float], incorrect: list[bool]) -> tuple[Tensor, Tensor]:
    """Logits of one member for two classes that predict class 0 with these confidences above 0.5."""
    p = torch.tensor(confidence, dtype=torch.float64)
    return torch.stack([p.log(), (1 - p).log()], -1)[None], torch.tensor(incorrect).long()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("members", "samples", "classes"), [(1, 50, 3), (3, 120, 10), (2, 1, 2), (2, 7, 2)])
def test_every_row_equals_the_reference(name: str, members: int, samples: int, classes: int) -> None:
    logits, y = random_logits(members, samples, classes)
    rows, truth = evaluate(name, logits, y), probabilities(logits)
    assert list(rows) == list(truth)
    for row, p in truth.items():
        expected = reference(p.max(-1), p.argmax(-1) != y.numpy())[name]
        assert rows[row].value == pytest.approx(expected, rel=1e-9, abs=1e-14), row


def test_metrics_of_a_small_example_equal_hand_computed_values() -> None:
    logits, y = logits_from_confidences([0.9, 0.6, 0.8, 0.7], [False, True, True, False])
    # risks of the first 1, 2, 3, 4: 0, 1/2, 1/3, 1/2; the best order has 0, 0, 1/3, 1/2
    assert evaluate("aurc", logits, y)["member 0"].value == pytest.approx(4 / 3 / 4)
    assert evaluate("e_aurc", logits, y)["member 0"].value == pytest.approx((4 / 3 - 5 / 6) / 4)
    risk = evaluate("risk_at_coverage", logits, y, coverage=0.7)["member 0"]
    assert (risk.value, risk.stderr) == pytest.approx((1 / 3, math.sqrt(2 / 9 / 3)))


@given(st.lists(st.tuples(st.sampled_from([0.6, 0.7, 1.0]), st.booleans()), min_size=1, max_size=6))
@settings(max_examples=25)
def test_the_result_with_ties_is_the_mean_over_all_orders_of_the_ties(pairs: list[tuple[float, bool]]) -> None:
    confidence, incorrect = [c for c, _ in pairs], [w for _, w in pairs]
    logits, y = logits_from_confidences(confidence, incorrect)
    orders = [o for o in permutations(range(len(pairs))) if all(
        confidence[a] >= confidence[b] for a, b in pairwise(o))]  # fmt: skip
    values = [np.array(incorrect, dtype=float)[list(order)] for order in orders]
    covered = math.ceil(round(0.8 * len(pairs), 6))
    best = area(np.sort(np.array(incorrect, dtype=float)))
    assert evaluate("aurc", logits, y)["member 0"].value == pytest.approx(np.mean([area(v) for v in values]))
    assert evaluate("e_aurc", logits, y)["member 0"].value == pytest.approx(
        np.mean([area(v) for v in values]) - best, abs=1e-14
    )
    assert evaluate("risk_at_coverage", logits, y)["member 0"].value == pytest.approx(
        np.mean([v[:covered].mean() for v in values])
    )


@given(st.lists(st.tuples(st.sampled_from([0.6, 0.7, 0.8, 0.9, 1.0]), st.booleans()), min_size=2, max_size=8))
@settings(max_examples=30)
def test_the_jackknife_leaves_out_one_sample_at_a_time(pairs: list[tuple[float, bool]]) -> None:
    logits, y = logits_from_confidences([c for c, _ in pairs], [w for _, w in pairs])
    count = len(pairs)
    for name in ("aurc", "e_aurc"):
        without = [
            evaluate(name, logits[:, others], y[others])["member 0"].value
            for others in (torch.arange(count) != left for left in range(count))
        ]
        truth = math.sqrt((count - 1) * np.var(without))
        assert evaluate(name, logits, y)["member 0"].stderr == pytest.approx(truth, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_standard_errors_agree_with_the_bootstrap(name: str) -> None:
    logits, y = random_logits(1, 500, 4)
    logits = logits + 2 * torch.nn.functional.one_hot(y, 4)
    metric = registry.metric.get(name)()
    generator = torch.Generator().manual_seed(1)
    resampled = []
    for _ in range(300):
        ids = torch.randint(500, (500,), generator=generator)
        resampled.append(metric.compute(metric.update(logits[:, ids], Batch(ids, y[ids], ids)))["member 0"].value)
    # The binomial error treats the covered samples as fixed.
    tolerance = 0.25 if name == "risk_at_coverage" else 0.15
    assert evaluate(name, logits, y)["member 0"].stderr == pytest.approx(float(np.std(resampled)), rel=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("correct", [True, False])
def test_certain_predictions_all_correct_or_all_incorrect(
    name: str, dtype: torch.dtype, members: int, correct: bool
) -> None:
    logits = torch.zeros(members, 9, 3, dtype=dtype)
    logits[..., 1] = 1e4
    y = torch.full((9,), 1 if correct else 2)
    for value in evaluate(name, logits, y).values():
        assert value.value == pytest.approx(0 if correct or name == "e_aurc" else 1, abs=1e-14)
        assert value.stderr == pytest.approx(0, abs=1e-12)


def test_perfectly_ranked_confidence_has_no_excess_aurc() -> None:
    logits, y = logits_from_confidences([0.95, 0.9, 0.85, 0.7, 0.6], [False, False, False, True, True])
    assert evaluate("e_aurc", logits, y)["member 0"].value == pytest.approx(0, abs=1e-15)
    assert evaluate("risk_at_coverage", logits, y, coverage=0.6)["member 0"].value == 0


def test_the_risk_at_full_coverage_is_the_error_rate() -> None:
    logits, y = random_logits(3, 90, 5)
    risks, accuracies = evaluate("risk_at_coverage", logits, y, coverage=1.0), evaluate("accuracy", logits, y)
    for row, value in risks.items():
        assert value.value == pytest.approx(1 - accuracies[row].value)
        assert value.stderr == pytest.approx(accuracies[row].stderr)


def test_constant_confidence_gives_the_error_rate() -> None:
    logits = torch.tensor([[[1.0, 0.0]]]).expand(1, 8, 2)
    y = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0])
    assert evaluate("aurc", logits, y)["member 0"].value == pytest.approx(1 / 4)


def test_an_integer_number_of_covered_samples_is_not_rounded_up() -> None:
    confidence = np.linspace(0.99, 0.51, 100).tolist()
    logits, y = logits_from_confidences(confidence, [i == 7 for i in range(100)])
    assert 0.07 * 100 > 7
    assert evaluate("risk_at_coverage", logits, y, coverage=0.07)["member 0"].value == 0
    assert evaluate("risk_at_coverage", logits, y, coverage=0.071)["member 0"].value == 1 / 8
    assert evaluate("risk_at_coverage", logits, y, coverage=1e-12)["member 0"].value == 0


@pytest.mark.parametrize("coverage", [0.0, -0.5, 1.01, float("nan")])
def test_an_invalid_coverage_is_refused(coverage: float) -> None:
    with pytest.raises(RecipeError, match="above 0 and at most 1"):
        registry.metric.get("risk_at_coverage")(coverage=coverage)


@given(members=st.integers(1, 3), samples=st.integers(1, 30), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=20)
def test_the_batch_size_does_not_matter(members: int, samples: int, seed: int, data: st.DataObject) -> None:
    logits, y = random_logits(members, samples, 3, seed=seed)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, samples), max_size=4))))
    for name in NAMES:
        assert evaluate(name, logits, y, cuts=cuts) == evaluate(name, logits, y)  # the same packed values, bit for bit


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_members_and_samples_does_not_matter(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, y = torch.randint(3, (3, 60, 4), generator=generator).double(), torch.randint(4, (60,), generator=generator)
    order = torch.randperm(60, generator=generator)
    rows, other = evaluate(name, logits, y), evaluate(name, logits[[2, 0, 1]][:, order], y[order])
    for original, permuted in {
        "member 0": "member 1",
        "member 2": "member 0",
        MEAN_PROBABILITY: MEAN_PROBABILITY,
    }.items():
        assert rows[original].value == pytest.approx(other[permuted].value, rel=1e-9)
        assert rows[original].stderr == pytest.approx(other[permuted].stderr, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_nan_logits_give_nan(name: str) -> None:
    logits = torch.zeros(1, 4, 3)
    logits[0, 2] = float("nan")
    assert math.isnan(evaluate(name, logits, torch.zeros(4, dtype=torch.int64))["member 0"].value)


def test_the_state_has_four_bytes_per_sample_and_row() -> None:
    logits, y = random_logits(3, 100, 10)
    for name in NAMES:
        state = registry.metric.get(name)().update(logits, Batch(y, y, y))
        assert sum(tensor.nbytes for tensor in state.values()) == 4 * 100 * 5
