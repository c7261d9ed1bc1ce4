"""How unsure members are: together, each by itself, and the difference, which is their disagreement.

    predictive_entropy    H(mean_m p_m)                     the entropy of the mean probability
    expected_entropy      mean_m H(p_m)                     the mean of the members' entropies
    mutual_information    H(mean_m p_m) - mean_m H(p_m)     their difference, taken sample by sample

One member alone has all three: its entropy, its entropy again, and zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from plateaux.core.metric import Metric
from plateaux.core.registry import metric
from plateaux.core.row_names import ALL_MEMBERS, RowName
from plateaux.core.stats.estimates import means_from_sums, sums_and_squares
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import log_probs_float64


@metric
def predictive_entropy() -> Metric:
    """The entropy of the members' mean probability, in nats."""
    return _mean_metric(_predictive, "H(mean_m p_m) in nats")


@metric
def expected_entropy() -> Metric:
    """The mean of the members' entropies, and each of them, in nats."""

    def scores(log_p: Tensor) -> Tensor:
        own = _entropy(log_p)
        return torch.cat([own, own.mean(0, keepdim=True)])

    return _mean_metric(scores, "mean_m H(p_m) in nats, the entropy of each member beside it")


@metric
def mutual_information() -> Metric:
    """Mutual information of prediction and member: predictive less expected entropy, in nats."""

    def scores(log_p: Tensor) -> Tensor:
        return (_predictive(log_p) - _entropy(log_p).mean(0)).clamp(min=0)  # below zero by rounding only

    return _mean_metric(scores, "H(mean_m p_m) - mean_m H(p_m) of each sample, in nats; 0 to log M")


def _mean_metric(scores: Callable[[Tensor], Tensor], convention: str) -> Metric:
    """Return the measure that averages `scores`, log-probabilities `[M, B, C]` to `[1, B]` or `[M + 1, B]`."""

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        return sums_and_squares(scores(log_probs_float64(table)))

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return means_from_sums(sums, _names(len(sums["sum"])))

    return Metric(
        settle,
        finish,
        higher_is_better=None,
        group="diversity",
        definition=f"{convention}; mean over samples with its standard error",
    )


def _names(rows: int) -> Sequence[RowName]:
    return [*map(RowName.member, range(rows - 1)), ALL_MEMBERS]


def _predictive(log_p: Tensor) -> Tensor:
    return _entropy(log_p.logsumexp(0, keepdim=True) - math.log(len(log_p)))


def _entropy(log_p: Tensor) -> Tensor:
    """Return the entropy over the last axis; a class of probability 0 adds nothing."""
    p = log_p.exp()
    return -torch.where(p > 0, p * log_p, 0.0).sum(-1)
