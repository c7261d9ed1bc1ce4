"""The k highest or lowest of any number of scores, exactly, by counting instead of sorting.

A float32 that is not negative is ordered like its 32 bits read as a whole number. One pass counts the upper 16 bits,
which says in which of 32768 buckets the k-th score lies; a second counts the lower 16 bits inside that bucket. What is
held is two tables of counts for each member, however many samples there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import DataError, DivergedError

Stream = Callable[[], Iterable[NDArray[np.float32]]]
"""Starts a pass over scores `[M, b]` in order of ids."""

SIGN = np.uint32(1 << 31)
HALF = 1 << 16


@dataclass(frozen=True, slots=True)
class TopK:
    """Where the chosen scores of every member end."""

    thresholds: NDArray[np.uint32]  # [M] the last score that is chosen, as `_words` writes it
    ties: NDArray[np.int64]  # [M] how many of the samples with just that score are chosen: those of the smallest ids
    highest: bool


def topk_threshold(stream: Stream, members: int, *, top_k: float, highest: bool) -> TopK:
    """Find where the int(n * top) highest or lowest of n scores end, for every member, in two passes.

    A negative score takes part in nothing; infinity is a score like any other.
    """
    upper = np.zeros((members, HALF // 2), np.int64)  # the other half has the sign bit
    start = 0
    for scores in stream():
        _check(scores, start)
        start += scores.shape[1]
        for row, count in zip(_words(scores, highest), upper, strict=True):
            count += np.bincount(row >> 16, minlength=HALF)[: HALF // 2]
    bucket, left = _reached(upper, (upper.sum(1) * top_k).astype(np.int64))
    lower = np.zeros((members, HALF), np.int64)
    for scores in stream():
        for row, count, number in zip(_words(scores, highest), lower, bucket, strict=True):
            count += np.bincount(row[row >> 16 == number] & 0xFFFF, minlength=HALF)
    within, ties = _reached(lower, left)
    return TopK((bucket << 16 | within).astype(np.uint32), ties, highest)


def select(stream: Stream, edge: TopK) -> Iterator[NDArray[np.bool_]]:
    """Pass over the scores once more and say of each whether it is chosen; chunks are as long as the scores'."""
    left = edge.ties.copy()
    for scores in stream():
        words = _words(scores, edge.highest)
        took = words < edge.thresholds[:, None]
        for row, word, i in zip(words, edge.thresholds, range(len(left)), strict=True):
            if left[i]:
                tied = np.flatnonzero(row == word)[: left[i]]
                took[i, tied] = True
                left[i] -= len(tied)
        yield took


def _words(scores: NDArray[np.float32], highest: bool) -> NDArray[np.uint32]:
    """Turn scores into whole numbers of which the smallest are wanted, and those with the sign bit never."""
    words = (scores + np.float32(0)).view(np.uint32)  # + 0: minus zero is zero
    return np.bitwise_xor(words, ~SIGN, out=words) if highest else words


def _check(scores: NDArray[np.float32], start: int) -> None:
    assert scores.dtype == np.float32, scores.dtype
    lost = np.isnan(scores)
    if lost.any():
        member, column = np.argwhere(lost)[0]
        raise DivergedError(
            f"Member {member}'s score of sample {start + column} is not a number, so nothing can be decided with it; "
            "lower the learning rate, or train that member again from an earlier checkpoint"
        )
    differs = ((scores < 0) != (scores[:1] < 0)).any(0)
    if differs.any():
        raise DataError(
            f"Sample {start + int(differs.argmax())} is scored by some members and left out by others; "
            "score the same samples with every member"
        )


def _reached(counts: NDArray[np.int64], wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Say in which bucket each row's wanted-th item lies, and how many of that bucket are wanted."""
    buckets, left = np.zeros_like(wanted), wanted.copy()
    for i, row in enumerate(counts):
        sums = row.cumsum()
        buckets[i] = np.searchsorted(sums, wanted[i])
        left[i] -= sums[buckets[i] - 1] if buckets[i] else 0
    return buckets, left
