"""Packed bit masks of the sharpness-aware sets: writing, lookup, and summary.

There is one bit per member and sample. Bit `id & 7` of byte `id >> 3` is set if the member applies SAM to sample `id`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.method import AssignFn, Scores

BUCKETS = 1 << 15


def pack(sam_set: Iterable[NDArray[np.bool_]]) -> Iterator[NDArray[np.uint8]]:
    """Pack boolean chunks `[M, b]` of any length into chunks of bytes `[M, c]`; the last byte is padded with zeros."""
    pending: NDArray[np.bool_] | None = None
    for chunk in sam_set:
        pending = chunk if pending is None or not pending.shape[1] else np.concatenate([pending, chunk], 1)
        full = pending.shape[1] // 8 * 8
        yield np.packbits(pending[:, :full], axis=1, bitorder="little")
        pending = pending[:, full:]
    if pending is not None and pending.shape[1]:
        yield np.packbits(pending, axis=1, bitorder="little")


def write_sam_sets(
    scores: Scores, assign: AssignFn, writers: Sequence[Callable[[NDArray[np.uint8]], object]]
) -> dict[str, Any]:
    """Assign the samples, stream each member's packed mask to its writer, and return the summary."""
    summary = PartitionSummary(scores)
    for packed in summary.count(pack(assign(scores))):
        for row, write in zip(packed, writers, strict=True):
            write(row)
    return summary.as_dict()


def lookup(bits: NDArray[np.uint8], index: Tensor) -> Tensor:
    """Look up the samples `index` `[B]` in one member's packed mask; the result is on the device of `index`."""
    assert index.dtype == torch.int64, index.dtype
    ids = index.numpy(force=True)
    byte_index = (ids.view(np.uint64) >> np.uint64(3)).view(np.int64)  # unsigned: a negative id is out of bounds
    mask = (bits[byte_index] >> (ids & 7).astype(np.uint8)) & np.uint8(1)
    return torch.from_numpy(mask.view(np.bool_)).to(index.device)


class PartitionSummary:
    """Sizes and overlaps of the sharpness-aware sets, and rank correlations of the members' scores.

    Rank correlations are Spearman's, of scores truncated to their upper 16 bits, with ties at their mid-rank: two
    scores that differ by less than one part in 128 may count as equal. The effect is below 0.001 if the scores spread
    over a factor of two or more. This takes two passes over the scores and holds one histogram and one array of ranks
    per member.
    """

    def __init__(self, scores: Scores) -> None:
        self.trained, self.rank_correlation = _rank_correlation(scores)
        self._intersections = np.zeros((scores.members, scores.members), np.int64)  # samples in both members' sets

    def count(self, packed: Iterable[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
        """Count the samples in packed masks while passing the masks through."""
        for chunk in packed:
            for i, row in enumerate(chunk):
                for j in range(i + 1):
                    self._intersections[i, j] += int(np.bitwise_count(row & chunk[j]).sum(dtype=np.int64))
            yield chunk

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as JSON-compatible numbers; None where a ratio is undefined."""
        sizes = self._intersections.diagonal()
        both = np.maximum(self._intersections, self._intersections.T)
        either = sizes[:, None] + sizes - both
        return {
            "trained": self.trained,
            "share": [_ratio(size, self.trained) for size in sizes],
            "overlap": [[_ratio(a, b) for a, b in zip(*rows, strict=True)] for rows in zip(both, either, strict=True)],
            "rank_correlation": self.rank_correlation,
        }


def _rank_correlation(scores: Scores) -> tuple[int, list[list[float | None]]]:
    """Count the training samples and compute the rank correlation of every pair of members."""
    counts = np.zeros((scores.members, BUCKETS), np.int64)
    for chunk in scores.chunks():
        for row, count in zip(_upper_bits(chunk), counts, strict=True):
            count += np.bincount(row, minlength=2 * BUCKETS)[:BUCKETS]
    trained = int(counts[0].sum())
    # Centered mid-ranks; negative scores (the upper half of the buckets) get 0 and do not contribute.
    ranks = np.zeros((scores.members, 2 * BUCKETS))
    ranks[:, :BUCKETS] = (counts.cumsum(1) - (counts + trained) / 2) / max(trained, 1)
    sums = np.zeros((scores.members, scores.members))
    for chunk in scores.chunks():
        chunk_ranks = np.stack([rank[row] for rank, row in zip(ranks, _upper_bits(chunk), strict=True)])
        sums += chunk_ranks @ chunk_ranks.T
    norms = np.sqrt(sums.diagonal())
    return trained, [[_ratio(sums[i, j], norms[i] * norms[j]) for j in range(len(sums))] for i in range(len(sums))]


def _upper_bits(scores: NDArray[np.float32]) -> NDArray[np.uint32]:
    return (scores + np.float32(0)).view(np.uint32) >> np.uint32(16)  # + 0 turns -0.0 into 0.0


def _ratio(numerator: Any, denominator: Any) -> float | None:
    return float(numerator / denominator) if denominator else None
