"""Packed confidences: sort order, groups of ties, bins, and results that do not depend on the chunk size."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import selective as reference
from torch import Tensor

from plateaux.core import registry
from plateaux.core.types import Estimate
from plateaux.evaluation import confidence
from plateaux.evaluation.confidence import (
    decode_confidence,
    equal_mass,
    has_nan,
    pack_confidence,
    sort_by_confidence,
    tie_groups,
)
from plateaux.evaluation.metrics.selective import Moments, _harmonic

NAMES = ["aurc", "e_aurc", "risk_at_coverage", "adaptive_ece"]
Samples = list[tuple[float, bool]]

some_samples = st.lists(st.tuples(st.sampled_from([0.0, 1e-6, 0.1, 0.7, 2.0]), st.booleans()), min_size=1, max_size=30)


def pack_samples(samples: Samples) -> Tensor:
    return pack_confidence(
        -torch.tensor([neg_log for neg_log, _ in samples]), torch.tensor([correct for _, correct in samples])
    )


def random_packed(count: int, levels: int, *, seed: int = 0) -> Tensor:
    """Packed confidences with this number of levels; a lower confidence has a lower accuracy."""
    generator = torch.Generator().manual_seed(seed)
    neg_log = torch.randint(1, levels + 1, (count,), generator=generator) / levels
    return pack_confidence(-neg_log, torch.rand(count, generator=generator) > neg_log**2)


def compute(name: str, packed: Tensor) -> Estimate:
    return registry.metric.get(name)().compute({"packed": packed[:, None]})["member 0"]


@given(some_samples)
@settings(max_examples=50)
def test_sorting_starts_with_the_most_confident_and_is_lossless(samples: Samples) -> None:
    packed = pack_samples(samples)
    before = packed.clone()
    neg_log, correct = decode_confidence(sort_by_confidence(packed))
    assert torch.equal(packed, before)  # the input is not modified
    assert neg_log.diff().ge(0).all()
    sorted_pairs = sorted(zip(packed.abs().tolist(), (packed < 0).tolist(), strict=True))
    assert list(zip(neg_log.tolist(), (~correct).tolist(), strict=True)) == sorted_pairs


@pytest.mark.parametrize("sign", [1, -1])
def test_nan_is_sorted_last(sign: int) -> None:
    packed = torch.tensor([0.5, sign * float("nan"), -float("inf"), 0.1])
    codes = sort_by_confidence(packed)
    assert has_nan(codes)
    assert not has_nan(codes[:-1])
    assert decode_confidence(codes)[0][:3].tolist() == pytest.approx([0.1, 0.5, float("inf")])


@given(some_samples, st.integers(1, 9))
@settings(max_examples=80)
def test_no_group_of_ties_is_split(samples: Samples, chunk_size: int) -> None:
    packed = pack_samples(samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confidence, "CHUNK_SIZE", chunk_size)
        chunks = list(tie_groups(sort_by_confidence(packed)))
    neg_log = packed.abs().numpy().astype(np.float64)
    for ties in chunks:
        assert len(ties.start) <= chunk_size
    levels = np.concatenate([ties.neg_log_confidence for ties in chunks])
    assert levels.tolist() == np.unique(neg_log).tolist()
    assert np.concatenate([ties.size for ties in chunks]).tolist() == [(neg_log == d).sum() for d in levels]
    assert np.concatenate([ties.start for ties in chunks]).tolist() == [(neg_log < d).sum() for d in levels]
    incorrect = packed.numpy() < 0
    assert np.concatenate([ties.incorrect for ties in chunks]).tolist() == [
        incorrect[neg_log == d].sum() for d in levels
    ]


@given(some_samples, st.integers(1, 9))
@settings(max_examples=60)
def test_the_chunk_size_does_not_matter(samples: Samples, chunk_size: int) -> None:
    packed = pack_samples(samples)
    for name in NAMES:
        full = compute(name, packed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(confidence, "CHUNK_SIZE", chunk_size)
            cut = compute(name, packed)
        assert cut.value == pytest.approx(full.value, rel=1e-12, abs=1e-14)
        assert cut.stderr == (None if full.stderr is None else pytest.approx(full.stderr, rel=1e-9, abs=1e-12))


@pytest.mark.parametrize("levels", [2, 1000, 1 << 23])
def test_many_samples_equal_the_reference(levels: int) -> None:
    packed = random_packed(150_000, levels)
    neg_log, incorrect = packed.abs().double().numpy(), (packed < 0).double().numpy()
    (area, without), (min_members, least_without) = reference.areas(neg_log, incorrect), reference.best(incorrect)
    calibration = reference.calibration(neg_log, incorrect, 15)
    truth = {
        "aurc": (area, reference.jackknife(without)),
        "e_aurc": (area - min_members, reference.jackknife(without - least_without)),
        "adaptive_ece": calibration,
    }
    for name, (number, error) in truth.items():
        estimate = compute(name, packed)
        assert estimate.value == pytest.approx(number, rel=1e-10), name
        assert estimate.stderr == pytest.approx(error, rel=1e-7), name


def test_aurc_with_equal_confidences_is_the_error_rate() -> None:
    packed = random_packed(200_000, 1)
    assert compute("aurc", packed).value == pytest.approx(float((packed < 0).double().mean()), rel=1e-12)


@pytest.mark.parametrize("count", [0, 1, 2, 9, 10, 1000, 10**6])
def test_harmonic_numbers_are_sums_of_reciprocals(count: int) -> None:
    truth = float((1 / np.arange(count, 0, -1, dtype=np.longdouble)).sum())
    assert _harmonic(count) == pytest.approx(truth, rel=1e-14, abs=1e-15)


def test_memory_does_not_grow_with_the_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confidence, "CHUNK_SIZE", 1 << 12)

    def peak_memory(name: str, count: int) -> int:
        codes = random_packed(count, 1 << 23)
        metric = registry.metric.get(name)()
        tracemalloc.start()
        metric.compute({"packed": codes[:, None]})
        peak = tracemalloc.get_traced_memory()[1]  # NumPy only: the sorted copy of a row belongs to torch
        tracemalloc.stop()
        return peak

    for name in NAMES:
        assert peak_memory(name, 80_000) < 1.1 * peak_memory(name, 20_000), name


def assign_bins(values: list[float], bins: int) -> list[int]:
    """Return the equal-mass bin of every confidence."""
    log = torch.tensor(values).log()
    ties, *rest = tie_groups(sort_by_confidence(pack_confidence(log, torch.ones(len(values), dtype=torch.bool))))
    assert not rest
    neg_logs = pack_confidence(log, torch.ones(len(values), dtype=torch.bool)).double().tolist()
    bin_indices = dict(zip(ties.neg_log_confidence.tolist(), equal_mass(ties, len(values), bins).tolist(), strict=True))
    return [bin_indices[neg_log] for neg_log in neg_logs]


@given(st.lists(st.sampled_from([0.1, 0.2, 0.5, 0.9, 1.0]), min_size=1, max_size=40), st.integers(1, 20))
@settings(max_examples=60)
def test_ties_share_the_bin_of_their_lowest_rank(values: list[float], bins: int) -> None:
    truth = [sum(other < value for other in values) * bins // len(values) for value in values]
    assert assign_bins(values, bins) == truth


def test_the_bins_of_tied_confidences_equal_hand_computed_values() -> None:
    assert assign_bins([0.9, 0.2, 0.9, 0.4, 0.9, 0.9], 3) == [1, 0, 1, 0, 1, 1]


@given(samples=st.integers(1, 60), bins=st.integers(1, 20))
@settings(max_examples=40)
def test_without_ties_bins_have_equal_size(samples: int, bins: int) -> None:
    counts = np.bincount(assign_bins([(i + 1) / samples for i in range(samples)], bins), minlength=bins)
    assert counts.max() - counts.min() <= 1


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(0, 4)), min_size=1, max_size=12), st.integers(0, 12))
@settings(max_examples=60)
def test_merged_moments_are_those_of_all_values(pairs: list[tuple[float, int]], cut: int) -> None:
    values, weights = np.array([v for v, _ in pairs]), np.array([float(w) for _, w in pairs])
    both = Moments.from_weighted(values[:cut], weights[:cut]).merge(
        Moments.from_weighted(values[cut:], weights[cut:]).shift(0.0)
    )
    numbers = values.repeat(weights.astype(int))
    assert both.count == len(numbers)
    if len(numbers):
        assert (both.mean, both.squares) == pytest.approx(
            (numbers.mean(), ((numbers - numbers.mean()) ** 2).sum()), abs=1e-9
        )
