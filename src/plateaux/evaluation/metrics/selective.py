"""Selective prediction: the risk-coverage curve, its area, and the risk at one coverage.

The risk at a coverage is the error rate among the most confident samples. The order of samples with equal confidence
is undefined, so each of them counts with their mean error rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray

from plateaux.core.errors import RecipeError
from plateaux.core.metric import Metric
from plateaux.core.ranges import Fraction
from plateaux.core.registry import metric
from plateaux.core.stats.estimates import proportion
from plateaux.core.types import Estimate
from plateaux.evaluation.confidence import Codes, TieGroups, confidence_metric, tie_groups

TIES = "confidence is the largest probability; ties count with their mean error rate"
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moments:
    """The count, the mean, and the sum of squared deviations from the mean of numbers, which can be merged."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def from_weighted(values: Floats, weights: Floats) -> Moments:
        """Return the moments of values that are repeated `weights` times."""
        count = float(weights.sum())
        mean = float((weights * values).sum()) / max(count, 1.0)
        return Moments(count, mean, float((weights * (values - mean) ** 2).sum()))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the numbers of both."""
        count, delta = self.count + other.count, other.mean - self.mean
        part = other.count / max(count, 1.0)
        return Moments(count, self.mean + delta * part, self.squares + other.squares + delta**2 * self.count * part)

    def shift(self, offset: float) -> Moments:
        """Return the moments after adding `offset` to every number."""
        return replace(self, mean=self.mean + offset)


@metric
def aurc() -> Metric:
    """Area under the risk-coverage curve (AURC): mean error rate over all coverages, most confident samples first."""

    def value(codes: Codes) -> Estimate:
        area, correct, incorrect = _area(codes)
        return _jackknife(area, correct.merge(incorrect))

    return confidence_metric(value, f"mean over coverages 1/n to n/n, as a fraction; {TIES}; jackknife standard error")


@metric
def e_aurc() -> Metric:
    """Excess AURC (E-AURC): area under the risk-coverage curve minus that of the best order, with all errors last."""

    def value(codes: Codes) -> Estimate:
        area, correct, incorrect = _area(codes)
        count, errors = len(codes), int(incorrect.count)
        best = (errors - (count - errors) * (_harmonic(count) - _harmonic(count - errors))) / count
        # Without an incorrect sample, the best order has one error less, its first. Terms equal for all samples cancel.
        removed = _harmonic(count - 1) - _harmonic(max(count - 1 - errors, 0))
        return _jackknife(area - best, correct.merge(incorrect.shift(removed)))

    return confidence_metric(
        value, f"aurc minus that of the best order of the same predictions; {TIES}; jackknife standard error"
    )


@metric
def risk_at_coverage(*, coverage: Fraction = 0.8) -> Metric:
    """Selective risk: error rate among the most confident samples that make up a fraction `coverage` of all (0.8)."""
    if not 0 < coverage <= 1:
        raise RecipeError(
            f"risk_at_coverage was given coverage = {coverage}; allowed: a fraction of the samples above 0 and at most "
            "1. Omit it to use the default, 0.8"
        )

    def value(codes: Codes) -> Estimate:
        count = max(ceil(coverage * len(codes) - 1e-9), 1)  # 0.07 * 100 is slightly more than 7
        errors = 0.0
        for ties in tie_groups(codes):
            errors += float((ties.incorrect / ties.size * (count - ties.start).clip(0, ties.size)).sum())
        return proportion(errors, count)

    return confidence_metric(
        value,
        f"the most confident fraction {coverage:.12g} of all samples, rounded up; {TIES}; binomial standard error",
        percent=True,
    )


def _harmonic(count: int) -> float:
    """Return the harmonic number H: 1 + 1/2 + ... + 1/count."""
    return float(torch.special.digamma(torch.tensor(count + 1.0, dtype=torch.float64))) + float(np.euler_gamma)


def _area(codes: Codes) -> tuple[float, Moments, Moments]:
    """Return the area under the risk-coverage curve, and the moments of n - 1 times the area without each sample.

    An error at rank i has the weight (H_n - H_(i-1)) / n. If one sample is left out, the samples before it keep their
    ranks, those after it move up by one, and its ties share one rank and, if it is incorrect, one error less. The
    moments are those of the correct and of the incorrect samples. A constant that is equal for all samples is omitted:
    it does not change the variance.
    """
    count, area, before = len(codes), 0.0, 0.0
    correct, incorrect = Moments(), Moments()
    top = _harmonic(count - 1)
    for ties in tie_groups(codes):
        weight, first, last = _rank_weights(ties, top)
        rate = ties.incorrect / ties.size
        area += float((rate * (weight + ties.size / count)).sum())
        gained = before + (rate * (last - first)).cumsum()  # the weight that groups gain by moving up
        tied = (weight - (top - last)) / np.maximum(ties.size - 1, 1)  # the weight of each error in the same group
        others = -gained - rate * weight
        correct = correct.merge(Moments.from_weighted(others + ties.incorrect * tied, ties.size - ties.incorrect))
        incorrect = incorrect.merge(Moments.from_weighted(others + (ties.incorrect - 1) * tied, ties.incorrect))
        before = float(gained[-1])
    return area / count, correct, incorrect


def _rank_weights(ties: TieGroups, top: float) -> tuple[Floats, Floats, Floats]:
    """Return the sum of `top` - H_(i-1) over the ranks i of each group, and H before its first and its last rank.

    H before the first rank of all is taken as 0.
    """
    begin, start, end = int(ties.start[0]), int(ties.start[-1]), int(ties.end[-1])
    rank = np.arange(begin, start + 1)
    steps = np.where(rank > 0, 1 / np.maximum(rank, 1), 0.0).cumsum()
    h = _harmonic(max(begin - 1, 0)) + np.append(0.0, steps)  # H_(begin-1) to H_start
    sums = np.add.reduceat(top - h[1:], ties.start - begin)
    last = h[np.minimum(ties.end - begin, len(h) - 1)]
    if end > start + 1:  # `h` ends at the first rank of the last group, whose sum has a closed form
        h_start, h_end = float(h[-1]), _harmonic(end)
        sums[-1] = (end - start) * (1 + top - h_end) - start * (h_end - h_start)
        last[-1] = h_end - 1 / end
    return sums, h[ties.start - begin], last


def _jackknife(value: float, without: Moments) -> Estimate:
    """Return a value with its jackknife standard error, from n - 1 times the value without each sample.

    The value of a single sample has no standard error.
    """
    count = without.count
    if count < 2:
        return Estimate(value)
    return Estimate(value, (without.squares / (count * (count - 1))) ** 0.5)
