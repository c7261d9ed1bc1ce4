"""Combination rules compared with NumPy references and properties."""

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


def reference(logits: Tensor, how: str, weights: Array) -> Array:
    """The slow reference: probabilities `[B, C]`, sample by sample."""
    logits = logits.double().numpy()
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


def winner(logits: Tensor, sample: int) -> int:
    """The slow reference of a vote's outcome: most votes, then the mean probability, then the first."""
    votes = [int(row[sample].argmax()) for row in logits]
    p = np.mean([softmax(row[sample].double().numpy()) for row in logits], 0)
    return min(range(logits.shape[-1]), key=lambda label: (-votes.count(label), -p[label], label))


def given_to(how: str, members: int) -> Tensor | None:
    return weights_of(members) if how == "weighted" else None


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize(("members", "samples", "classes"), [(1, 9, 3), (3, 50, 10), (5, 1, 2), (4, 20, 1)])
def test_every_rule_equals_its_reference(how: str, members: int, samples: int, classes: int) -> None:
    logits = table_of(members, samples, classes)
    found = combine(logits, how, given_to(how, members))
    assert found.shape == (samples, classes)
    slack = 2e-6 if how == "majority" else 1e-12  # what breaks a tie
    np.testing.assert_allclose(found.exp().numpy(), reference(logits, how, weights_of(members).numpy()), atol=slack)


@pytest.mark.parametrize("how", RULES)
def test_a_single_member_is_unchanged(how: str) -> None:
    logits = table_of(1, 30, 4)
    found = combine(logits, how, [1.0] if how == "weighted" else None)
    if how == "majority":
        assert torch.equal(found.exp(), torch.eye(4, dtype=torch.float64)[logits[0].argmax(-1)])
    else:
        assert torch.equal(found, log_probabilities(logits)[0])


def test_the_means_equal_the_ensemble_rows_of_log_probabilities() -> None:
    logits = table_of(3, 20, 5)
    rows = log_probabilities(logits)
    assert torch.equal(combine(logits), rows[-2])
    assert torch.equal(combine(logits, "mean probability"), rows[-2])
    assert torch.equal(combine(logits, "mean logit"), rows[-1])


@given(
    members=st.integers(1, 6),
    classes=st.integers(1, 4),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16]),
)
@settings(max_examples=60)
def test_a_vote_is_won_by_most_votes_then_by_mean_probability(
    members: int, classes: int, seed: int, dtype: torch.dtype
) -> None:
    logits = table_of(members, 25, classes, seed=seed).to(dtype)
    pred = combine(logits, "majority").argmax(-1).tolist()
    assert pred == [winner(log_probabilities(logits)[:members], sample) for sample in range(25)]


def test_a_tie_of_votes_is_won_by_the_more_probable_class_then_the_first() -> None:
    logits = torch.tensor([[[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]], [[0.0, 0.0, 3.0], [0.0, 2.0, 0.0]]])
    found = combine(logits, "majority")
    assert found.argmax(-1).tolist() == [2, 0]
    assert found.exp()[0].tolist() == pytest.approx([0.5, 0.0, 0.5], abs=1e-6)
    assert found.logsumexp(-1).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_a_probable_class_without_votes_does_not_win_a_tie() -> None:
    # Class 2 has the highest mean probability, but every member's second choice gets no vote.
    logits = torch.tensor([[[3.0, -9.0, 2.9]], [[-9.0, 3.0, 2.9]]])
    assert int(combine(logits).argmax()) == 2
    assert int(combine(logits, "majority").argmax()) == 0


def test_a_tie_is_broken_in_float32_even_with_many_members() -> None:
    logits = torch.zeros(1000, 1, 1000)
    logits[torch.arange(1000), 0, torch.arange(1000)] = 5.0
    logits[700, 0, 700] = 6.0
    assert int(combine(logits, "majority").argmax()) == 700


@pytest.mark.parametrize("how", RULES)
def test_probabilities_sum_to_one(how: str) -> None:
    found = combine(table_of(4, 60, 7), how, given_to(how, 4))
    assert found.logsumexp(-1).abs().max() < 1e-12


@given(members=st.integers(1, 5), samples=st.integers(1, 12), classes=st.integers(1, 4), seed=st.integers(0, 99),
       data=st.data())  # fmt: skip
@settings(max_examples=40)
def test_the_order_of_members_and_the_batch_size_do_not_matter(
    members: int, samples: int, classes: int, seed: int, data: st.DataObject
) -> None:
    logits, weights = table_of(members, samples, classes, seed=seed), weights_of(members, seed=seed)
    order, cut = data.draw(st.permutations(range(members))), data.draw(st.integers(0, samples))
    for how in RULES:
        given, shuffled = (weights, weights[order]) if how == "weighted" else (None, None)
        whole = combine(logits, how, given).exp()
        torch.testing.assert_close(combine(logits[order], how, shuffled).exp(), whole, rtol=0, atol=1e-12)
        parts = [combine(logits[:, rows], how, given).exp() for rows in (slice(cut), slice(cut, None))]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)


def test_equal_weights_are_the_mean_probability() -> None:
    logits = table_of(4, 20, 5)
    torch.testing.assert_close(combine(logits, "weighted", [0.25] * 4), combine(logits, "mean probability"))


def test_a_member_with_weight_zero_is_ignored_even_if_its_logits_are_nan() -> None:
    logits = table_of(3, 10, 4)
    logits[1] = math.nan
    torch.testing.assert_close(combine(logits, "weighted", [0.5, 0, 0.5]), combine(logits[[0, 2]]))


@pytest.mark.parametrize("how", RULES)
def test_probabilities_of_exactly_zero_and_one_are_preserved(how: str) -> None:
    logits = torch.zeros(2, 3, 3)
    logits[..., 1] = 1e4
    found = combine(logits, how, [0.5, 0.5] if how == "weighted" else None)
    assert not found.isnan().any()
    torch.testing.assert_close(found.exp(), torch.tensor([[0.0, 1.0, 0.0]] * 3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_combined_in_float32(how: str, dtype: torch.dtype) -> None:
    logits = table_of(3, 40, 6).to(dtype)
    found = combine(logits, how, given_to(how, 3))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.exp().numpy(), reference(logits, how, weights_of(3).numpy()), atol=3e-6)


def test_inputs_that_look_like_probabilities_are_treated_as_logits() -> None:
    # Released code takes a logits within [0, 1] for probabilities.
    logits = torch.tensor([[[0.9, 0.1]], [[0.7, 0.3]]], dtype=torch.float64)
    assert combine(logits).exp().tolist()[0] == pytest.approx(
        reference(logits, "mean probability", np.ones(2))[0].tolist()
    )


def test_every_member_votes_if_classes_are_excluded() -> None:
    # Released code lets a member vote among all classes and drops its vote if the class is masked. Here two of three
    # members would have been dropped, and the third alone would have decided.
    logits = torch.tensor([[[5.0, 1.0, 2.0]], [[5.0, 1.0, 2.0]], [[0.0, 4.0, 0.0]]])
    logits[..., 0] = -math.inf
    found = combine(logits, "majority").exp()[0]
    assert found.tolist() == pytest.approx([0, 1 / 3, 2 / 3], abs=1e-6)
    assert combine(logits).exp()[0, 0] == combine(logits, "mean logit").exp()[0, 0] == 0


def test_invalid_combinations_are_rejected_with_a_hint() -> None:
    logits = table_of(2, 3, 4)
    with pytest.raises(RecipeError, match="did you mean 'mean logit'"):
        combine(logits, "mean logits")
    with pytest.raises(RecipeError, match="Omit them, or combine by"):
        combine(logits, "majority", [0.5, 0.5])
    with pytest.raises(RecipeError, match="at least one member"):
        combine(logits[:0])
    assert set(COMBINE) < set(RULES)


@pytest.mark.parametrize(
    "weights", [None, [1.0], [0.5, 0.6], [-0.5, 1.5], [math.nan, 1.0], [math.inf, 0.0], [[0.5, 0.5]], [0.0, 0.0]]
)
def test_invalid_weights_are_rejected(weights: list[float] | None) -> None:
    with pytest.raises(RecipeError, match="sum to 1"):
        combine(table_of(2, 3, 4), "weighted", weights)


def test_float32_weights_are_normalized_exactly() -> None:
    found = normalized_weights(torch.full((3,), 1 / 3, dtype=torch.float32), 3)
    assert found.dtype == torch.float64
    assert float(found.sum()) == 1.0
