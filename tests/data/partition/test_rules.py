"""The rules: by hand, by slow twins, and the same however the scores are cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import partition_rules as slow
from reference.partition_rules import Table, sizes, tables, tops

from plateaux.core.errors import RecipeError
from plateaux.core.types import derive_seed
from plateaux.data.partition.rules import RULES, get_rule


def careful(scores: Table, name: str, top: float) -> list[set[int]]:
    chunks = list(get_rule(name, top_k=top)(scores))
    whole = np.concatenate([np.zeros((scores.members, 0), np.bool_), *chunks], 1)
    assert whole.shape == scores.table.shape
    return [set(np.flatnonzero(row).tolist()) for row in whole]


# Three members, ten trained samples; 3 and 9 are kept for validation. int(10 * 0.2) = 2.
BY_HAND = np.array(
    #  0  1  2   3  4  5  6  7  8   9 10 11
    [
        [9, 8, 1, -1, 1, 5, 5, 5, 5, -1, 5, 5],  # highest 0 1, lowest 2 4
        [5, 9, 8, -1, 1, 1, 5, 5, 5, -1, 5, 1],  # highest 1 2, lowest 4 5 (11 ties with them and comes later)
        [5, 5, 2, -1, 2, 3, 9, 5, 5, -1, 5, 9],  # highest 6 11, lowest 2 4
    ],
    np.float32,
)
# Lowest of anybody: 2 4 5. In nobody's lowest, in order: 0 1 6 7 8 10 11, dealt out 0 7 11 | 1 8 | 6 10.
EXPECTED = {
    "paper": [{1, 2, 6, 11}, {0, 1, 6, 11}, {0, 1, 2}],
    "released": [{2, 4, 5, 0, 7, 11}, {2, 4, 1, 8}, {2, 4, 5, 6, 10}],
    "released_boost": [{2, 4, 5, 1, 6, 8, 10}, {2, 4, 0, 6, 7, 10, 11}, {2, 4, 5, 0, 1, 7, 8, 11}],
    "all": [{0, 1, 2, 4, 5, 6, 7, 8, 10, 11}] * 3,
    "none": [set()] * 3,
}


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 4), (100,)])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_table_decided_by_hand(name: str, sizes: tuple[int, ...]) -> None:
    assert careful(Table(BY_HAND, sizes), name, 0.2) == EXPECTED[name]


@given(tables(), tops, sizes)
def test_every_rule_agrees_with_its_twin(table: NDArray[np.float32], top: float, sizes: list[int]) -> None:
    scores, members = Table(table, tuple(sizes)), range(len(table))
    assert careful(scores, "paper", top) == slow.paper(table, top)
    assert careful(scores, "released", top) == slow.released(table, top)
    assert careful(scores, "released_boost", top) == slow.released(table, top, boost=True)
    own = [slow.drawn(table[0], derive_seed(7, "random", i)) for i in members]
    assert careful(scores, "random", top) == [slow.extreme(row, top, highest=True) for row in own]
    one = slow.drawn(table[0], derive_seed(7, "same"))
    assert careful(scores, "same", top) == [slow.extreme(one, top, highest=True)] * len(table)
    assert careful(scores, "all", top) == [set(np.flatnonzero(row >= 0).tolist()) for row in table]
    assert careful(scores, "none", top) == [set()] * len(table)


@given(tables(), tops, st.sampled_from(sorted(RULES)))
def test_nobody_is_careful_about_what_nobody_trains_on(table: NDArray[np.float32], top: float, name: str) -> None:
    for found in careful(Table(table), name, top):
        assert all(table[0, i] >= 0 for i in found)


def test_one_member_alone_is_careful_about_nothing_under_the_papers_rule() -> None:
    alone = Table(BY_HAND[:1])
    assert careful(alone, "paper", 1.0) == [set()]
    assert careful(alone, "released", 0.2) == [{0, 1, 5, 6, 7, 8, 10, 11}]  # all but its own lowest
    assert careful(alone, "released_boost", 0.2) == [set()]


def test_random_draws_are_of_the_asked_size_and_differ_by_member_and_key() -> None:
    scores = np.ones((2, 100_003), np.float32)
    one, two = (careful(Table(scores, (50_000,), seed=k), "random", 0.3) for k in (1, 2))
    assert [len(found) for found in one + two] == [30_000] * 4
    for a, b in [(one[0], one[1]), (one[0], two[0]), (one[1], two[1])]:
        assert abs(len(a & b) - 9_000) < 5 * (100_000 * 0.09 * 0.49) ** 0.5  # hypergeometric
    low = sum(i < 50_000 for i in one[0])
    assert abs(low - 15_000) < 5 * (30_000 * 0.25 * 0.7) ** 0.5  # no half is favoured


def test_shares_of_correlated_scores_are_those_of_the_closed_form() -> None:
    """Normal scores cut at their medians: Sheppard's formula gives the chance that two, or three, lie above."""
    random, correlation = np.random.default_rng(0), 0.81
    common = random.standard_normal(45_000)
    own = correlation**0.5 * common + (1 - correlation) ** 0.5 * random.standard_normal((3, 45_000))
    angle = math.asin(correlation) / math.pi
    two, three = 1 / 4 + angle / 2, 1 / 8 + 3 * angle / 4
    expected = {"paper": 1 - two, "released": 1 - two + three / 3, "released_boost": 1 - two + 2 * three / 3}
    for name, share in expected.items():
        for found in careful(Table(np.exp(own).astype(np.float32), (8192,)), name, 0.5):
            assert len(found) / 45_000 == pytest.approx(share, abs=0.01), name


def test_an_unknown_rule_or_share_is_refused_at_once() -> None:
    with pytest.raises(RecipeError, match="There is no rule called 'papr'; did you mean 'paper'"):
        get_rule("papr", top_k=0.5)
    for top in (-0.1, 1.1, float("nan")):
        with pytest.raises(RecipeError, match="is no share of the samples; give a number from 0 to 1"):
            get_rule("paper", top_k=top)
