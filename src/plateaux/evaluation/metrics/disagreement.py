"""How often, and how far, two members' answers differ."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from plateaux.core.metric import Metric
from plateaux.core.registry import metric
from plateaux.core.row_names import ALL_MEMBERS, MEAN_OF_PAIRS, RowName, ordered_pairs, pairs
from plateaux.core.stats.estimates import means_from_sums, ratio, ratios, sums_and_squares
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import log_probs_float64, predictions


@metric
def disagreement() -> Metric:
    """The share of samples on which two members' most likely classes differ."""

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        return sums_and_squares(_and_mean(_differ(_guesses(table))))

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return means_from_sums(sums, [*_pair_names(len(sums["sum"]) - 1), MEAN_OF_PAIRS])

    return Metric(
        settle,
        finish,
        higher_is_better=None,
        group="diversity",
        percent=True,
        min_members=2,
        definition="distinct pairs; of equal classes the first is the most likely one; standard error over samples",
    )


@metric
def der() -> Metric:
    """Disagreement-error ratio: the members' mean disagreement over their mean error.

    Of a pair, its disagreement over the mean error of the two. Where nobody errs there is no ratio: nan.
    """

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        guesses = _guesses(table)
        wrong = (guesses != batch.y).double()  # [M, B]
        of_pairs = torch.stack([(wrong[i] + wrong[j]) / 2 for i, j in pairs(len(wrong))])
        return ratio(_and_mean(_differ(guesses)), torch.cat([of_pairs, wrong.mean(0, keepdim=True)]))

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return ratios(sums, [*_pair_names(len(sums["a"]) - 1), ALL_MEMBERS])

    return Metric(
        settle,
        finish,
        higher_is_better=None,
        group="diversity",
        min_members=2,
        definition="E[disagreement] over distinct pairs / E[error] over members, a ratio of means; delta-method error",
    )


@metric
def kl() -> Metric:
    """Kullback-Leibler divergence KL(p_i || p_j) of one member's probabilities from another's, in nats."""

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        return sums_and_squares(_and_mean(_divergences(log_probs_float64(table))))

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        members = _members((len(sums["sum"]) - 1) // 2)
        return means_from_sums(sums, [*(RowName.ordered_pair(i, j) for i, j in ordered_pairs(members)), MEAN_OF_PAIRS])

    return Metric(
        settle,
        finish,
        higher_is_better=None,
        group="diversity",
        min_members=2,
        definition="nats; `member i to j` is KL(p_i || p_j); the mean is over both orders; standard error over samples",
    )


def _guesses(table: Tensor) -> Tensor:
    """Return the members' most likely classes `[M, B]`, as accuracy takes them."""
    return predictions(table)[: len(table)]


def _differ(guesses: Tensor) -> Tensor:
    """Return for every pair and sample whether the guesses differ, `[P, B]`."""
    return torch.stack([guesses[i] != guesses[j] for i, j in pairs(len(guesses))]).double()


def _divergences(log_p: Tensor) -> Tensor:
    """Return KL(p_i || p_j) of every ordered pair and sample, `[M (M - 1), B]`; one member against all at a time."""
    rows = []
    for i, own in enumerate(log_p):
        p = own.exp()
        # A class of probability 0 adds nothing, even where its logarithm is -inf on both sides.
        terms = torch.where(p > 0, p * (own - log_p), 0.0)  # [M, B, C]
        against = terms.sum(-1).clamp(min=0)
        rows += [against[:i], against[i + 1 :]]
    return torch.cat(rows)


def _and_mean(scores: Tensor) -> Tensor:
    """Return the pairs' scores `[P, B]` and, below them, their mean."""
    return torch.cat([scores, scores.mean(0, keepdim=True)])


def _pair_names(count: int) -> list[RowName]:
    return [RowName.pair(i, j) for i, j in pairs(_members(count))]


def _members(count: int) -> int:
    """Return how many members make so many distinct pairs."""
    return (1 + math.isqrt(1 + 8 * count)) // 2
