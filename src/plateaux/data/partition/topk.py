"""Exact streaming top-k: the k highest or lowest of any number of scores, by counting instead of sorting.

Non-negative float32 numbers sort like their 32 bits read as an integer. The first pass counts the upper 16 bits, which
gives the one of 32768 buckets that contains the k-th score; the second counts the lower 16 bits inside that bucket.
Memory is two histograms per member, independent of the number of samples.
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
    """The thresholds that separate the top-k scores of each member from the rest."""

    thresholds: NDArray[np.uint32]  # [M] the last selected score, encoded by `_sort_keys`
    ties: NDArray[np.int64]  # [M] how many samples with exactly that score are selected: those with the smallest ids
    highest: bool


def topk_threshold(stream: Stream, members: int, *, top_k: float, highest: bool) -> TopK:
    """Find the threshold of the int(n * top_k) highest or lowest of n scores of each member, in two passes.

    Negative scores mark samples that are excluded; infinity is a valid score.
    """
    upper = np.zeros((members, HALF // 2), np.int64)  # the other half has the sign bit
    start = 0
    for scores in stream():
        _check(scores, start)
        start += scores.shape[1]
        for row, count in zip(_sort_keys(scores, highest), upper, strict=True):
            count += np.bincount(row >> 16, minlength=HALF)[: HALF // 2]
    bucket, remaining = _find_bucket(upper, (upper.sum(1) * top_k).astype(np.int64))
    lower = np.zeros((members, HALF), np.int64)
    for scores in stream():
        for row, count, number in zip(_sort_keys(scores, highest), lower, bucket, strict=True):
            count += np.bincount(row[row >> 16 == number] & 0xFFFF, minlength=HALF)
    within, ties = _find_bucket(lower, remaining)
    return TopK((bucket << 16 | within).astype(np.uint32), ties, highest)


def select(stream: Stream, top_k: TopK) -> Iterator[NDArray[np.bool_]]:
    """Yield masks of the selected samples in one more pass, in chunks of the same lengths as the scores."""
    remaining = top_k.ties.copy()
    for scores in stream():
        sort_keys = _sort_keys(scores, top_k.highest)
        selected = sort_keys < top_k.thresholds[:, None]
        for row, threshold, i in zip(sort_keys, top_k.thresholds, range(len(remaining)), strict=True):
            if remaining[i]:
                tied = np.flatnonzero(row == threshold)[: remaining[i]]
                selected[i, tied] = True
                remaining[i] -= len(tied)
        yield selected


def _sort_keys(scores: NDArray[np.float32], highest: bool) -> NDArray[np.uint32]:
    """Encode scores as integers so that the smallest are selected first; excluded scores keep the sign bit."""
    sort_keys = (scores + np.float32(0)).view(np.uint32)  # + 0 turns -0.0 into 0.0
    return np.bitwise_xor(sort_keys, ~SIGN, out=sort_keys) if highest else sort_keys


def _check(scores: NDArray[np.float32], start: int) -> None:
    assert scores.dtype == np.float32, scores.dtype
    is_nan = np.isnan(scores)
    if is_nan.any():
        member, column = np.argwhere(is_nan)[0]
        raise DivergedError(
            f"The score of member {member} for sample {start + column} is NaN, so the samples cannot be partitioned. "
            "Lower the learning rate, or train that member again from an earlier checkpoint."
        )
    differs = ((scores < 0) != (scores[:1] < 0)).any(0)
    if differs.any():
        raise DataError(
            f"Sample {start + int(differs.argmax())} is scored by some members and excluded by others. "
            "Score the same samples with every member."
        )


def _find_bucket(counts: NDArray[np.int64], k: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bucket that contains each row's k-th item, and how many items of that bucket are selected."""
    buckets, remaining = np.zeros_like(k), k.copy()
    for i, row in enumerate(counts):
        sums = row.cumsum()
        buckets[i] = np.searchsorted(sums, k[i])
        remaining[i] -= sums[buckets[i] - 1] if buckets[i] else 0
    return buckets, remaining
