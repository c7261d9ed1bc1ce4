"""Bits: packed in any chunks, looked up one by one, summed up as sets and ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import partition_rules as slow
from reference.partition_rules import Table, sizes, stream

from plateaux.data.partition.masks import PartitionSummary, lookup, pack, write_sam_sets
from plateaux.data.partition.rules import get_rule


@given(st.integers(1, 3), st.integers(0, 70), sizes, st.integers(0, 99))
def test_what_is_packed_in_any_chunks_is_looked_up(members: int, samples: int, sizes: list[int], seed: int) -> None:
    truth = np.random.default_rng(seed).random((members, samples)) < 0.5
    chunks = list(pack(stream(truth, *sizes)()))
    packed = np.concatenate([np.zeros((members, 0), np.uint8), *chunks], 1)
    assert packed.shape == (members, (samples + 7) // 8)
    assert np.array_equal(packed, np.packbits(truth, axis=1, bitorder="little").reshape(packed.shape))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, max(samples, 1), 128 if samples else 0))
    for row, bits in zip(truth, packed, strict=True):
        found = lookup(bits, ids)
        assert found.dtype == torch.bool
        assert found.tolist() == row[ids.numpy()].tolist()


def test_bit_of_an_id_is_where_it_is_said_to_be() -> None:
    bits = np.zeros(3, np.uint8)
    bits[1] = 1 << 3
    assert lookup(bits, torch.arange(24)).nonzero().flatten().tolist() == [11]


@pytest.mark.parametrize("stranger", [-1, 24])
def test_an_id_of_no_sample_is_not_looked_up(stranger: int) -> None:
    with pytest.raises(IndexError):
        lookup(np.zeros(3, np.uint8), torch.tensor([0, stranger]))


def scores_like(correlation: float, samples: int) -> NDArray[np.float32]:
    """Three members' scores, log-normal as squared norms of gradients nearly are."""
    random = np.random.default_rng(1)
    common = random.standard_normal(samples)
    own = correlation**0.5 * common + (1 - correlation) ** 0.5 * random.standard_normal((3, samples))
    return np.exp(2 * own).astype(np.float32)


def summed_up(scores: Table, name: str, top: float) -> dict[str, object]:
    found = write_sam_sets(scores, get_rule(name, top_k=top), [lambda _: None] * scores.members)
    return json.loads(json.dumps(found, allow_nan=False))  # type: ignore[no-any-return]


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9, 1.0])
def test_streamed_rank_correlations_are_spearmans_within_a_thousandth(correlation: float) -> None:
    table = scores_like(correlation, 100_000)
    table[:, 77_777:88_888] = -1
    found = PartitionSummary(Table(table, (4099,)))
    kept = table[:, table[0] >= 0]
    assert found.trained == kept.shape[1]
    for i in range(3):
        for j in range(3):
            assert found.rank_correlation[i][j] == pytest.approx(slow.spearman(kept[i], kept[j]), abs=1e-3)


def test_scores_within_a_factor_of_two_are_ranked_within_a_thousandth_too() -> None:
    table = 1 + np.random.default_rng(0).random((2, 100_000), np.float32)
    table[1] = (table[0] + table[1]) / 2
    found = PartitionSummary(Table(table, (4099,))).rank_correlation[0][1]
    assert found == pytest.approx(slow.spearman(table[0], table[1]), abs=1e-3)


def test_rank_correlation_is_exactly_that_of_the_scores_cut_to_16_bits() -> None:
    table = 1 + 0.1 * np.random.default_rng(0).random((3, 5000), np.float32)  # some 13 buckets
    table[1] += table[0]
    cut = (table.view(np.uint32) >> 16 << 16).view(np.float32)
    found = PartitionSummary(Table(table, (999,))).rank_correlation
    assert found[0][1] == pytest.approx(slow.spearman(cut[0], cut[1]), abs=1e-12)
    assert found[0][2] == pytest.approx(slow.spearman(cut[0], cut[2]), abs=1e-12)


@pytest.mark.parametrize("name", ["paper", "released", "random"])
def test_shares_and_overlaps_are_those_of_the_sets(name: str) -> None:
    table = scores_like(0.5, 1003)
    table[:, 5:50] = -1
    scores = Table(table, (37, 100))
    found = summed_up(scores, name, 0.3)
    whole = np.concatenate(list(get_rule(name, top_k=0.3)(scores)), 1)
    sets = [set(np.flatnonzero(row).tolist()) for row in whole]
    assert found["share"] == pytest.approx([len(s) / 958 for s in sets])
    truth = [[len(a & b) / len(a | b) for b in sets] for a in sets]
    np.testing.assert_allclose(np.array(found["overlap"]), truth)


def test_a_summary_of_nothing_compares_nothing() -> None:
    none = summed_up(Table(scores_like(0.5, 20)), "none", 0.3)
    assert none["share"] == [0, 0, 0]
    assert none["overlap"] == [[None] * 3] * 3
    equal = summed_up(Table(np.ones((2, 9), np.float32)), "all", 0.3)
    assert equal["rank_correlation"] == [[None, None]] * 2
    assert equal["overlap"] == [[1, 1]] * 2
    untrained = summed_up(Table(np.full((2, 9), -1, np.float32)), "paper", 0.3)
    assert untrained["trained"] == 0
    assert untrained["share"] == [None, None]
