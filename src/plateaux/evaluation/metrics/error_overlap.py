"""Whether members err on the same samples, and what that leaves an ensemble to gain."""

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

Found = tuple[float, tuple[float, float, float, float] | None]
"""A pair's number, and how it moves with the four cells of its table; None where that says nothing of its error."""


@metric
def error_overlap() -> Metric:
    """Of the samples that either of two members gets wrong, the share that both get wrong.

    The Jaccard index of their errors: 0, they never err together; 1, always. Nan for a pair that never errs.
    """
    convention = (
        "ratio of counts for a pair, nan where neither errs; the mean is of the pairs' ratios and leaves such pairs "
        "out; delta-method errors, that of the mean with the pairs' covariances"
    )
    return _of_errors(_jaccard, convention)


@metric
def q_statistic() -> Metric:
    """Yule's Q of two members' right and wrong answers: 1, they err together; 0, independently; -1, never together.

    Q = (n11 n00 - n01 n10) / (n11 n00 + n01 n10), n11 the samples both get right, n00 those both get wrong.
    """
    convention = (
        "nan for 0/0; the mean leaves such pairs out; standard error (1 - Q^2) / 2 sqrt(1/n11 + 1/n00 + 1/n01 + 1/n10) "
        "for a pair, the delta method with the pairs' covariances for the mean; none where a count is zero"
    )
    return _of_errors(_yule, convention)


@metric
def eir() -> Metric:
    """Ensemble improvement rate: the share of the members' mean error that the ensemble takes away."""

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        wrong = (predictions(table) != batch.y).double()  # [M + 2, B]
        members = wrong[:-2].mean(0)
        return ratio(members - wrong[-2:], members.expand(2, -1))

    return Metric(
        settle,
        lambda sums: ratios(sums, [MEAN_PROBABILITY, MEAN_LOGIT]),
        group="diversity",
        min_members=2,
        definition="(mean error of members - error of ensemble) / mean error of members; delta-method error; nan: 0/0",
    )


@metric
def oracle() -> Metric:
    """Oracle accuracy: the share of samples that at least one member gets right."""

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        right = ~_wrong(table, batch).all(0)
        return {"right": right.sum(), "count": torch.tensor(len(batch))}

    return Metric(
        settle,
        lambda sums: {ALL_MEMBERS: proportion(float(sums["right"]), float(sums["count"]))},
        group="diversity",
        percent=True,
        min_members=2,
        definition="a bound for choosing among members, not a predictor; grows with their number; binomial error",
    )


@metric
def best_member() -> Metric:
    """Accuracy of the best single member, chosen in hindsight on these very samples."""

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        return {"wrong": _wrong(table, batch).sum(-1), "count": torch.tensor(len(batch))}

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        count = float(sums["count"])
        return {ALL_MEMBERS: proportion(count - float(sums["wrong"].min()), count)}

    return Metric(
        settle,
        finish,
        group="diversity",
        percent=True,
        min_members=2,
        definition="chosen on the samples it is measured on, so that it flatters; binomial error",
    )


def _wrong(table: Tensor, batch: Batch) -> Tensor:
    """Return which samples each member gets wrong, `[M, B]`, as accuracy counts them."""
    return predictions(table)[: len(table)] != batch.y


def _of_errors(number: Callable[[float, float, float, float], Found], convention: str) -> Metric:
    """Return the measure of a number of the counts n11, n10, n01, n00: both right, only the first, second, none."""

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        wrong = _wrong(table, batch).double()
        both = torch.stack([wrong[i] * wrong[j] for i, j in pairs(len(wrong))])
        known = torch.cat([torch.ones_like(wrong[:1]), wrong, both])  # [1 + M + P, B], all 0 or 1
        return {"joint": known @ known.T, "wrong": wrong.sum(-1)}

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return _rows(sums, number)

    return Metric(settle, finish, higher_is_better=None, group="diversity", min_members=2, definition=convention)


def _rows(sums: TensorTree, number: Callable[[float, float, float, float], Found]) -> Mapping[RowName, Estimate]:
    """Return the pairs' numbers and their mean, from how often members, and pairs of them, err together.

    To first order a number moves by a weighting of `known`. The weights of the pairs are averaged for their mean, so
    that its variance has their covariances in it.
    """
    joint, members = sums["joint"].cpu(), len(sums["wrong"])
    of = joint.diagonal().tolist()  # zeros and ones are their own squares
    rows: dict[RowName, Estimate] = {}
    weights = []
    for both, (i, j) in enumerate(pairs(members), start=1 + members):
        first, second = 1 + i, 1 + j
        counts = (of[0] - of[first] - of[second] + of[both], of[second] - of[both], of[first] - of[both], of[both])
        found, moves = number(*counts)
        rows[RowName.pair(i, j)] = Estimate(
            found, moves and sqrt(sum(n * d * d for n, d in zip(counts, moves, strict=True)))
        )
        if moves:
            d11, d10, d01, d00 = moves
            weight = torch.zeros(len(joint), dtype=torch.float64)
            weight[0], weight[first], weight[second], weight[both] = d11, d01 - d11, d10 - d11, d11 - d10 - d01 + d00
            weights.append(weight)
    return {**rows, MEAN_OF_PAIRS: _mean([value.value for value in rows.values()], weights, joint)}


def _mean(numbers: list[float], weights: list[Tensor], joint: Tensor) -> Estimate:
    """Return the mean of the pairs that have a number, with its error if each of them has one."""
    known = [number for number in numbers if not isnan(number)]
    if not known:
        return Estimate(nan)
    middle = sum(known) / len(known)
    if len(weights) < len(known):
        return Estimate(middle)
    weight = torch.stack(weights).mean(0)
    # The terms of the sum over samples add up to zero, so that their squares are their spread.
    return Estimate(middle, sqrt(max(float(weight @ joint @ weight), 0.0)))


def _jaccard(n11: float, n10: float, n01: float, n00: float) -> Found:
    either = n10 + n01 + n00
    if not either:
        return nan, None
    part = n00 / either
    return part, (0.0, -part / either, -part / either, (1 - part) / either)


def _yule(n11: float, n10: float, n01: float, n00: float) -> Found:
    same, other = n11 * n00, n10 * n01
    if not same + other:
        return nan, None
    q = (same - other) / (same + other)
    if not same * other:
        return q, None
    slope = 2 * same * other / (same + other) ** 2
    return q, (slope / n11, -slope / n10, -slope / n01, slope / n00)
