"""Diversity of all members at once: variance, number of distinct predictions, predictive diversity score (PDS)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.metric import Metric
from plateaux.core.ranges import CountOrZero
from plateaux.core.registry import metric
from plateaux.core.row_names import ALL_MEMBERS
from plateaux.core.stats.estimates import means_from_sums, sums_and_squares
from plateaux.core.types import Batch, TensorTree
from plateaux.ensembles.log_probs import log_probs_float64, predictions


@metric
def variance(*, space: Literal["logits", "probabilities"] = "logits", ddof: CountOrZero = 1) -> Metric:
    """Variance over members of their logits or probabilities, summed over classes.

    The sum of squares is divided by M - ddof: 1 gives the unbiased estimate, 0 the variance of these members.
    """

    def score(logits: Tensor) -> Tensor:
        if not 0 <= ddof < len(logits):
            raise RecipeError(
                f"variance was given ddof = {ddof} and {len(logits)} members; allowed: 0 to {len(logits) - 1}. "
                "Set ddof = 0, or evaluate more members"
            )
        values = logits.double() if space == "logits" else log_probs_float64(logits).exp()
        return values.var(0, correction=ddof).sum(-1)

    source = "raw logits, so a constant added to the logits of one member changes it" if space == "logits" else space
    return _mean_metric(score, f"over members with ddof = {ddof}, of {source}; summed over classes")


@metric
def unique() -> Metric:
    """Number of distinct predicted classes among the members, from 1 to the number of members."""

    def score(logits: Tensor) -> Tensor:
        preds = predictions(logits)[: len(logits)].sort(0).values  # [M, B]
        return 1 + (preds[1:] != preds[:-1]).sum(0)

    return _mean_metric(score, "ties go to the first class; grows with the number of members")


@metric
def pds(*, normalize: bool = False) -> Metric:
    """Predictive diversity score (PDS): the highest probability of each class over members, summed over classes.

    From 1 (equal members) to the smaller of the numbers of members and classes. `normalize` divides by the number of
    classes.
    """

    def score(logits: Tensor) -> Tensor:
        highest = log_probs_float64(logits).exp().amax(0)  # [B, C]
        return highest.mean(-1) if normalize else highest.sum(-1)

    scale = "divided by the number of classes" if normalize else "not divided by the number of classes"
    return _mean_metric(score, f"summed over classes, {scale}")


def _mean_metric(score: Callable[[Tensor], Tensor], definition: str) -> Metric:
    """Return the metric that averages `score`, which maps logits `[M, B, C]` to `[B]`."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        return sums_and_squares(score(logits))

    return Metric(
        update,
        lambda sums: means_from_sums(sums, [ALL_MEMBERS]),
        higher_is_better=None,
        group="diversity",
        min_members=2,
        definition=f"{definition}; mean over samples with its standard error",
    )
