"""Greedy selection compared with a slow reference and exhaustive search."""

from __future__ import annotations

import json
import math
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plateaux.core.errors import RecipeError, RunError
from plateaux.ensembles import selection
from plateaux.ensembles.combine import combine
from plateaux.ensembles.selection import Selection, select

OBJECTIVES = ["nll", "accuracy", "brier"]


def pool_of(members: int, samples: int, classes: int, *, seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """A pool that knows something: logits lean towards the right class, more in some members than in others."""
    chance = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (samples,), generator=chance)
    logits = scale * torch.randn(members, samples, classes, generator=chance, dtype=torch.float64)
    lean = torch.rand(members, 1, generator=chance, dtype=torch.float64) * scale
    return (logits + lean[..., None] * torch.eye(classes, dtype=torch.float64)[y]).log_softmax(-1), y


def score(objective: str, p: np.ndarray, y: np.ndarray) -> float:
    """The slow reference of an objective: higher accuracy, lower nll and Brier are better."""
    if objective == "accuracy":
        return float(np.mean(p.argmax(-1) == y))
    if objective == "nll":
        return float(np.mean([-np.log(row[label]) for row, label in zip(p, y, strict=True)]))
    return float(np.mean([((row - np.eye(len(row))[label]) ** 2).sum() for row, label in zip(p, y, strict=True)]))


def better(objective: str, a: float, b: float) -> bool:
    return a > b + 1e-12 if objective == "accuracy" else a < b - 1e-12


def reference(log_p: Tensor, y: Tensor, size: int, objective: str, unique: bool) -> tuple[list[int], list[float]]:
    """The slow reference: the mean of the chosen is taken anew for every candidate."""
    p, labels = log_p.double().exp().numpy(), y.numpy()
    chosen: list[int] = []
    scores: list[float] = []
    while len(set(chosen) if unique else chosen) < size:
        tried = [score(objective, p[[*chosen, i]].mean(0), labels) for i in range(len(p))]
        best = 0
        for i, found in enumerate(tried):
            best = i if better(objective, found, tried[best]) else best
        if scores and not better(objective, tried[best], scores[-1]):
            break
        chosen.append(best)
        scores.append(tried[best])
    return chosen, scores


@given(
    members=st.integers(1, 6),
    samples=st.integers(1, 40),
    classes=st.integers(1, 5),
    seed=st.integers(0, 999),
    size=st.integers(1, 8),
    objective=st.sampled_from(OBJECTIVES),
    unique=st.booleans(),
)
@settings(max_examples=120)
def test_a_selection_equals_the_reference(
    members: int, samples: int, classes: int, seed: int, size: int, objective: str, unique: bool
) -> None:
    log_p, y = pool_of(members, samples, classes, seed=seed)
    size = min(size, members) if unique else size
    found = select(log_p, y, size, metric=objective, unique=unique)  # type: ignore[arg-type]
    chosen, scores = reference(log_p, y, size, objective, unique)
    assert list(found.chosen) == chosen
    assert found.scores == pytest.approx(scores, rel=1e-10, abs=1e-12)
    assert found.weights == pytest.approx([chosen.count(i) / len(chosen) for i in range(members)])


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(8))
def test_a_selection_is_between_the_best_member_and_the_best_multiset(objective: str, seed: int) -> None:
    log_p, y = pool_of(4, 25, 3, seed=seed)
    p, labels = log_p.exp().numpy(), y.numpy()
    found = select(log_p, y, 4, metric=objective)  # type: ignore[arg-type]
    sets = [draws for size in range(1, 5) for draws in combinations_with_replacement(range(4), size)]
    all_of_them = {draws: score(objective, p[list(draws)].mean(0), labels) for draws in sets}
    sign = -1 if objective == "accuracy" else 1
    best = min(sign * value for value in all_of_them.values())
    single = min(sign * all_of_them[i,] for i in range(4))
    assert best - 1e-12 <= sign * found.scores[-1] <= single + 1e-12
    assert sign * found.scores[0] == pytest.approx(single)
    assert found.scores[-1] == pytest.approx(all_of_them[tuple(sorted(found.chosen))])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_addition_improves_the_score_and_the_weights_reproduce_it(objective: str) -> None:
    log_p, y = pool_of(8, 200, 5, seed=3)
    found = select(log_p, y, 20, metric=objective)  # type: ignore[arg-type]
    steps = np.diff(found.scores) * (1 if objective == "accuracy" else -1)
    assert (steps > 0).all()
    assert 1 < len(found.chosen) < 20  # it stopped by itself
    p = combine(log_p, "weighted", found.weights).exp().numpy()
    assert score(objective, p, y.numpy()) == pytest.approx(found.scores[-1], rel=1e-9)


def test_selection_by_accuracy_maximizes_it() -> None:
    # The reference implementation of hyper-deep ensembles minimises it, and would take the worst member here.
    y = torch.zeros(10, dtype=torch.int64)
    right = torch.tensor([2, 9, 5])[:, None] > torch.arange(10)
    log_p = torch.stack([right.double(), 1 - right.double()], -1).mul(3).log_softmax(-1)
    found = select(log_p, y, 1, metric="accuracy")
    assert found.chosen == (1,)
    assert found.scores == (0.9,)
    assert int(right.double().mean(-1).argmin()) == 0  # the mistake


def test_size_counts_additions_or_distinct_members() -> None:
    # Member 0 is better than 1, but 1 knows the sample that 0 is incorrect about: the best mixture is mostly 0.
    p = torch.tensor([[[0.9, 0.1]] * 9 + [[0.05, 0.95]], [[0.6, 0.4]] * 10], dtype=torch.float64)
    y = torch.zeros(10, dtype=torch.int64)
    draws = select(p.log(), y, 3)
    assert draws.chosen == (0, 1, 0)
    assert draws.weights == pytest.approx((2 / 3, 1 / 3))
    members = select(p.log(), y, 2, unique=True)
    assert members.chosen == (0, 1)
    assert (draws.unique, members.unique) == (False, True)


def test_unique_counts_distinct_members_and_terminates() -> None:
    log_p, y = pool_of(6, 500, 4, seed=2)
    by_members = select(log_p, y, 5, unique=True)
    assert len(set(by_members.chosen)) <= 5
    assert len(by_members.chosen) > len(set(by_members.chosen))
    by_draws = select(log_p, y, len(by_members.chosen))
    assert by_draws.chosen == by_members.chosen


def test_the_number_of_additions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MAX_DRAWS_PER_MEMBER", 1)
    log_p, y = pool_of(6, 500, 4, seed=2)
    assert len(select(log_p, y, 5, unique=True).chosen) == 5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_among_equal_members_the_first_is_selected_once(objective: str) -> None:
    log_p, y = pool_of(1, 30, 4)
    found = select(log_p.expand(5, -1, -1), y, 5, metric=objective)  # type: ignore[arg-type]
    assert found.chosen == (0,)
    assert found.weights == (1.0, 0.0, 0.0, 0.0, 0.0)


@given(seed=st.integers(0, 99), order=st.permutations(range(5)))
@settings(max_examples=30)
def test_the_order_of_members_and_samples_does_not_matter(seed: int, order: list[int]) -> None:
    log_p, y = pool_of(5, 60, 3, seed=seed)
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    one, other = select(log_p, y, 6), select(log_p[order][:, shuffled], y[shuffled], 6)
    assert [order[member] for member in other.chosen] == list(one.chosen)
    assert other.scores == pytest.approx(one.scores)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_half_precision_log_probabilities_are_summed_in_float64(objective: str, dtype: torch.dtype) -> None:
    log_p, y = pool_of(4, 50, 3, seed=5)
    few = log_p.to(dtype)
    found = select(few, y, 6, metric=objective)  # type: ignore[arg-type]
    chosen, scores = reference(few, y, 6, objective, False)
    assert list(found.chosen) == chosen
    assert found.scores == pytest.approx(scores, rel=1e-10)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_probabilities_of_exactly_zero_and_one(objective: str) -> None:
    # Each member is sure, and incorrect about one sample of three; together they are right, though never sure.
    y = torch.zeros(3, dtype=torch.int64)
    incorrect = torch.eye(3)
    log_p = torch.stack([1 - incorrect, incorrect], -1).log()
    found = select(log_p, y, 3, metric=objective)  # type: ignore[arg-type]
    assert found.chosen[0] == 0
    if objective == "nll":  # two halves leave no zero: -log(1/2) twice of three
        assert found.chosen[:2] == (0, 1)
        assert found.scores[0] == math.inf
        assert found.scores[1] == pytest.approx(2 * math.log(2) / 3)
    if objective == "brier":
        assert found.scores[0] == pytest.approx(2 / 3)
    if objective == "accuracy":
        assert found.scores[-1] == 1.0


def test_a_pool_with_infinite_losses_selects_its_first_member() -> None:
    log_p = torch.tensor([[[-math.inf, 0.0]], [[-math.inf, 0.0]]])
    found = select(log_p, torch.tensor([0]), 3)
    assert found.chosen == (0,)
    assert found.scores == (math.inf,)


def test_inputs_are_not_modified() -> None:
    log_p, y = pool_of(3, 10, 4)
    before = log_p.clone(), y.clone()
    for objective in OBJECTIVES:
        select(log_p, y, 3, metric=objective)  # type: ignore[arg-type]
    assert torch.equal(log_p, before[0])
    assert torch.equal(y, before[1])


def test_the_record_round_trips_through_json_with_its_samples() -> None:
    log_p, y = pool_of(3, 10, 4)
    found = select(log_p, y, 4, metric="brier", ids=torch.arange(100, 110))
    assert found.samples == tuple(range(100, 110))
    again = Selection.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found
    assert list(found.to_dict()) == ["chosen", "weights", "scores", "metric", "unique", "samples"]


@pytest.mark.parametrize("record", [{}, {"chosen": 3}, {"chosen": ["a"]}])
def test_an_invalid_record_is_rejected(record: dict[str, object]) -> None:
    with pytest.raises(RunError, match="Select the members again"):
        Selection.from_dict(record)


def test_invalid_selections_are_rejected_with_a_hint() -> None:
    log_p, y = pool_of(3, 10, 4)
    with pytest.raises(RecipeError, match="did you mean 'accuracy'"):
        select(log_p, y, 1, metric="acuracy")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"are \[3, 10, 4\] and labels \[9\]"):
        select(log_p, y[:9], 1)
    with pytest.raises(RecipeError, match=r"Log-probabilities are \[0, 10, 4\]"):
        select(log_p[:0], y, 1)
    with pytest.raises(RecipeError, match="allowed: 1 or more"):
        select(log_p, y, 0)
    with pytest.raises(RecipeError, match="allowed: 1 to 3"):
        select(log_p, y, 4, unique=True)
    with pytest.raises(RecipeError, match="from 0 to 3"):
        select(log_p, y + 4, 1)
    with pytest.raises(RecipeError, match="9 sample ids were given for 10"):
        select(log_p, y, 1, ids=range(9))
    for broken in (log_p * 3, log_p.masked_fill(log_p < -1, math.nan), log_p.exp()):
        with pytest.raises(RecipeError, match="Apply log_softmax"):
            select(torch.stack([log_p[0], broken[1]]), y, 1)
