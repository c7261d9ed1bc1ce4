"""How far the members' answers are spread, all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.metric import Measure
from plateaux.core.registry import measure
from plateaux.core.stats.estimates import means, moments
from plateaux.core.types import Batch, Tree
from plateaux.ensembles.log_probs import guesses_of, wide_probabilities_of
from plateaux.evaluation.row_names import TOGETHER


@measure
def variance(*, space: Literal["logits", "probabilities"] = "logits", ddof: int = 1) -> Measure:
    """The variance of members' logits or probabilities, summed over classes.

    The sum of squares is divided by M - ddof: 1 for the unbiased estimate, 0 for the spread of these members alone.
    """

    def score(table: Tensor) -> Tensor:
        if not 0 <= ddof < len(table):
            raise RecipeError(
                f"variance was given ddof = {ddof} and {len(table)} members; allowed: 0 to {len(table) - 1}. "
                "Take ddof = 0, or measure more members"
            )
        answers = table.double() if space == "logits" else wide_probabilities_of(table).exp()
        return answers.var(0, correction=ddof).sum(-1)

    about = "raw logits, so a constant added to one member's counts" if space == "logits" else "probabilities"
    return _mean_of(score, f"over members with ddof = {ddof}, of {about}; summed over classes")


@measure
def unique() -> Measure:
    """The number of distinct most likely classes among the members, from 1 to their number."""

    def score(table: Tensor) -> Tensor:
        guesses = guesses_of(table)[: len(table)].sort(0).values  # [M, B]
        return 1 + (guesses[1:] != guesses[:-1]).sum(0)

    return _mean_of(score, "of equal classes the first is the most likely one; grows with the number of members")


@measure
def pds(*, normalise: bool = False) -> Measure:
    """Predictive Diversity Score: each class's highest probability among the members, summed over classes.

    From 1, all members alike, to the number of members or of classes, whichever is less. `normalise` divides by the
    number of classes.
    """

    def score(table: Tensor) -> Tensor:
        highest = wide_probabilities_of(table).exp().amax(0)  # [B, C]
        return highest.mean(-1) if normalise else highest.sum(-1)

    how = "divided by the number of classes" if normalise else "not divided by the number of classes"
    return _mean_of(score, f"summed over classes, {how}")


def _mean_of(score: Callable[[Tensor], Tensor], convention: str) -> Measure:
    """Return the measure that averages `score`, a table `[M, B, C]` to `[B]`."""

    def settle(table: Tensor, batch: Batch) -> Tree:
        return moments(score(table))

    return Measure(
        settle,
        lambda sums: means(sums, [TOGETHER]),
        better="neither",
        asks="different",
        least=2,
        convention=f"{convention}; mean over samples with its standard error",
    )
