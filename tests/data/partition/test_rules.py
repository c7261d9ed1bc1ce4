"""Partition rules compared with a hand-computed example and a reference, for any chunks of scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import partition_rules as reference
from reference.partition_rules import InMemoryScores, chunk_sizes, score_arrays, top_ks

from plateaux.core.errors import RecipeError
from plateaux.core.types import derive_seed
from plateaux.data.partition.rules import RULES, get_rule


def sam_sets(scores: InMemoryScores, name: str, top_k: float) -> list[set[int]]:
    chunks = list(get_rule(name, top_k=top_k)(scores))
    masks = np.concatenate([np.zeros((scores.members, 0), np.bool_), *chunks], 1)
    assert masks.shape == scores.scores.shape
    return [set(np.flatnonzero(row).tolist()) for row in masks]


# Three members, ten training samples; 3 and 9 are validation samples. int(10 * 0.2) = 2.
BY_HAND = np.array(
    #  0  1  2   3  4  5  6  7  8   9 10 11
    [
        [9, 8, 1, -1, 1, 5, 5, 5, 5, -1, 5, 5],  # highest 0 1, lowest 2 4
        [5, 9, 8, -1, 1, 1, 5, 5, 5, -1, 5, 1],  # highest 1 2, lowest 4 5 (11 ties with them and comes later)
        [5, 5, 2, -1, 2, 3, 9, 5, 5, -1, 5, 9],  # highest 6 11, lowest 2 4
    ],
    np.float32,
)
# Lowest of any member: 2 4 5. The rest, in order: 0 1 6 7 8 10 11, assigned round-robin: 0 7 11 | 1 8 | 6 10.
EXPECTED = {
    "paper": [{1, 2, 6, 11}, {0, 1, 6, 11}, {0, 1, 2}],
    "released": [{2, 4, 5, 0, 7, 11}, {2, 4, 1, 8}, {2, 4, 5, 6, 10}],
    "released_boost": [{2, 4, 5, 1, 6, 8, 10}, {2, 4, 0, 6, 7, 10, 11}, {2, 4, 5, 0, 1, 7, 8, 11}],
    "all": [{0, 1, 2, 4, 5, 6, 7, 8, 10, 11}] * 3,
    "none": [set()] * 3,
}


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 4), (100,)])
@pytest.mark.parametrize("name", EXPECTED)
def test_rules_agree_with_a_hand_computed_example(name: str, sizes: tuple[int, ...]) -> None:
    assert sam_sets(InMemoryScores(BY_HAND, sizes), name, 0.2) == EXPECTED[name]


@pytest.mark.slow
@given(score_arrays(), top_ks, chunk_sizes)
def test_every_rule_agrees_with_its_reference(array: NDArray[np.float32], top_k: float, sizes: list[int]) -> None:
    scores, members = InMemoryScores(array, tuple(sizes)), range(len(array))
    assert sam_sets(scores, "paper", top_k) == reference.paper(array, top_k)
    assert sam_sets(scores, "released", top_k) == reference.released(array, top_k)
    assert sam_sets(scores, "released_boost", top_k) == reference.released(array, top_k, boost=True)
    independent = [reference.random_scores(array[0], derive_seed(7, "random", i)) for i in members]
    assert sam_sets(scores, "random", top_k) == [reference.extreme(row, top_k, highest=True) for row in independent]
    shared = reference.random_scores(array[0], derive_seed(7, "same"))
    assert sam_sets(scores, "same", top_k) == [reference.extreme(shared, top_k, highest=True)] * len(array)
    assert sam_sets(scores, "all", top_k) == [set(np.flatnonzero(row >= 0).tolist()) for row in array]
    assert sam_sets(scores, "none", top_k) == [set()] * len(array)


@pytest.mark.slow
@given(score_arrays(), top_ks, st.sampled_from(sorted(RULES)))
def test_sam_sets_contain_only_training_samples(array: NDArray[np.float32], top_k: float, name: str) -> None:
    for sam_set in sam_sets(InMemoryScores(array), name, top_k):
        assert all(array[0, i] >= 0 for i in sam_set)


def test_the_sam_set_of_a_single_member_is_empty_under_the_papers_rule() -> None:
    single = InMemoryScores(BY_HAND[:1])
    assert sam_sets(single, "paper", 1.0) == [set()]
    assert sam_sets(single, "released", 0.2) == [{0, 1, 5, 6, 7, 8, 10, 11}]  # all but its own lowest
    assert sam_sets(single, "released_boost", 0.2) == [set()]


def test_random_sets_have_the_requested_size_and_differ_by_member_and_seed() -> None:
    scores = np.ones((2, 100_003), np.float32)
    one, two = (sam_sets(InMemoryScores(scores, (50_000,), seed=k), "random", 0.3) for k in (1, 2))
    assert [len(sam_set) for sam_set in one + two] == [30_000] * 4
    for a, b in [(one[0], one[1]), (one[0], two[0]), (one[1], two[1])]:
        assert abs(len(a & b) - 9_000) < 5 * (100_000 * 0.09 * 0.49) ** 0.5  # hypergeometric
    low = sum(i < 50_000 for i in one[0])
    assert abs(low - 15_000) < 5 * (30_000 * 0.25 * 0.7) ** 0.5  # both halves are equally likely


def test_set_sizes_of_correlated_scores_equal_the_closed_form() -> None:
    """For normal scores cut at their medians, Sheppard's formula gives the probability that two or three are above."""
    rng, correlation = np.random.default_rng(0), 0.81
    common = rng.standard_normal(45_000)
    log_scores = correlation**0.5 * common + (1 - correlation) ** 0.5 * rng.standard_normal((3, 45_000))
    angle = math.asin(correlation) / math.pi
    two, three = 1 / 4 + angle / 2, 1 / 8 + 3 * angle / 4
    expected = {"paper": 1 - two, "released": 1 - two + three / 3, "released_boost": 1 - two + 2 * three / 3}
    for name, fraction in expected.items():
        for sam_set in sam_sets(InMemoryScores(np.exp(log_scores).astype(np.float32), (8192,)), name, 0.5):
            assert len(sam_set) / 45_000 == pytest.approx(fraction, abs=0.01), name


def test_an_unknown_rule_or_fraction_is_rejected() -> None:
    with pytest.raises(RecipeError, match="Unknown partition rule 'papr'; did you mean 'paper'"):
        get_rule("papr", top_k=0.5)
    for top_k in (-0.1, 1.1, float("nan")):
        with pytest.raises(RecipeError, match="is not a fraction of the samples"):
            get_rule("paper", top_k=top_k)
