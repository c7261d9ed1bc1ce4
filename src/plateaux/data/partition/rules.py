"""Partition rules: compute each member's sharpness-aware set from all members' scores, in streaming passes.

There are m members and n training samples; k = int(n * top_k). The masks are yielded in chunks of the same lengths as
the chunks of scores.
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
from plateaux.data.partition.topk import select, topk_threshold

Bits = Iterator[NDArray[np.bool_]]
GOLDEN = 0x9E3779B97F4A7C15


def get_rule(name: str, *, top_k: float) -> AssignFn:
    """Return the partition rule `name`; `top_k` is the fraction of samples that each member contributes.

    The rule defines the sharpness-aware set of member i:
    `paper` (Lu 2024): the samples among the k highest scores of any other member.
    `released` (the code published with the paper): the samples among the k lowest scores of any other member, plus,
    of the samples among no member's k lowest, in order of id, every m-th starting with the i-th.
    `released_boost` (likewise): the k lowest of the others, plus all such samples except every m-th.
    `random`: k random samples, drawn independently per member. `same`: one random draw shared by all members.
    `all` and `none`: all training samples, and no samples.
    """
    if name not in RULES:
        raise RecipeError(f"Unknown partition rule {name!r}; {suggest(name, RULES)}")
    if not 0 <= top_k <= 1:
        raise RecipeError(f"top_k = {top_k} is not a fraction of the samples. Set it to a number from 0 to 1.")
    return partial(RULES[name], top_k=top_k)


def paper(scores: Scores, *, top_k: float) -> Bits:
    for high in _extreme(scores, top_k=top_k, highest=True):
        yield _union_of_others(high)


def released(scores: Scores, *, top_k: float) -> Bits:
    for low, rest, is_own_turn in _lowest(scores, top_k=top_k):
        yield _union_of_others(low) | (rest & is_own_turn)


def released_boost(scores: Scores, *, top_k: float) -> Bits:
    for low, rest, is_own_turn in _lowest(scores, top_k=top_k):
        yield _union_of_others(low) | (rest & ~is_own_turn)


def random(scores: Scores, *, top_k: float) -> Bits:
    seeds = tuple(derive_seed(scores.seed, "random", member) for member in range(scores.members))
    return _extreme(RandomScores(scores, seeds), top_k=top_k, highest=True)


def same(scores: Scores, *, top_k: float) -> Bits:
    for sampled in _extreme(RandomScores(scores, (derive_seed(scores.seed, "same"),)), top_k=top_k, highest=True):
        yield sampled.repeat(scores.members, 0)


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
    """Random scores of the training samples, one row per seed.

    The score of (seed, id) is the id-th number of the splitmix64 stream with that seed (Steele, Lea, Flood 2014), so
    it does not depend on the chunks.
    """

    scores: Scores
    seeds: tuple[int, ...]

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        start = 0
        for chunk in self.scores.chunks():
            ids = np.arange(start + 1, start + chunk.shape[1] + 1, dtype=np.uint64)
            random_scores = np.stack([_uniform(seed, ids) for seed in self.seeds])
            yield np.where(chunk[:1] < 0, np.float32(-1), random_scores)
            start += chunk.shape[1]


def _uniform(seed: int, ids: NDArray[np.uint64]) -> NDArray[np.float32]:
    z = ids * np.uint64(GOLDEN) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _extreme(scores: Scores | RandomScores, *, top_k: float, highest: bool) -> Bits:
    members = len(scores.seeds) if isinstance(scores, RandomScores) else scores.members
    threshold = topk_threshold(scores.chunks, members, top_k=top_k, highest=highest)
    return select(scores.chunks, threshold)


def _union_of_others(sets: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for row i the union of all other rows."""
    others: NDArray[np.bool_] = sets.sum(0, dtype=np.int32) > sets
    return others


def _lowest(scores: Scores, *, top_k: float) -> Iterator[tuple[NDArray[np.bool_], ...]]:
    """Yield the k-lowest sets `[M, b]`, the training samples in none of them `[b]`, and their round-robin `[M, b]`."""
    members = np.arange(scores.members)[:, None]
    count = 0
    for chunk, low in zip(scores.chunks(), _extreme(scores, top_k=top_k, highest=False), strict=True):
        rest = (chunk[0] >= 0) & ~low.any(0)
        rank = count + rest.cumsum() - 1
        yield low, rest, rank % scores.members == members
        count += int(rest.sum())
