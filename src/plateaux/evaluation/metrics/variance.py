"""How far the members' answers are spread, all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.metric import Metric
from plateaux.core.registry import metric
from plateaux.core.row_names import ALL_MEMBERS
from plateaux.core.stats.estimates import means_from_sums, sums_and_squares
from plateaux.core.types import Batch, TensorTree
from plateaux.ensembles.log_probs import log_probs_float64, predictions


@metric
def variance(*, space: Literal["logits", "probabilities"] = "logits", ddof: int = 1) -> Metric:
    """The variance of members' logits or probabilities, summed over classes.

    The sum of squares is divided by M - ddof: 1 for the unbiased estimate, 0 for the spread of these members alone.
    """

    def score(table: Tensor) -> Tensor:
        if not 0 <= ddof < len(table):
            raise RecipeError(
                f"variance was given ddof = {ddof} and {len(table)} members; allowed: 0 to {len(table) - 1}. "
                "Take ddof = 0, or measure more members"
            )
        answers = table.double() if space == "logits" else log_probs_float64(table).exp()
        return answers.var(0, correction=ddof).sum(-1)

    about = "raw logits, so a constant added to one member's counts" if space == "logits" else "probabilities"
    return _mean_metric(score, f"over members with ddof = {ddof}, of {about}; summed over classes")


@metric
def unique() -> Metric:
    """The number of distinct most likely classes among the members, from 1 to their number."""

    def score(table: Tensor) -> Tensor:
        guesses = predictions(table)[: len(table)].sort(0).values  # [M, B]
        return 1 + (guesses[1:] != guesses[:-1]).sum(0)

    return _mean_metric(score, "of equal classes the first is the most likely one; grows with the number of members")


@metric
def pds(*, normalize: bool = False) -> Metric:
    """Predictive Diversity Score: each class's highest probability among the members, summed over classes.

    From 1, all members alike, to the number of members or of classes, whichever is less. `normalise` divides by the
    number of classes.
    """

    def score(table: Tensor) -> Tensor:
        highest = log_probs_float64(table).exp().amax(0)  # [B, C]
        return highest.mean(-1) if normalize else highest.sum(-1)

    how = "divided by the number of classes" if normalize else "not divided by the number of classes"
    return _mean_metric(score, f"summed over classes, {how}")


def _mean_metric(score: Callable[[Tensor], Tensor], convention: str) -> Metric:
    """Return the measure that averages `score`, a table `[M, B, C]` to `[B]`."""

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        return sums_and_squares(score(table))

    return Metric(
        settle,
        lambda sums: means_from_sums(sums, [ALL_MEMBERS]),
        higher_is_better=None,
        group="diversity",
        min_members=2,
        definition=f"{convention}; mean over samples with its standard error",
    )
