"""AUROC, AUPR and FPR at 95 % TPR against scikit-learn, slow references, and the bootstrap; with edge cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from plateaux.core.stats.ranking import aupr, auroc, fpr_at_tpr
from plateaux.core.types import Estimate

Scores = NDArray[np.float64]
INF = math.inf


def scores(
    inside: int, outside: int, *, shift: float = 1.0, ties: bool = False, seed: int = 0
) -> tuple[Scores, Scores]:
    chance = np.random.default_rng(seed)
    low, high = chance.normal(size=inside), chance.normal(size=outside) + shift
    return (np.round(low), np.round(high)) if ties else (low, high)


def labeled(inside: Scores, outside: Scores) -> tuple[NDArray[Any], Scores]:
    return np.repeat([0, 1], [len(inside), len(outside)]), np.concatenate([inside, outside])


def slow_auroc(inside: Scores, outside: Scores) -> float:
    return float(np.mean([1.0 if o > i else 0.5 if o == i else 0.0 for i in inside for o in outside]))


def slow_delong(inside: Scores, outside: Scores) -> float:
    """The variance of DeLong by its definition, kernel by kernel."""
    kernel = np.array([[1.0 if o > i else 0.5 if o == i else 0.0 for i in inside] for o in outside])
    return math.sqrt(kernel.mean(1).var(ddof=1) / len(outside) + kernel.mean(0).var(ddof=1) / len(inside))


def slow_fpr(inside: Scores, outside: Scores, tpr: float) -> float:
    best = max(t for t in outside if np.mean(outside >= t) >= tpr)
    return float(np.mean(inside >= best))


SIZES = [(1, 1), (1, 7), (7, 1), (40, 60), (300, 17)]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("inside", "outside"), SIZES)
def test_areas_equal_scikit_learn(inside: int, outside: int, ties: bool) -> None:
    low, high = scores(inside, outside, ties=ties)
    y, both = labeled(low, high)
    assert auroc(low, high).value == pytest.approx(roc_auc_score(y, both), abs=1e-14)
    assert auroc(low, high).value == pytest.approx(slow_auroc(low, high), abs=1e-14)
    assert aupr(low, high, "outside").value == pytest.approx(average_precision_score(y, both), abs=1e-14)
    assert aupr(low, high, "inside").value == pytest.approx(average_precision_score(1 - y, -both), abs=1e-14)


@pytest.mark.parametrize("tpr", [0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("inside", "outside"), SIZES)
def test_the_false_positive_rate_is_the_lowest_on_scikit_learns_curve(
    inside: int, outside: int, ties: bool, tpr: float
) -> None:
    low, high = scores(inside, outside, ties=ties)
    false, true, _ = roc_curve(*labeled(low, high), drop_intermediate=False)
    found = fpr_at_tpr(low, high, tpr).value
    assert found == pytest.approx(false[true >= tpr].min(), abs=1e-14)
    assert found == pytest.approx(slow_fpr(low, high, tpr), abs=1e-14)


def test_small_examples_computed_by_hand() -> None:
    inside, outside = np.array([1.0, 2.0, 4.0]), np.array([3.0, 4.0])
    assert auroc(inside, outside).value == (2 + 2.5) / 6
    # Outside: at 4 one of two caught is right, at 3 two of three.
    assert aupr(inside, outside).value == pytest.approx((1 / 2 + 2 / 3) / 2)
    # Inside, from the lowest score up: 1 and 2 are found first, 4 last with everything else.
    assert aupr(inside, outside, "inside").value == pytest.approx((1 + 1 + 3 / 5) / 3)
    assert fpr_at_tpr(inside, outside).value == 1 / 3
    assert fpr_at_tpr(inside, outside).stderr == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 3))


def test_out_of_distribution_samples_are_the_positive_class() -> None:
    # One inside sample of four scores high: it is a false positive. The other reading of FPR95 would be 1.
    inside, outside = np.array([0.0, 0.0, 0.0, 9.0]), np.array([5.0, 5.0])
    assert fpr_at_tpr(inside, outside) == Estimate(0.25, math.sqrt(0.25 * 0.75 / 4))
    assert fpr_at_tpr(-outside, -inside).value == 1.0


def test_the_number_of_required_true_positives_has_no_rounding_error() -> None:
    inside, outside = np.arange(20) + 0.5, np.arange(20.0)
    assert fpr_at_tpr(inside, outside, 0.95).value == 19 / 20
    for count in range(1, 200):  # whatever floats make of 0.95 n or 0.07 n
        line = np.arange(float(count))
        for hundredths in (7, 29, 57, 95):
            needed = -(-hundredths * count // 100)
            assert fpr_at_tpr(line, line, hundredths / 100).value == needed / count


@pytest.mark.parametrize("measure", [auroc, aupr, fpr_at_tpr])
def test_areas_are_invariant_to_order_and_monotone_functions(measure: Callable[..., Estimate]) -> None:
    low, high = scores(50, 30, ties=True)
    first = measure(low, high)
    for other in (measure(low[::-1], np.sort(high)), measure(np.exp(low), np.exp(high))):
        assert other.value == first.value
        assert other.stderr == pytest.approx(first.stderr, rel=1e-12)


@pytest.mark.parametrize("ties", [False, True])
def test_identical_sets_give_exactly_one_half(ties: bool) -> None:
    for size in (1, 3, 7, 101):
        low, _ = scores(size, 1, ties=ties)
        assert auroc(low, low).value == 0.5
        assert auroc(low, low[::-1].copy()).value == 0.5


def test_shuffled_labels_give_one_half_within_error() -> None:
    _, both = labeled(*scores(400, 300, shift=3.0))
    off = []
    for seed in range(200):
        mixed = np.random.default_rng(seed).permutation(both)
        found = auroc(mixed[:400], mixed[400:])
        assert found.stderr is not None
        off.append((found.value - 0.5) / found.stderr)
    assert abs(np.mean(off)) < 4 / math.sqrt(200)
    assert np.std(off) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("ties", [False, True])
def test_the_delong_standard_error_equals_its_definition(ties: bool) -> None:
    low, high = scores(23, 31, ties=ties)
    assert auroc(low, high).stderr == pytest.approx(slow_delong(low, high), rel=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("positive", ["outside", "inside"])
@pytest.mark.parametrize("kind", ["auroc", "aupr"])
def test_standard_errors_equal_the_bootstrap(kind: str, positive: str, ties: bool) -> None:
    low, high = scores(500, 200, ties=ties)

    def measure(a: Scores, b: Scores) -> Estimate:
        return auroc(a, b) if kind == "auroc" else aupr(a, b, positive)  # type: ignore[arg-type]

    chance = np.random.default_rng(1)
    again = [measure(chance.choice(low, len(low)), chance.choice(high, len(high))).value for _ in range(600)]
    assert measure(low, high).stderr == pytest.approx(float(np.std(again)), rel=0.12)


def test_the_binomial_error_of_the_false_positive_rate_holds_for_a_given_threshold() -> None:
    low, high = scores(400, 300)
    found = fpr_at_tpr(low, high)
    chance = np.random.default_rng(0)
    again = [fpr_at_tpr(chance.choice(low, len(low)), high).value for _ in range(500)]
    assert found.stderr == pytest.approx(float(np.std(again)), rel=0.12)


def test_one_sample_of_a_kind_has_no_standard_error() -> None:
    assert auroc([0.0], [1.0]) == Estimate(1.0, None)
    assert auroc([1.0], [1.0]) == Estimate(0.5, None)
    assert aupr([0.0], [1.0]) == Estimate(1.0, None)
    assert aupr([1.0], [0.0]) == Estimate(0.5, None)
    assert fpr_at_tpr([0.0], [1.0]) == Estimate(0.0, 0.0)
    assert auroc([0.0, 2.0], [1.0]) == Estimate(0.5, None)


def test_equal_scores_give_chance_level() -> None:
    low, high = np.ones(30), np.ones(10)
    assert auroc(low, high) == Estimate(0.5, 0.0)
    assert aupr(low, high, "outside") == Estimate(0.25, 0.0)  # the share of positives
    assert aupr(low, high, "inside") == Estimate(0.75, 0.0)
    assert fpr_at_tpr(low, high) == Estimate(1.0, 0.0)


def test_separated_sets_are_perfectly_distinguished() -> None:
    low, high = scores(20, 20, shift=100.0)
    assert auroc(low, high) == Estimate(1.0, 0.0)
    assert aupr(low, high, "outside").value == aupr(low, high, "inside").value == 1.0
    assert fpr_at_tpr(low, high) == Estimate(0.0, 0.0)
    assert auroc(high, low).value == 0.0


def test_infinite_scores_are_ranked() -> None:
    low, high = np.array([-INF, 0.0, INF]), np.array([-INF, INF, INF])
    finite = np.array([-9.0, 0.0, 9.0]), np.array([-9.0, 9.0, 9.0])
    for measure in (auroc, aupr, fpr_at_tpr):
        assert measure(low, high) == measure(*finite)
    assert aupr(low, high, "inside") == aupr(*finite, "inside")


def test_half_precision_scores_keep_their_ties() -> None:
    low, high = (part.astype(np.float16) for part in scores(60, 50))
    y, both = labeled(low, high)
    assert auroc(low, high).value == pytest.approx(roc_auc_score(y, both), abs=1e-14)


@pytest.mark.parametrize("measure", [auroc, aupr, fpr_at_tpr])
@pytest.mark.parametrize(
    ("inside", "outside", "words"),
    [
        ([], [1.0], "inside scores have shape"),
        ([1.0], [], "outside scores have shape"),
        ([[1.0]], [1.0], r"\[1, 1\]"),
        ([1.0], [1.0, math.nan], "1 of 2 outside scores are NaN"),
    ],
)
def test_nan_scores_are_refused(measure: Callable[..., Estimate], inside: Any, outside: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measure(inside, outside)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="'outside' or 'inside'"):
        aupr([0.0], [1.0], "ood")  # type: ignore[arg-type]
    for tpr in (0.0, -1.0, 1.5, 95.0):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            fpr_at_tpr([0.0], [1.0], tpr)


@given(
    inside=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    outside=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
)
@settings(max_examples=60)
def test_swapping_the_sets_mirrors_the_area(inside: list[int], outside: list[int]) -> None:
    low, high = np.array(inside, float), np.array(outside, float)
    y, both = labeled(low, high)
    found, mirrored = auroc(low, high), auroc(high, low)
    assert found.value + mirrored.value == pytest.approx(1.0, abs=1e-15)
    assert found.stderr == mirrored.stderr or found.stderr == pytest.approx(mirrored.stderr, rel=1e-9)
    assert found.value == pytest.approx(slow_auroc(low, high), abs=1e-14)
    assert aupr(low, high).value == pytest.approx(average_precision_score(y, both), abs=1e-14)
    assert aupr(low, high, "inside") == aupr(-high, -low, "outside")
    assert fpr_at_tpr(low, high).value == pytest.approx(slow_fpr(low, high, 0.95), abs=1e-14)


def test_a_hundred_thousand_samples_need_no_pairwise_comparison() -> None:
    low, high = scores(100_000, 100_000)
    exact = 0.5 * math.erfc(-1 / 2)  # of normal scores one apart: Phi(1 / sqrt 2)
    found = auroc(low, high)
    assert found.stderr is not None
    assert abs(found.value - exact) < 4 * found.stderr < 0.01
