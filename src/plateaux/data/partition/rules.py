"""Who is careful about which samples: decided from every member's scores, in passes, without ever holding them all.

Written for m members and n trained samples; k = int(n * top). A decision's chunks are as long as the scores' chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import RecipeError, suggest
from plateaux.core.method import AssignFn, Scores
from plateaux.core.types import derive_seed
from plateaux.data.partition.topk import TopK, select, topk_threshold

Bits = Iterator[NDArray[np.bool_]]
GOLDEN = 0x9E3779B97F4A7C15


def get_rule(name: str, *, top_k: float) -> AssignFn:
    """Return the rule called `name`; `top` is the share of samples that each member brings to the table.

    `paper` (Lu 2024): member i is careful about what is among the k highest scores of any other member.
    `released` (the code published with it): about what is among the k lowest of any other, and, of the samples
    that are in nobody's k lowest, taken in order of id, about every m-th starting with the i-th.
    `released_boost` (likewise): about the others' k lowest, and all such samples but every m-th.
    `random`: about k samples of its own, drawn by chance. `same`: all about one such draw.
    `all` and `none`: about every trained sample, and about no sample.
    """
    if name not in RULES:
        raise RecipeError(f"There is no rule called {name!r}; {suggest(name, RULES)}")
    if not 0 <= top_k <= 1:
        raise RecipeError(f"top = {top_k} is no share of the samples; give a number from 0 to 1")
    return partial(RULES[name], top_k=top_k)


def paper(scores: Scores, *, top_k: float) -> Bits:
    for high in _extreme(scores, top_k=top_k, highest=True):
        yield _union_of_others(high)


def released(scores: Scores, *, top_k: float) -> Bits:
    for low, rest, turn in _lowest(scores, top_k=top_k):
        yield _union_of_others(low) | (rest & turn)


def released_boost(scores: Scores, *, top_k: float) -> Bits:
    for low, rest, turn in _lowest(scores, top_k=top_k):
        yield _union_of_others(low) | (rest & ~turn)


def random(scores: Scores, *, top_k: float) -> Bits:
    keys = tuple(derive_seed(scores.seed, "random", member) for member in range(scores.members))
    return _extreme(RandomScores(scores, keys), top_k=top_k, highest=True)


def same(scores: Scores, *, top_k: float) -> Bits:
    for drawn in _extreme(RandomScores(scores, (derive_seed(scores.seed, "same"),)), top_k=top_k, highest=True):
        yield drawn.repeat(scores.members, 0)


def all_samples(scores: Scores, *, top_k: float) -> Bits:
    return (chunk >= 0 for chunk in scores.chunks())


def no_samples(scores: Scores, *, top_k: float) -> Bits:
    return (np.zeros(chunk.shape, np.bool_) for chunk in scores.chunks())


RULES: dict[str, Callable[..., Bits]] = {
    "paper": paper,
    "released": released,
    "released_boost": released_boost,
    "random": random,
    "same": same,
    "all": all_samples,
    "none": no_samples,
}


@dataclass(frozen=True, slots=True)
class RandomScores:
    """Scores by chance for the samples that are trained on, one row for each key.

    The number of (key, id) is the id-th of splitmix64's stream from that key (Steele, Lea, Flood 2014), so that it
    is the same in any chunk.
    """

    scores: Scores
    seeds: tuple[int, ...]

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        start = 0
        for chunk in self.scores.chunks():
            ids = np.arange(start + 1, start + chunk.shape[1] + 1, dtype=np.uint64)
            numbers = np.stack([_uniform(own, ids) for own in self.seeds])
            yield np.where(chunk[:1] < 0, np.float32(-1), numbers)
            start += chunk.shape[1]


def _uniform(key: int, ids: NDArray[np.uint64]) -> NDArray[np.float32]:
    z = ids * np.uint64(GOLDEN) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _extreme(scores: Scores | RandomScores, *, top_k: float, highest: bool) -> Bits:
    members = len(scores.seeds) if isinstance(scores, RandomScores) else scores.members
    found: TopK = topk_threshold(scores.chunks, members, top_k=top_k, highest=highest)
    return select(scores.chunks, found)


def _union_of_others(sets: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Row i: the union of all rows but i."""
    others: NDArray[np.bool_] = sets.sum(0, dtype=np.int32) > sets
    return others


def _lowest(scores: Scores, *, top_k: float) -> Iterator[tuple[NDArray[np.bool_], ...]]:
    """Yield the sets of the lowest `[M, b]`, the trained samples in none of them `[b]`, and whose turn they are."""
    members = np.arange(scores.members)[:, None]
    seen = 0
    for chunk, low in zip(scores.chunks(), _extreme(scores, top_k=top_k, highest=False), strict=True):
        rest = (chunk[0] >= 0) & ~low.any(0)
        places = seen + rest.cumsum() - 1
        yield low, rest, places % scores.members == members
        seen += int(rest.sum())
