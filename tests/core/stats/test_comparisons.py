"""P-values agree with scipy, Holm's correction with its definition, and what is best with the intervals."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from plateaux.core.stats.comparisons import Inference, holm
from plateaux.core.stats.intervals import interval_from_stderr, p_value, paired_t_interval, t_interval
from plateaux.core.types import Estimate

HOLM = Inference(correction="holm")


def holm_by_definition(p_values: list[float]) -> list[float]:
    """Return the smallest level at which the step-down procedure rejects each hypothesis, by trying all levels."""
    levels = sorted({min(1.0, k * p) for p in p_values for k in range(1, len(p_values) + 1)} | {1.0})

    def rejected(level: float) -> set[int]:
        order, found = sorted(range(len(p_values)), key=lambda i: p_values[i]), set[int]()
        for rank, i in enumerate(order):
            if (len(p_values) - rank) * p_values[i] > level:
                return found
            found.add(i)
        return found

    by_level = [(level, rejected(level)) for level in levels]
    return [min([level for level, found in by_level if i in found], default=1.0) for i in range(len(p_values))]


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_equals_its_definition(p_values: list[float]) -> None:
    assert holm(p_values) == pytest.approx(holm_by_definition(p_values))


def test_holm_does_not_depend_on_the_order() -> None:
    p_values = (0.01, 0.02, 0.02, 0.3)
    expected = dict(zip(p_values, holm(p_values), strict=True))
    assert expected == pytest.approx({0.01: 0.04, 0.02: 0.06, 0.3: 0.3})
    for order in permutations(p_values):
        assert holm(order) == [expected[p] for p in order]


@pytest.mark.parametrize("count", [2, 3, 10])
def test_the_p_value_of_paired_differences_equals_scipy(count: int) -> None:
    ours, theirs = np.random.default_rng(count).normal(0.4, 1.0, (2, count))
    assert p_value(paired_t_interval(ours, theirs)) == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)


def test_a_difference_without_an_interval_is_not_distinguished() -> None:
    one, same, exact = (
        paired_t_interval([1.0], [0.0]),
        paired_t_interval([1, 2], [1, 2]),
        paired_t_interval([2, 3], [1, 2]),
    )
    assert [p_value(each) for each in (one, same, exact)] == [1.0, 1.0, 0.0]
    assert Inference().distinguished([one, same, exact]) == [False, False, True]


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6))
def test_a_difference_is_distinguished_if_its_interval_excludes_zero(numbers: list[float]) -> None:
    interval = t_interval(numbers)
    if abs(abs(interval.value) - interval.half) > 1e-9:
        assert Inference().distinguished([interval]) == [interval.low > 0 or interval.high < 0]


def test_the_error_is_half_of_the_interval_or_the_standard_error() -> None:
    interval = t_interval([0.71, 0.74, 0.69, 0.72])
    assert Inference().error(interval) == pytest.approx(stats.t.ppf(0.975, 3) * stats.sem([0.71, 0.74, 0.69, 0.72]))
    assert Inference(standard_errors=True).error(interval) == pytest.approx(stats.sem([0.71, 0.74, 0.69, 0.72]))
    assert Inference(standard_errors=True).format(interval, percent=True) == "71.5 ± 1.0"
    assert Inference().format(interval, percent=True) == "71.5 ± 3.3"
    assert interval_from_stderr(Estimate(1.0, 0.1), 4).stderr == 0.1


def test_the_best_group_must_differ_from_the_runner_up_in_pairs() -> None:
    shared = [0.0, 5.0, -3.0]  # a good seed is good for all
    best, second, worst = ({r: x + d + 0.01 * r for r, x in enumerate(shared)} for d in (1.0, 0.5, -9.0))
    noisy = {r: 0.9 + noise for r, noise in enumerate((3.0, -2.0, 1.0))}
    assert Inference().find_best([worst, second, best], higher_is_better=True) == 2
    assert Inference().find_best([worst, second, best], higher_is_better=False) == 0
    assert Inference().find_best([worst, noisy, best], higher_is_better=True) is None
    assert Inference().find_best([{0: 1.0}, {0: 2.0}], higher_is_better=True) is None
    assert Inference().find_best([best, {}], higher_is_better=True) is None
    assert Inference().find_best([], higher_is_better=True) is None


def test_holm_corrects_the_choice_of_the_best_for_all_pairs() -> None:
    rng = np.random.default_rng(0)
    groups = [dict(enumerate(rng.normal(size=5))) for _ in range(10)]
    groups[3] = {r: max(group[r] for group in groups) + 0.3 + 0.1 * rng.normal() for r in range(5)}
    assert HOLM.find_best([groups[3], {r: x - 9 for r, x in groups[3].items()}], higher_is_better=True) == 0
    found = [
        (Inference().find_best(some, higher_is_better=True), HOLM.find_best(some, higher_is_better=True))
        for some in ([dict(enumerate(rng.normal(size=4))) for _ in range(8)] for _ in range(300))
    ]
    plain, corrected = (sum(pair[side] is not None for pair in found) for side in (0, 1))
    assert corrected < plain
    assert corrected <= 0.05 * len(found) + 3 * (300 * 0.05 * 0.95) ** 0.5
