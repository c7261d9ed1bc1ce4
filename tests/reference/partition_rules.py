"""Reference implementation of plateaux.data.partition.rules, with full sorts and Python sets.

Also: in-memory scores, and hypothesis strategies that generate them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def extreme(scores: NDArray[np.float32], top_k: float, *, highest: bool) -> set[int]:
    """Return the int(n * top_k) highest or lowest of one member's scores; among ties, the smaller ids."""
    trained = [i for i in range(len(scores)) if scores[i] >= 0]
    ranked = sorted(trained, key=lambda i: (-float(scores[i]) if highest else float(scores[i]), i))
    return set(ranked[: int(len(trained) * top_k)])


def uniform(seed: int, sample: int) -> float:
    """Return the sample-th number of splitmix64 with this seed, computed with Python integers."""
    z = (seed + (sample + 1) * GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> 40) / 2**24


def random_scores(scores: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Replace one member's scores by random scores; excluded samples stay excluded."""
    return np.array([uniform(seed, i) if s >= 0 else -1 for i, s in enumerate(scores)], np.float32)


def paper(scores: NDArray[np.float32], top_k: float) -> list[set[int]]:
    high = [extreme(row, top_k, highest=True) for row in scores]
    return [set().union(*(s for j, s in enumerate(high) if j != i)) for i in range(len(scores))]


def released(scores: NDArray[np.float32], top_k: float, *, boost: bool = False) -> list[set[int]]:
    low = [extreme(row, top_k, highest=False) for row in scores]
    rest = [i for i in range(scores.shape[1]) if scores[0, i] >= 0 and not any(i in s for s in low)]
    sam_sets = []
    for i in range(len(scores)):
        share = set(rest[i :: len(scores)])
        others: set[int] = set().union(*(s for j, s in enumerate(low) if j != i))
        sam_sets.append(others | (set(rest) - share if boost else share))
    return sam_sets


def spearman(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return Spearman's rank correlation, with ties at their mid-rank."""
    ranks = []
    for scores in (a, b):
        _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum() - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(*ranks)[0, 1])


def stream(scores: NDArray[Any], *chunk_sizes: int) -> Callable[[], Iterator[NDArray[Any]]]:
    """Return a function that passes over scores in chunks whose lengths cycle through `chunk_sizes`."""

    def chunks() -> Iterator[NDArray[Any]]:
        start = step = 0
        while start < scores.shape[1]:
            yield scores[:, start : start + chunk_sizes[step % len(chunk_sizes)]]
            start, step = start + chunk_sizes[step % len(chunk_sizes)], step + 1

    return chunks


@dataclass
class InMemoryScores:
    """Scores in memory, yielded in chunks whose lengths cycle through `chunk_sizes`."""

    scores: NDArray[np.float32]
    chunk_sizes: tuple[int, ...] = (5,)
    seed: int = 7

    @property
    def members(self) -> int:
        return len(self.scores)

    @property
    def samples(self) -> int:
        return self.scores.shape[1]

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        return stream(self.scores, *self.chunk_sizes)()


EDGE_VALUES = [0.0, -0.0, 1e-45, 1.0, float(np.nextafter(np.float32(1), np.float32(2))), 1.01, 3e38, float("inf")]


@st.composite
def score_arrays(draw: st.DrawFn) -> NDArray[np.float32]:
    """Generate scores of one to four members, with many equal or adjacent values and some excluded samples."""
    members, samples = draw(st.integers(1, 4)), draw(st.integers(0, 40))
    score = st.sampled_from(EDGE_VALUES) | st.floats(0, width=32, allow_nan=False)
    rows = [draw(st.lists(score, min_size=samples, max_size=samples)) for _ in range(members)]
    excluded = draw(st.lists(st.booleans(), min_size=samples, max_size=samples))
    scores = np.array(rows, np.float32).reshape(members, samples)
    scores[:, np.array(excluded, np.bool_)] = -1
    return scores


top_ks = st.sampled_from([0.0, 0.1, 0.29, 0.5, 1.0]) | st.floats(0, 1)
chunk_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=3)
