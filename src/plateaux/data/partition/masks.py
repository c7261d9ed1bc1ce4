"""What was decided, as bits: one bit a member and sample, packed, looked up and summed up.

Bit `id & 7` of byte `id >> 3` says whether a member is careful about the sample `id`.
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
    """Turn chunks `[M, b]` of any lengths into chunks of whole bytes `[M, c]`; the last byte is filled with zeros."""
    rest: NDArray[np.bool_] | None = None
    for chunk in sam_set:
        rest = chunk if rest is None or not rest.shape[1] else np.concatenate([rest, chunk], 1)
        whole = rest.shape[1] // 8 * 8
        yield np.packbits(rest[:, :whole], axis=1, bitorder="little")
        rest = rest[:, whole:]
    if rest is not None and rest.shape[1]:
        yield np.packbits(rest, axis=1, bitorder="little")


def write_sam_sets(
    scores: Scores, assign: AssignFn, writers: Sequence[Callable[[NDArray[np.uint8]], object]]
) -> dict[str, Any]:
    """Decide, hand every member's packed bits to its writer as they come, and return the summary."""
    summary = PartitionSummary(scores)
    for packed in summary.watch(pack(assign(scores))):
        for row, write in zip(packed, writers, strict=True):
            write(row)
    return summary.as_dict()


def lookup(bits: NDArray[np.uint8], index: Tensor) -> Tensor:
    """Return the bits of the samples `index` `[B]`, of one member's packed bits, on the device of `index`."""
    assert index.dtype == torch.int64, index.dtype
    ids = index.numpy(force=True)
    at = (ids.view(np.uint64) >> np.uint64(3)).view(np.int64)  # unsigned: a negative id is out of bounds
    found = (bits[at] >> (ids & 7).astype(np.uint8)) & np.uint8(1)
    return torch.from_numpy(found.view(np.bool_)).to(index.device)


class PartitionSummary:
    """What a decision comes to: how much each is careful about, and how alike the members are.

    Rank correlations are Spearman's of the scores cut to their upper 16 bits, ties at their middle rank: two scores
    that differ by less than one part in 128 may count as equal. The effect is below 0.001 for scores that spread over a
    factor of two or more. They take two passes over the scores; a table of counts and one of ranks a member are held.
    """

    def __init__(self, scores: Scores) -> None:
        self.trained, self.rank_correlation = _alike(scores)
        self._both = np.zeros((scores.members, scores.members), np.int64)  # samples about which both are careful

    def watch(self, packed: Iterable[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
        """Hand on packed bits, and count them."""
        for chunk in packed:
            for i, row in enumerate(chunk):
                for j in range(i + 1):
                    self._both[i, j] += int(np.bitwise_count(row & chunk[j]).sum(dtype=np.int64))
            yield chunk

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers; None where there is nothing to compare."""
        sizes = self._both.diagonal()
        both = np.maximum(self._both, self._both.T)
        either = sizes[:, None] + sizes - both
        return {
            "trained": self.trained,
            "share": [_ratio(size, self.trained) for size in sizes],
            "overlap": [[_ratio(a, b) for a, b in zip(*rows, strict=True)] for rows in zip(both, either, strict=True)],
            "rank_correlation": self.rank_correlation,
        }


def _alike(scores: Scores) -> tuple[int, list[list[float | None]]]:
    """Count the trained samples and compare the members' rankings of them."""
    counts = np.zeros((scores.members, BUCKETS), np.int64)
    for chunk in scores.chunks():
        for row, count in zip(_upper(chunk), counts, strict=True):
            count += np.bincount(row, minlength=2 * BUCKETS)[:BUCKETS]
    trained = int(counts[0].sum())
    # Middle ranks, less their mean; negative scores, the upper half of the table, are at 0 and add nothing.
    ranks = np.zeros((scores.members, 2 * BUCKETS))
    ranks[:, :BUCKETS] = (counts.cumsum(1) - (counts + trained) / 2) / max(trained, 1)
    sums = np.zeros((scores.members, scores.members))
    for chunk in scores.chunks():
        placed = np.stack([table[row] for table, row in zip(ranks, _upper(chunk), strict=True)])
        sums += placed @ placed.T
    spread = np.sqrt(sums.diagonal())
    return trained, [[_ratio(sums[i, j], spread[i] * spread[j]) for j in range(len(sums))] for i in range(len(sums))]


def _upper(scores: NDArray[np.float32]) -> NDArray[np.uint32]:
    return (scores + np.float32(0)).view(np.uint32) >> np.uint32(16)  # + 0: minus zero is zero


def _ratio(over: Any, under: Any) -> float | None:
    return float(over / under) if under else None
