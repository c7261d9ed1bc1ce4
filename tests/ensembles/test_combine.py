"""Combined tables are what numpy says of the members' probabilities, and one member is itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.ensembles.combine import COMBINE, RULES, combine, normalized_weights
from plateaux.ensembles.log_probs import log_probabilities

Array = np.ndarray


def table_of(members: int, samples: int, classes: int, *, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(members, samples, classes, generator=chance, dtype=torch.float64)


def weights_of(members: int, *, seed: int = 0) -> Tensor:
    drawn = torch.rand(members, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    return drawn / drawn.sum()


def softmax(x: Array) -> Array:
    raised = np.exp(x - x.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def twin(table: Tensor, how: str, weights: Array) -> Array:
    """The slow twin: probabilities `[B, C]`, sample by sample."""
    logits = table.double().numpy()
    members, samples, classes = logits.shape
    p = np.stack([softmax(row) for row in logits])
    if how == "mean probability":
        return p.mean(0)
    if how == "mean logit":
        return softmax(logits.mean(0))
    if how == "weighted":
        return sum(weight * row for weight, row in zip(weights, p, strict=True))
    found = np.zeros((samples, classes))
    for sample in range(samples):
        for member in range(members):
            found[sample, logits[member, sample].argmax()] += 1 / members
    return found


def winner(table: Tensor, sample: int) -> int:
    """The slow twin of a vote's outcome: most votes, then the mean probability, then the first."""
    votes = [int(row[sample].argmax()) for row in table]
    p = np.mean([softmax(row[sample].double().numpy()) for row in table], 0)
    return min(range(table.shape[-1]), key=lambda label: (-votes.count(label), -p[label], label))


def given_to(how: str, members: int) -> Tensor | None:
    return weights_of(members) if how == "weighted" else None


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize(("members", "samples", "classes"), [(1, 9, 3), (3, 50, 10), (5, 1, 2), (4, 20, 1)])
def test_every_way_is_what_the_slow_twin_says(how: str, members: int, samples: int, classes: int) -> None:
    table = table_of(members, samples, classes)
    found = combine(table, how, given_to(how, members))
    assert found.shape == (samples, classes)
    slack = 2e-6 if how == "majority" else 1e-12  # what breaks a tie
    np.testing.assert_allclose(found.exp().numpy(), twin(table, how, weights_of(members).numpy()), atol=slack)


@pytest.mark.parametrize("how", RULES)
def test_one_member_is_itself(how: str) -> None:
    table = table_of(1, 30, 4)
    found = combine(table, how, [1.0] if how == "weighted" else None)
    if how == "majority":
        assert torch.equal(found.exp(), torch.eye(4, dtype=torch.float64)[table[0].argmax(-1)])
    else:
        assert torch.equal(found, log_probabilities(table)[0])


def test_means_are_the_rows_that_measures_see() -> None:
    table = table_of(3, 20, 5)
    rows = log_probabilities(table)
    assert torch.equal(combine(table), rows[-2])
    assert torch.equal(combine(table, "mean probability"), rows[-2])
    assert torch.equal(combine(table, "mean logit"), rows[-1])


@given(
    members=st.integers(1, 6),
    classes=st.integers(1, 4),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16]),
)
@settings(deadline=None, max_examples=60)
def test_a_vote_is_won_by_most_votes_then_by_mean_probability(
    members: int, classes: int, seed: int, dtype: torch.dtype
) -> None:
    table = table_of(members, 25, classes, seed=seed).to(dtype)
    guess = combine(table, "majority").argmax(-1).tolist()
    assert guess == [winner(log_probabilities(table)[:members], sample) for sample in range(25)]


def test_a_tie_of_votes_goes_to_the_more_probable_class_and_the_rest_to_the_first() -> None:
    table = torch.tensor([[[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]], [[0.0, 0.0, 3.0], [0.0, 2.0, 0.0]]])
    found = combine(table, "majority")
    assert found.argmax(-1).tolist() == [2, 0]
    assert found.exp()[0].tolist() == pytest.approx([0.5, 0.0, 0.5], abs=1e-6)
    assert found.logsumexp(-1).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_a_probable_class_without_votes_does_not_win_a_tie() -> None:
    # Class 2 has the highest mean probability, but everybody's second choice gets no vote.
    table = torch.tensor([[[3.0, -9.0, 2.9]], [[-9.0, 3.0, 2.9]]])
    assert int(combine(table).argmax()) == 2
    assert int(combine(table, "majority").argmax()) == 0


def test_a_tie_is_broken_in_float32_even_among_very_many() -> None:
    table = torch.zeros(1000, 1, 1000)
    table[torch.arange(1000), 0, torch.arange(1000)] = 5.0
    table[700, 0, 700] = 6.0
    assert int(combine(table, "majority").argmax()) == 700


@pytest.mark.parametrize("how", RULES)
def test_probabilities_sum_to_one(how: str) -> None:
    found = combine(table_of(4, 60, 7), how, given_to(how, 4))
    assert found.logsumexp(-1).abs().max() < 1e-12


@given(members=st.integers(1, 5), samples=st.integers(1, 12), classes=st.integers(1, 4), seed=st.integers(0, 99),
       data=st.data())  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_neither_the_order_of_members_nor_the_cut_of_batches_matters(
    members: int, samples: int, classes: int, seed: int, data: st.DataObject
) -> None:
    table, weights = table_of(members, samples, classes, seed=seed), weights_of(members, seed=seed)
    order, cut = data.draw(st.permutations(range(members))), data.draw(st.integers(0, samples))
    for how in RULES:
        given, shuffled = (weights, weights[order]) if how == "weighted" else (None, None)
        whole = combine(table, how, given).exp()
        torch.testing.assert_close(combine(table[order], how, shuffled).exp(), whole, rtol=0, atol=1e-12)
        parts = [combine(table[:, rows], how, given).exp() for rows in (slice(cut), slice(cut, None))]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)


def test_equal_weights_are_the_mean_probability() -> None:
    table = table_of(4, 20, 5)
    torch.testing.assert_close(combine(table, "weighted", [0.25] * 4), combine(table, "mean probability"))


def test_a_member_without_weight_has_no_say_even_if_it_is_no_number() -> None:
    table = table_of(3, 10, 4)
    table[1] = math.nan
    torch.testing.assert_close(combine(table, "weighted", [0.5, 0, 0.5]), combine(table[[0, 2]]))


@pytest.mark.parametrize("how", RULES)
def test_probabilities_of_exactly_zero_and_one_stay_so(how: str) -> None:
    table = torch.zeros(2, 3, 3)
    table[..., 1] = 1e4
    found = combine(table, how, [0.5, 0.5] if how == "weighted" else None)
    assert not found.isnan().any()
    torch.testing.assert_close(found.exp(), torch.tensor([[0.0, 1.0, 0.0]] * 3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_few_digits_are_combined_in_many(how: str, dtype: torch.dtype) -> None:
    table = table_of(3, 40, 6).to(dtype)
    found = combine(table, how, given_to(how, 3))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.exp().numpy(), twin(table, how, weights_of(3).numpy()), atol=3e-6)


def test_logits_that_look_like_probabilities_are_logits_all_the_same() -> None:
    # Released code takes a table within [0, 1] for probabilities.
    table = torch.tensor([[[0.9, 0.1]], [[0.7, 0.3]]], dtype=torch.float64)
    assert combine(table).exp().tolist()[0] == pytest.approx(twin(table, "mean probability", np.ones(2))[0].tolist())


def test_nobody_abstains_from_a_vote_among_some_of_the_classes() -> None:
    # Released code lets a member vote among all classes and drops its vote if the class is masked. Here two of three
    # members would have been dropped, and the third alone would have decided.
    table = torch.tensor([[[5.0, 1.0, 2.0]], [[5.0, 1.0, 2.0]], [[0.0, 4.0, 0.0]]])
    table[..., 0] = -math.inf
    found = combine(table, "majority").exp()[0]
    assert found.tolist() == pytest.approx([0, 1 / 3, 2 / 3], abs=1e-6)
    assert combine(table).exp()[0, 0] == combine(table, "mean logit").exp()[0, 0] == 0


def test_what_cannot_be_combined_is_refused_with_a_way_out() -> None:
    table = table_of(2, 3, 4)
    with pytest.raises(RecipeError, match="did you mean 'mean logit'"):
        combine(table, "mean logits")
    with pytest.raises(RecipeError, match="leave the weights out"):
        combine(table, "majority", [0.5, 0.5])
    with pytest.raises(RecipeError, match="a member or more"):
        combine(table[:0])
    assert set(COMBINE) < set(RULES)


@pytest.mark.parametrize(
    "weights", [None, [1.0], [0.5, 0.6], [-0.5, 1.5], [math.nan, 1.0], [math.inf, 0.0], [[0.5, 0.5]], [0.0, 0.0]]
)
def test_weights_that_are_no_shares_are_refused(weights: list[float] | None) -> None:
    with pytest.raises(RecipeError, match="sum to 1"):
        combine(table_of(2, 3, 4), "weighted", weights)


def test_shares_in_float32_are_made_to_sum_to_one_exactly() -> None:
    found = normalized_weights(torch.full((3,), 1 / 3, dtype=torch.float32), 3)
    assert found.dtype == torch.float64
    assert float(found.sum()) == 1.0
