"""Packed masks of sharpness-aware sets: packing in any chunks, lookup, and summary."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import partition_rules as reference
from reference.partition_rules import InMemoryScores, chunk_sizes, stream

from plateaux.data.partition.masks import PartitionSummary, lookup, pack, write_sam_sets
from plateaux.data.partition.rules import get_rule


@given(st.integers(1, 3), st.integers(0, 70), chunk_sizes, st.integers(0, 99))
def test_lookup_inverts_packing_in_any_chunks(members: int, samples: int, sizes: list[int], seed: int) -> None:
    truth = np.random.default_rng(seed).random((members, samples)) < 0.5
    chunks = list(pack(stream(truth, *sizes)()))
    packed = np.concatenate([np.zeros((members, 0), np.uint8), *chunks], 1)
    assert packed.shape == (members, (samples + 7) // 8)
    assert np.array_equal(packed, np.packbits(truth, axis=1, bitorder="little").reshape(packed.shape))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, max(samples, 1), 128 if samples else 0))
    for row, bits in zip(truth, packed, strict=True):
        mask = lookup(bits, ids)
        assert mask.dtype == torch.bool
        assert mask.tolist() == row[ids.numpy()].tolist()


def test_the_bit_of_an_id_is_at_its_documented_position() -> None:
    bits = np.zeros(3, np.uint8)
    bits[1] = 1 << 3
    assert lookup(bits, torch.arange(24)).nonzero().flatten().tolist() == [11]


@pytest.mark.parametrize("bad_id", [-1, 24])
def test_lookup_rejects_ids_out_of_range(bad_id: int) -> None:
    with pytest.raises(IndexError):
        lookup(np.zeros(3, np.uint8), torch.tensor([0, bad_id]))


def correlated_scores(correlation: float, samples: int) -> NDArray[np.float32]:
    """Return scores of three members, log-normal like squared gradient norms."""
    rng = np.random.default_rng(1)
    common = rng.standard_normal(samples)
    log_scores = correlation**0.5 * common + (1 - correlation) ** 0.5 * rng.standard_normal((3, samples))
    return np.exp(2 * log_scores).astype(np.float32)


def summarize(scores: InMemoryScores, name: str, top_k: float) -> dict[str, object]:
    summary = write_sam_sets(scores, get_rule(name, top_k=top_k), [lambda _: None] * scores.members)
    return json.loads(json.dumps(summary, allow_nan=False))  # type: ignore[no-any-return]


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9, 1.0])
def test_streaming_rank_correlations_equal_spearmans_within_0_001(correlation: float) -> None:
    scores = correlated_scores(correlation, 100_000)
    scores[:, 77_777:88_888] = -1
    summary = PartitionSummary(InMemoryScores(scores, (4099,)))
    trained = scores[:, scores[0] >= 0]
    assert summary.trained == trained.shape[1]
    for i in range(3):
        for j in range(3):
            expected = reference.spearman(trained[i], trained[j])
            assert summary.rank_correlation[i][j] == pytest.approx(expected, abs=1e-3)


def test_rank_correlations_are_accurate_for_scores_within_a_factor_of_two() -> None:
    scores = 1 + np.random.default_rng(0).random((2, 100_000), np.float32)
    scores[1] = (scores[0] + scores[1]) / 2
    correlation = PartitionSummary(InMemoryScores(scores, (4099,))).rank_correlation[0][1]
    assert correlation == pytest.approx(reference.spearman(scores[0], scores[1]), abs=1e-3)


def test_rank_correlation_is_exact_for_scores_truncated_to_16_bits() -> None:
    scores = 1 + 0.1 * np.random.default_rng(0).random((3, 5000), np.float32)  # about 13 buckets
    scores[1] += scores[0]
    truncated = (scores.view(np.uint32) >> 16 << 16).view(np.float32)
    correlation = PartitionSummary(InMemoryScores(scores, (999,))).rank_correlation
    assert correlation[0][1] == pytest.approx(reference.spearman(truncated[0], truncated[1]), abs=1e-12)
    assert correlation[0][2] == pytest.approx(reference.spearman(truncated[0], truncated[2]), abs=1e-12)


@pytest.mark.parametrize("name", ["paper", "released", "random"])
def test_sizes_and_overlaps_equal_those_of_python_sets(name: str) -> None:
    array = correlated_scores(0.5, 1003)
    array[:, 5:50] = -1
    scores = InMemoryScores(array, (37, 100))
    summary = summarize(scores, name, 0.3)
    masks = np.concatenate(list(get_rule(name, top_k=0.3)(scores)), 1)
    sets = [set(np.flatnonzero(row).tolist()) for row in masks]
    assert summary["share"] == pytest.approx([len(s) / 958 for s in sets])
    expected = [[len(a & b) / len(a | b) for b in sets] for a in sets]
    np.testing.assert_allclose(np.array(summary["overlap"]), expected)


def test_undefined_ratios_in_a_summary_are_none() -> None:
    none = summarize(InMemoryScores(correlated_scores(0.5, 20)), "none", 0.3)
    assert none["share"] == [0, 0, 0]
    assert none["overlap"] == [[None] * 3] * 3
    equal = summarize(InMemoryScores(np.ones((2, 9), np.float32)), "all", 0.3)
    assert equal["rank_correlation"] == [[None, None]] * 2
    assert equal["overlap"] == [[1, 1]] * 2
    untrained = summarize(InMemoryScores(np.full((2, 9), -1, np.float32)), "paper", 0.3)
    assert untrained["trained"] == 0
    assert untrained["share"] == [None, None]
