"""Streaming top-k equals a full sort, for any ties, chunks, and fraction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import partition_rules as reference
from reference.partition_rules import chunk_sizes, score_arrays, stream, top_ks

from plateaux.core.errors import DataError, DivergedError
from plateaux.data.partition.topk import select, topk_threshold


def select_top_k(scores: NDArray[np.float32], top_k: float, highest: bool, *sizes: int) -> list[set[int]]:
    chunks = stream(scores, *sizes)
    selected = list(select(chunks, topk_threshold(chunks, len(scores), top_k=top_k, highest=highest)))
    masks = np.concatenate([np.zeros((len(scores), 0), np.bool_), *selected], 1)
    return [set(np.flatnonzero(row).tolist()) for row in masks]


@pytest.mark.slow
@given(score_arrays(), top_ks, st.booleans(), chunk_sizes)
def test_streaming_top_k_equals_a_full_sort(
    scores: NDArray[np.float32], top_k: float, highest: bool, sizes: list[int]
) -> None:
    expected = [reference.extreme(row, top_k, highest=highest) for row in scores]
    assert select_top_k(scores, top_k, highest, *sizes) == expected


def test_ties_at_the_threshold_go_to_the_smaller_ids_across_chunks() -> None:
    scores = np.array([[1, 2, 2, 3, 2, 2, 0, 2]], np.float32)
    assert select_top_k(scores, 0.5, True, 3) == [{1, 2, 3, 4}]
    assert select_top_k(scores, 0.5, False, 3) == [{0, 1, 2, 6}]


@pytest.mark.parametrize("highest", [True, False])
def test_adjacent_floats_in_one_bucket_are_distinguished(highest: bool) -> None:
    bits = np.random.default_rng(0).permutation(np.arange(70_000, dtype=np.uint32) + 0x3F7FF000)
    scores = bits.view(np.float32)[None]
    order = np.argsort(scores[0])[::-1] if highest else np.argsort(scores[0])
    for top_k in (0.0001, 0.3, 0.9999):
        assert select_top_k(scores, top_k, highest, 4096) == [set(order[: int(70_000 * top_k)].tolist())]


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_a_nan_score_is_rejected_with_its_member_and_sample(nan: float) -> None:
    scores = np.ones((3, 20), np.float32)
    scores[1, 13] = nan
    with pytest.raises(DivergedError, match=r"score of member 1 for sample 13 is NaN.*Lower the learning rate"):
        select_top_k(scores, 0.5, True, 6)


def test_members_that_score_different_samples_are_rejected() -> None:
    scores = np.ones((3, 20), np.float32)
    scores[2, 17] = -1
    with pytest.raises(DataError, match="Sample 17 is scored by some members and excluded by others"):
        select_top_k(scores, 0.5, True, 6)


def test_negative_zero_equals_zero() -> None:
    scores = np.array([[1, 0, -0.0, -0.0, -1]], np.float32)
    assert select_top_k(scores, 0.5, False, 2) == [{1, 2}]
    assert select_top_k(scores, 0.75, True, 2) == [{0, 1, 2}]
