"""Error correlation of members, and the accuracy that an ensemble or a selection of members can gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isnan, nan, sqrt

import torch
from torch import Tensor

from plateaux.core.metric import Metric
from plateaux.core.registry import metric
from plateaux.core.row_names import ALL_MEMBERS, MEAN_LOGIT, MEAN_OF_PAIRS, MEAN_PROBABILITY, RowName, pairs
from plateaux.core.stats.estimates import proportion, ratio, ratios
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import predictions

PairValue = tuple[float, tuple[float, float, float, float] | None]
"""The value of a pair, and its derivatives by the counts n11, n10, n01, n00; None if it has no standard error."""


@metric
def error_overlap() -> Metric:
    """Error overlap (Jaccard index): of the samples that either of two members gets wrong, the fraction both get wrong.

    0: the members never make an error on the same sample; 1: always. NaN for a pair without errors.
    """
    definition = (
        "ratio of counts for a pair, NaN if neither member makes an error; the mean is over the ratios of the pairs "
        "and omits NaN; standard errors by the delta method, that of the mean with the covariances of the pairs"
    )
    return _pair_metric(_jaccard, definition)


@metric
def q_statistic() -> Metric:
    """Yule's Q statistic of the errors of two members: 1 errors coincide, 0 independent, -1 never coincide.

    Q = (n11 n00 - n01 n10) / (n11 n00 + n01 n10), where n11 samples are correct for both members and n00 for neither.
    """
    definition = (
        "NaN for 0/0; the mean omits NaN; standard error (1 - Q^2) / 2 sqrt(1/n11 + 1/n00 + 1/n01 + 1/n10) for a pair, "
        "by the delta method with the covariances of the pairs for the mean; none if a count is zero"
    )
    return _pair_metric(_yule, definition)


@metric
def eir() -> Metric:
    """Ensemble improvement rate (EIR): relative reduction of the mean error of the members by the ensemble."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        incorrect = (predictions(logits) != batch.y).double()  # [M + 2, B]
        member_error = incorrect[:-2].mean(0)
        return ratio(member_error - incorrect[-2:], member_error.expand(2, -1))

    return Metric(
        update,
        lambda sums: ratios(sums, [MEAN_PROBABILITY, MEAN_LOGIT]),
        group="diversity",
        min_members=2,
        definition="(mean error of members - error of ensemble) / mean error of members; standard error by the delta "
        "method; NaN for 0/0",
    )


@metric
def oracle() -> Metric:
    """Oracle accuracy: fraction of samples for which at least one member is correct."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        correct = ~_incorrect(logits, batch).all(0)
        return {"correct": correct.sum(), "count": torch.tensor(len(batch))}

    return Metric(
        update,
        lambda sums: {ALL_MEMBERS: proportion(float(sums["correct"]), float(sums["count"]))},
        group="diversity",
        percent=True,
        min_members=2,
        definition="an upper bound for selecting among members, not a predictor; grows with the number of members; "
        "binomial standard error",
    )


@metric
def best_member() -> Metric:
    """Accuracy of the best single member, selected on the same samples."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        return {"incorrect": _incorrect(logits, batch).sum(-1), "count": torch.tensor(len(batch))}

    def compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
        count = float(sums["count"])
        return {ALL_MEMBERS: proportion(count - float(sums["incorrect"].min()), count)}

    return Metric(
        update,
        compute,
        group="diversity",
        percent=True,
        min_members=2,
        definition="optimistically biased: selected on the same samples; binomial standard error",
    )


def _incorrect(logits: Tensor, batch: Batch) -> Tensor:
    """Return which samples each member gets wrong, `[M, B]`, with the same tie-breaking as accuracy."""
    return predictions(logits)[: len(logits)] != batch.y


def _pair_metric(pair_value: Callable[[float, float, float, float], PairValue], definition: str) -> Metric:
    """Return the metric of a function of the counts of a pair.

    The counts are n11 (both correct), n10 (only the first), n01 (only the second), and n00 (neither).
    """

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        incorrect = _incorrect(logits, batch).double()
        both = torch.stack([incorrect[i] * incorrect[j] for i, j in pairs(len(incorrect))])
        indicators = torch.cat([torch.ones_like(incorrect[:1]), incorrect, both])  # [1 + M + P, B], all 0 or 1
        return {"joint": indicators @ indicators.T, "incorrect": incorrect.sum(-1)}

    def compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return _compute_pairs(sums, pair_value)

    return Metric(update, compute, higher_is_better=None, group="diversity", min_members=2, definition=definition)


def _compute_pairs(
    sums: TensorTree, pair_value: Callable[[float, float, float, float], PairValue]
) -> Mapping[RowName, Estimate]:
    """Return the values of the pairs and their mean, from the joint counts of errors of members and of pairs.

    To first order, a value changes by a weighted sum of the indicators of `update`. The weights of the pairs are
    averaged for the mean, so its variance includes the covariances of the pairs.
    """
    joint, members = sums["joint"].cpu(), len(sums["incorrect"])
    totals = joint.diagonal().tolist()  # the square of an indicator, 0 or 1, is the indicator
    rows: dict[RowName, Estimate] = {}
    weights = []
    for both, (i, j) in enumerate(pairs(members), start=1 + members):
        first, second = 1 + i, 1 + j
        n00 = totals[both]
        n10, n01 = totals[second] - n00, totals[first] - n00
        counts = (totals[0] - totals[first] - totals[second] + n00, n10, n01, n00)
        value, derivatives = pair_value(*counts)
        rows[RowName.pair(i, j)] = Estimate(
            value, derivatives and sqrt(sum(n * d * d for n, d in zip(counts, derivatives, strict=True)))
        )
        if derivatives:
            d11, d10, d01, d00 = derivatives
            weight = torch.zeros(len(joint), dtype=torch.float64)
            weight[0], weight[first], weight[second], weight[both] = d11, d01 - d11, d10 - d11, d11 - d10 - d01 + d00
            weights.append(weight)
    return {**rows, MEAN_OF_PAIRS: _mean([row.value for row in rows.values()], weights, joint)}


def _mean(values: list[float], weights: list[Tensor], joint: Tensor) -> Estimate:
    """Return the mean of the pairs that are not NaN, with its standard error if each of these pairs has one."""
    defined = [value for value in values if not isnan(value)]
    if not defined:
        return Estimate(nan)
    average = sum(defined) / len(defined)
    if len(weights) < len(defined):
        return Estimate(average)
    weight = torch.stack(weights).mean(0)
    # The influences of the samples sum to zero, so the sum of their squares is the variance.
    return Estimate(average, sqrt(max(float(weight @ joint @ weight), 0.0)))


def _jaccard(n11: float, n10: float, n01: float, n00: float) -> PairValue:
    either = n10 + n01 + n00
    if not either:
        return nan, None
    overlap = n00 / either
    return overlap, (0.0, -overlap / either, -overlap / either, (1 - overlap) / either)


def _yule(n11: float, n10: float, n01: float, n00: float) -> PairValue:
    same, different = n11 * n00, n10 * n01
    if not same + different:
        return nan, None
    q = (same - different) / (same + different)
    if not same * different:
        return q, None
    slope = 2 * same * different / (same + different) ** 2
    return q, (slope / n11, -slope / n10, -slope / n01, slope / n00)
