"""Predictive entropy, expected entropy, and their difference, the mutual information (epistemic uncertainty).

    predictive_entropy    H(mean_m p_m)                     entropy of the mean probability
    expected_entropy      mean_m H(p_m)                     mean of the entropies of the members
    mutual_information    H(mean_m p_m) - mean_m H(p_m)     the difference, for each sample

For a single member the first two equal its entropy, and its mutual information is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

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
    """Predictive entropy (total uncertainty): entropy of the mean probability of the members, in nats."""
    return _mean_metric(_predictive, "H(mean_m p_m) in nats")


@metric
def expected_entropy() -> Metric:
    """Expected entropy (aleatoric uncertainty): mean entropy of the members, and that of each member, in nats."""

    def scores(log_p: Tensor) -> Tensor:
        entropies = _entropy(log_p)
        return torch.cat([entropies, entropies.mean(0, keepdim=True)])

    return _mean_metric(scores, "mean_m H(p_m) in nats, also reported for each member")


@metric
def mutual_information() -> Metric:
    """Mutual information (epistemic uncertainty, BALD): predictive entropy minus expected entropy, in nats."""

    def scores(log_p: Tensor) -> Tensor:
        return (_predictive(log_p) - _entropy(log_p).mean(0)).clamp(min=0)  # negative only by rounding

    return _mean_metric(scores, "H(mean_m p_m) - mean_m H(p_m) for each sample, in nats; 0 to log M")


def _mean_metric(scores: Callable[[Tensor], Tensor], definition: str) -> Metric:
    """Return the metric that averages `scores`, a map of log-probabilities `[M, B, C]` to `[1, B]` or `[M + 1, B]`."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        return sums_and_squares(scores(log_probs_float64(logits)))

    def compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return means_from_sums(sums, [*map(RowName.member, range(len(sums["sum"]) - 1)), ALL_MEMBERS])

    return Metric(
        update,
        compute,
        higher_is_better=None,
        group="diversity",
        definition=f"{definition}; mean over samples with its standard error",
    )


def _predictive(log_p: Tensor) -> Tensor:
    """Return the entropy of the mean probability of the members, `[1, B]`."""
    return _entropy(log_p.logsumexp(0, keepdim=True) - math.log(len(log_p)))


def _entropy(log_p: Tensor) -> Tensor:
    """Return the entropy over the last dimension; a class of probability 0 adds nothing."""
    p = log_p.exp()
    return -torch.where(p > 0, p * log_p, 0.0).sum(-1)
