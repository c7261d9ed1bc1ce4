"""Counting finds what sorting finds: any ties, any chunks, any share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import partition_rules as slow
from reference.partition_rules import sizes, stream, tables, tops

from plateaux.core.errors import DataError, DivergedError
from plateaux.data.partition.topk import select, topk_threshold


def picked(table: NDArray[np.float32], top: float, highest: bool, *sizes: int) -> list[set[int]]:
    passes = stream(table, *sizes)
    found = list(select(passes, topk_threshold(passes, len(table), top_k=top, highest=highest)))
    whole = np.concatenate([np.zeros((len(table), 0), np.bool_), *found], 1)
    return [set(np.flatnonzero(row).tolist()) for row in whole]


@given(tables(), tops, st.booleans(), sizes)
def test_counting_picks_what_a_full_sort_picks(
    table: NDArray[np.float32], top: float, highest: bool, sizes: list[int]
) -> None:
    assert picked(table, top, highest, *sizes) == [slow.extreme(row, top, highest=highest) for row in table]


def test_ties_at_the_edge_go_to_the_smaller_ids_across_chunks() -> None:
    table = np.array([[1, 2, 2, 3, 2, 2, 0, 2]], np.float32)
    assert picked(table, 0.5, True, 3) == [{1, 2, 3, 4}]
    assert picked(table, 0.5, False, 3) == [{0, 1, 2, 6}]


@pytest.mark.parametrize("highest", [True, False])
def test_neighbouring_floats_in_one_bucket_are_told_apart(highest: bool) -> None:
    words = np.random.default_rng(0).permutation(np.arange(70_000, dtype=np.uint32) + 0x3F7FF000)
    table = words.view(np.float32)[None]
    order = np.argsort(table[0])[::-1] if highest else np.argsort(table[0])
    for top in (0.0001, 0.3, 0.9999):
        assert picked(table, top, highest, 4096) == [set(order[: int(70_000 * top)].tolist())]


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_a_score_that_is_not_a_number_is_refused_by_member_and_sample(nan: float) -> None:
    table = np.ones((3, 20), np.float32)
    table[1, 13] = nan
    with pytest.raises(DivergedError, match=r"Member 1's score of sample 13 is not a number.*lower the learning rate"):
        picked(table, 0.5, True, 6)


def test_members_that_were_trained_on_other_samples_are_refused() -> None:
    table = np.ones((3, 20), np.float32)
    table[2, 17] = -1
    with pytest.raises(DataError, match="Sample 17 is scored by some members and left out by others"):
        picked(table, 0.5, True, 6)


def test_minus_zero_is_zero() -> None:
    table = np.array([[1, 0, -0.0, -0.0, -1]], np.float32)
    assert picked(table, 0.5, False, 2) == [{1, 2}]
    assert picked(table, 0.75, True, 2) == [{0, 1, 2}]
