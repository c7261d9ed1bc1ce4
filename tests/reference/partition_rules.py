"""Who is careful about what, with full sorts and Python's sets: slow, obvious twins of plateaux.data.partition.rules.

Below them: tables of scores to try both on.
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


def extreme(scores: NDArray[np.float32], top: float, *, highest: bool) -> set[int]:
    """The int(n * top) highest or lowest of one member's scores, the smaller id first among equals."""
    trained = [i for i in range(len(scores)) if scores[i] >= 0]
    ranked = sorted(trained, key=lambda i: (-float(scores[i]) if highest else float(scores[i]), i))
    return set(ranked[: int(len(trained) * top)])


def uniform(key: int, sample: int) -> float:
    """The sample-th number of splitmix64 from `key`, in Python's own whole numbers."""
    z = (key + (sample + 1) * GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> 40) / 2**24


def drawn(scores: NDArray[np.float32], key: int) -> NDArray[np.float32]:
    """Scores by chance in place of one member's."""
    return np.array([uniform(key, i) if s >= 0 else -1 for i, s in enumerate(scores)], np.float32)


def paper(table: NDArray[np.float32], top: float) -> list[set[int]]:
    high = [extreme(row, top, highest=True) for row in table]
    return [set().union(*(s for j, s in enumerate(high) if j != i)) for i in range(len(table))]


def released(table: NDArray[np.float32], top: float, *, boost: bool = False) -> list[set[int]]:
    low = [extreme(row, top, highest=False) for row in table]
    rest = [i for i in range(table.shape[1]) if table[0, i] >= 0 and not any(i in s for s in low)]
    found = []
    for i in range(len(table)):
        share = set(rest[i :: len(table)])
        others: set[int] = set().union(*(s for j, s in enumerate(low) if j != i))
        found.append(others | (set(rest) - share if boost else share))
    return found


def spearman(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Spearman's rank correlation, ties at their middle rank."""
    ranks = []
    for scores in (a, b):
        _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum() - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(*ranks)[0, 1])


def stream(table: NDArray[Any], *sizes: int) -> Callable[[], Iterator[NDArray[Any]]]:
    """Passes over a table in chunks of these lengths, over and over."""

    def chunks() -> Iterator[NDArray[Any]]:
        start = turn = 0
        while start < table.shape[1]:
            yield table[:, start : start + sizes[turn % len(sizes)]]
            start, turn = start + sizes[turn % len(sizes)], turn + 1

    return chunks


@dataclass
class Table:
    """Scores held in memory, handed out in chunks of these lengths."""

    table: NDArray[np.float32]
    sizes: tuple[int, ...] = (5,)
    seed: int = 7

    @property
    def members(self) -> int:
        return len(self.table)

    @property
    def samples(self) -> int:
        return self.table.shape[1]

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        return stream(self.table, *self.sizes)()


FEW = [0.0, -0.0, 1e-45, 1.0, float(np.nextafter(np.float32(1), np.float32(2))), 1.01, 3e38, float("inf")]


@st.composite
def tables(draw: st.DrawFn) -> NDArray[np.float32]:
    """Scores of one to four members, many of them equal or next to one another, some samples not trained on."""
    members, samples = draw(st.integers(1, 4)), draw(st.integers(0, 40))
    score = st.sampled_from(FEW) | st.floats(0, width=32, allow_nan=False)
    rows = [draw(st.lists(score, min_size=samples, max_size=samples)) for _ in range(members)]
    out = draw(st.lists(st.booleans(), min_size=samples, max_size=samples))
    table = np.array(rows, np.float32).reshape(members, samples)
    table[:, np.array(out, np.bool_)] = -1
    return table


tops = st.sampled_from([0.0, 0.1, 0.29, 0.5, 1.0]) | st.floats(0, 1)
sizes = st.lists(st.integers(1, 9), min_size=1, max_size=3)
