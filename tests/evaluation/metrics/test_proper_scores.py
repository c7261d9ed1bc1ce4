"""Decomposition of the Brier score against a reference implementation, by hand, and in known cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plateaux.core import registry
from plateaux.core.row_names import row_name
from plateaux.core.types import Batch, Estimate
from tests.evaluation.metrics.test_every_metric import evaluate, probabilities, random_logits

PARTS = ["reliability", "resolution", "uncertainty", "remainder"]


def brier_parts(logits: Tensor, y: Tensor, row: str = "member 0", **options: int) -> dict[str, Estimate]:
    rows = evaluate("brier_parts", logits, y, **options)
    return {part: rows[row_name(row, part)] for part in PARTS}


def reference(p: np.ndarray, y: np.ndarray, bins: int) -> dict[str, float]:
    """Reference: Murphy's decomposition of every class against the rest, bin by bin."""
    reliability = resolution = uncertainty = score = 0.0
    for c in range(p.shape[1]):
        label, forecast = (y == c).astype(float), p[:, c]
        uncertainty += label.mean() * (1 - label.mean())
        score += np.mean((forecast - label) ** 2)
        for i in range(bins):
            inside = (forecast >= i / bins) & ((forecast < (i + 1) / bins) | (i == bins - 1))
            if inside.any():
                reliability += inside.mean() * (forecast[inside].mean() - label[inside].mean()) ** 2
                resolution += inside.mean() * (label[inside].mean() - label.mean()) ** 2
    remainder = score - reliability + resolution - uncertainty
    return {"reliability": reliability, "resolution": resolution, "uncertainty": uncertainty, "remainder": remainder}


@pytest.mark.parametrize(("members", "samples", "classes"), [(1, 50, 3), (3, 120, 10), (2, 1, 2), (2, 20, 1)])
@pytest.mark.parametrize("bins", [1, 15])
def test_the_decomposition_equals_the_reference(members: int, samples: int, classes: int, bins: int) -> None:
    logits, y = random_logits(members, samples, classes)
    rows = evaluate("brier_parts", logits, y, bins=bins)
    truth = probabilities(logits)
    assert list(rows) == [row_name(row, part) for row in truth for part in PARTS]
    for row, p in truth.items():
        for part, number in reference(p, y.numpy(), bins).items():
            assert rows[row_name(row, part)].value == pytest.approx(number, rel=1e-9, abs=1e-14), (row, part)


@given(members=st.integers(1, 3), samples=st.integers(1, 40), classes=st.integers(1, 6), bins=st.integers(1, 30),
       seed=st.integers(0, 999), half=st.booleans())  # fmt: skip
@settings(max_examples=30)
def test_the_terms_of_the_decomposition_sum_to_the_brier_score(
    members: int, samples: int, classes: int, bins: int, seed: int, half: bool
) -> None:
    logits, y = random_logits(members, samples, classes, seed=seed, scale=4)
    logits = logits.half() if half else logits
    rows = evaluate("brier_parts", logits, y, bins=bins)
    for row, value in evaluate("brier", logits, y).items():
        reliability, resolution, uncertainty, remainder = (rows[row_name(row, part)].value for part in PARTS)
        assert reliability - resolution + uncertainty + remainder == pytest.approx(value.value, rel=1e-14, abs=1e-14)
        assert min(reliability, resolution, uncertainty) >= 0


def test_certain_and_correct_predictions_have_full_resolution() -> None:
    y = torch.tensor([0, 1, 2, 2])
    parts = brier_parts(1e4 * torch.nn.functional.one_hot(y, 3).double()[None], y)
    uncertainty = 1 - (1 / 16 + 1 / 16 + 1 / 4)
    assert {part: value.value for part, value in parts.items()} == pytest.approx(
        {"reliability": 0, "resolution": uncertainty, "uncertainty": uncertainty, "remainder": 0}, abs=1e-15
    )


def test_certain_and_incorrect_predictions_are_unreliable() -> None:
    y = torch.tensor([0, 1, 0, 1])
    parts = brier_parts(1e4 * torch.nn.functional.one_hot(1 - y, 2).double()[None], y)
    assert parts["reliability"].value == 2
    assert parts["resolution"].value == parts["uncertainty"].value == 1 / 2


def test_class_frequencies_are_reliable_without_resolution() -> None:
    y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
    logits = torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64).log().expand(1, 10, 3)
    parts = brier_parts(logits, y)
    assert [parts[part].value for part in ("reliability", "resolution", "remainder")] == pytest.approx(
        [0, 0, 0], abs=1e-15
    )
    assert parts["uncertainty"].value == pytest.approx(1 - 0.09 - 0.04 - 0.25)


def test_the_standard_error_of_uncertainty_agrees_with_the_bootstrap() -> None:
    generator = np.random.default_rng(0)
    y = torch.from_numpy(generator.choice(3, 300, p=[0.6, 0.3, 0.1]))
    resampled = [
        1 - ((np.bincount(y[i], minlength=3) / 300) ** 2).sum() for i in generator.integers(0, 300, (800, 300))
    ]
    parts = brier_parts(torch.zeros(1, 300, 3), y)
    assert parts["uncertainty"].stderr == pytest.approx(float(np.std(resampled)), rel=0.1)
    assert [parts[part].stderr for part in ("reliability", "resolution", "remainder")] == [None] * 3


def test_the_uncertainty_of_one_sample_is_zero() -> None:
    assert brier_parts(*random_logits(1, 1, 4))["uncertainty"] == Estimate(0.0, 0.0)


@given(samples=st.integers(2, 30), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=20)
def test_the_batch_size_does_not_matter(samples: int, seed: int, data: st.DataObject) -> None:
    logits, y = random_logits(2, samples, 4, seed=seed)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, samples), max_size=4))))
    full, parts = evaluate("brier_parts", logits, y), evaluate("brier_parts", logits, y, cuts=cuts)
    for row in full:
        assert parts[row].value == pytest.approx(full[row].value, rel=1e-12, abs=1e-14)


def test_the_order_of_members_does_not_matter() -> None:
    logits, y = random_logits(3, 60, 5)
    rows, other = evaluate("brier_parts", logits, y), evaluate("brier_parts", logits[[2, 0, 1]], y)
    for part in PARTS:
        assert rows[row_name("member 0", part)] == other[row_name("member 1", part)]


def test_the_state_stays_small_with_many_classes() -> None:
    logits, y = torch.randn(2, 8, 1000), torch.zeros(8, dtype=torch.int64)
    sums = registry.metric.get("brier_parts")().update(logits, Batch(y, y, y))
    assert sum(tensor.nbytes for tensor in sums.values()) < 2e6


def test_nll_and_brier_equal_their_definitions_in_nats() -> None:
    logits, y = random_logits(2, 40, 5)
    for row, p in probabilities(logits).items():
        losses = -np.log(p[np.arange(40), y.numpy()])
        found = evaluate("nll", logits, y)[row]
        assert found.value == pytest.approx(losses.mean(), rel=1e-6)
        assert found.stderr == pytest.approx(losses.std(ddof=1) / 40**0.5, rel=1e-6)
        distances = ((p - np.eye(5)[y.numpy()]) ** 2).sum(1)
        assert evaluate("brier", logits, y)[row].value == pytest.approx(distances.mean(), rel=1e-6)
