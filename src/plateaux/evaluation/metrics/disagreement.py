"""Pairwise diversity of predictions: disagreement, disagreement-error ratio (DER), and KL divergence."""

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
    """Disagreement: fraction of samples for which two members predict different classes."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        return sums_and_squares(_append_mean(_differ(_member_predictions(logits))))

    def compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return means_from_sums(sums, [*_pair_names(len(sums["sum"]) - 1), MEAN_OF_PAIRS])

    return Metric(
        update,
        compute,
        higher_is_better=None,
        group="diversity",
        percent=True,
        min_members=2,
        definition="distinct pairs; ties go to the first class; standard error over samples",
    )


@metric
def der() -> Metric:
    """Disagreement-error ratio (DER): mean disagreement of the members divided by their mean error.

    For a pair: its disagreement divided by the mean error of the two members. NaN if no member makes an error.
    """

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        preds = _member_predictions(logits)
        incorrect = (preds != batch.y).double()  # [M, B]
        pair_errors = torch.stack([(incorrect[i] + incorrect[j]) / 2 for i, j in pairs(len(incorrect))])
        return ratio(_append_mean(_differ(preds)), torch.cat([pair_errors, incorrect.mean(0, keepdim=True)]))

    def compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return ratios(sums, [*_pair_names(len(sums["a"]) - 1), ALL_MEMBERS])

    return Metric(
        update,
        compute,
        higher_is_better=None,
        group="diversity",
        min_members=2,
        definition="E[disagreement] over distinct pairs / E[error] over members, a ratio of means; standard error by "
        "the delta method; NaN where the mean error is 0",
    )


@metric
def kl() -> Metric:
    """Kullback-Leibler (KL) divergence KL(p_i || p_j) between the probabilities of two members, in nats."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        return sums_and_squares(_append_mean(_divergences(log_probs_float64(logits))))

    def compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
        members = _count_members((len(sums["sum"]) - 1) // 2)
        return means_from_sums(sums, [*(RowName.ordered_pair(i, j) for i, j in ordered_pairs(members)), MEAN_OF_PAIRS])

    return Metric(
        update,
        compute,
        higher_is_better=None,
        group="diversity",
        min_members=2,
        definition="nats; `member i to j` is KL(p_i || p_j); the mean is over both orders; standard error over samples",
    )


def _member_predictions(logits: Tensor) -> Tensor:
    """Return the predicted classes of the members `[M, B]`, with the same tie-breaking as accuracy."""
    return predictions(logits)[: len(logits)]


def _differ(preds: Tensor) -> Tensor:
    """Return for every pair and sample whether the predictions differ, `[P, B]`."""
    return torch.stack([preds[i] != preds[j] for i, j in pairs(len(preds))]).double()


def _divergences(log_p: Tensor) -> Tensor:
    """Return KL(p_i || p_j) for every ordered pair and sample, `[M (M - 1), B]`, one row of pairs at a time."""
    rows = []
    for i, own in enumerate(log_p):
        p = own.exp()
        # A class of probability 0 adds nothing; without `where`, -inf - -inf would be NaN.
        terms = torch.where(p > 0, p * (own - log_p), 0.0)  # [M, B, C]
        divergences = terms.sum(-1).clamp(min=0)
        rows += [divergences[:i], divergences[i + 1 :]]
    return torch.cat(rows)


def _append_mean(scores: Tensor) -> Tensor:
    """Return the scores of pairs `[P, B]` with their mean as an additional last row."""
    return torch.cat([scores, scores.mean(0, keepdim=True)])


def _pair_names(pair_count: int) -> list[RowName]:
    return [RowName.pair(i, j) for i, j in pairs(_count_members(pair_count))]


def _count_members(pair_count: int) -> int:
    """Return the number of members that have this number of distinct pairs."""
    return (1 + math.isqrt(1 + 8 * pair_count)) // 2
