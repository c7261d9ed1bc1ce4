"""Whether the confident guesses are the right ones: the risk of answering only those.

The risk at a coverage is the share of wrong guesses among the most confident samples. Of equally confident samples
any may come first, so each counts as wrong as they are on average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray

from plateaux.core.errors import RecipeError
from plateaux.core.metric import Metric
from plateaux.core.registry import metric
from plateaux.core.row_names import RowName, row_names
from plateaux.core.stats.estimates import proportion
from plateaux.core.types import Estimate, TensorTree
from plateaux.evaluation.confidence import Codes, TieGroups, confidences, groups, has_nan, sort_by_confidence

TIES = "confidence is the largest probability; ties count as their mean"
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tally:
    """How many numbers there are, their mean, and the sum of their squared distances from it."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: Floats, weights: Floats) -> Tally:
        """Return the tally of values of which there are so many each."""
        count = float(weights.sum())
        mean = float((weights * values).sum()) / max(count, 1.0)
        return Tally(count, mean, float((weights * (values - mean) ** 2).sum()))

    def joined(self, other: Tally) -> Tally:
        """Return the tally of both."""
        count, apart = self.count + other.count, other.mean - self.mean
        part = other.count / max(count, 1.0)
        return Tally(count, self.mean + apart * part, self.squares + other.squares + apart**2 * self.count * part)

    def moved(self, by: float) -> Tally:
        """Return the tally of numbers larger by so much."""
        return replace(self, mean=self.mean + by)


@metric
def aurc() -> Metric:
    """Area under the risk-coverage curve: the mean risk over all coverages, the most confident samples first."""

    def value(codes: Codes) -> Estimate:
        area, right, wrong = _area(codes)
        return _jackknife(area, right.joined(wrong))

    return _kept(value, f"mean over coverages 1/n to n/n, as a share; {TIES}; jackknife error")


@metric
def e_aurc() -> Metric:
    """Excess area under the risk-coverage curve: what is above the best order, in which wrong guesses come last."""

    def value(codes: Codes) -> Estimate:
        area, right, wrong = _area(codes)
        count, errors = len(codes), int(wrong.count)
        best = (errors - (count - errors) * (_harmonic(count) - _harmonic(count - errors))) / count
        # Without a wrong sample the best order has an error less, the first of them; what all lack alike cancels.
        less = _harmonic(count - 1) - _harmonic(max(count - 1 - errors, 0))
        return _jackknife(area - best, right.joined(wrong.moved(less)))

    return _kept(value, f"aurc less that of the best order of the same guesses; {TIES}; jackknife error")


@metric
def risk_at_coverage(*, coverage: float = 0.8) -> Metric:
    """The share of wrong guesses among the most confident samples, so many that they cover a share of all (0.8)."""
    if not 0 < coverage <= 1:
        raise RecipeError(f"coverage = {coverage}: it is a share of the samples, above 0 and at most 1; try 0.8")

    def value(codes: Codes) -> Estimate:
        count = max(ceil(coverage * len(codes) - 1e-9), 1)  # 0.07 * 100 is a little more than 7
        wrong = 0.0
        for each in groups(codes):
            wrong += float((each.incorrect / each.size * (count - each.start).clip(0, each.size)).sum())
        return proportion(wrong, count)

    return _kept(value, f"the first {coverage:.12g} of all samples, rounded up; {TIES}; binomial error", percent=True)


def _kept(value: Callable[[Codes], Estimate], convention: str, *, percent: bool = False) -> Metric:
    """Return the measure that keeps every sample's confidence and rightness; `value` gets those of one row."""

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        rows = sums["kept"].unbind(-1)
        return {name: of(sort_by_confidence(row)) for name, row in zip(row_names(len(rows)), rows, strict=True)}

    def of(codes: Codes) -> Estimate:
        return Estimate(float("nan")) if has_nan(codes) else value(codes)

    return Metric(
        confidences,
        finish,
        reduce="cat",
        higher_is_better=False,
        group="uncertainty",
        percent=percent,
        definition=convention,
    )


def _harmonic(count: int) -> float:
    """Return the harmonic number H: 1 + 1/2 + ... + 1/count."""
    return float(torch.special.digamma(torch.tensor(count + 1.0, dtype=torch.float64))) + float(np.euler_gamma)


def _area(codes: Codes) -> tuple[float, Tally, Tally]:
    """Return the area under the risk-coverage curve, and what n - 1 times the area is without each sample in turn.

    A wrong guess at place i counts H_n - H_(i-1) times, over n. Without one sample, those before it keep their places,
    those after it move up by one, and its equals share one place and one error less. The tallies are of the right and
    of the wrong samples; all of them lack one number, the same for all, that no spread feels.
    """
    count, area, before = len(codes), 0.0, 0.0
    right, wrong = Tally(), Tally()
    top = _harmonic(count - 1)
    for each in groups(codes):
        stay, first, last = _places(each, top)
        rate = each.incorrect / each.size
        area += float((rate * (stay + each.size / count)).sum())
        passed = before + (rate * (last - first)).cumsum()  # what groups count more for having moved up
        tied = (stay - (top - last)) / np.maximum(each.size - 1, 1)  # what each error among its equals counts
        others = -passed - rate * stay
        right = right.joined(Tally.of(others + each.incorrect * tied, each.size - each.incorrect))
        wrong = wrong.joined(Tally.of(others + (each.incorrect - 1) * tied, each.incorrect))
        before = float(passed[-1])
    return area / count, right, wrong


def _places(each: TieGroups, top: float) -> tuple[Floats, Floats, Floats]:
    """Return the sum over each group's places i of `top` - H_(i-1), with H before its first place and before its last.

    Before the very first place H is taken for 0.
    """
    begin, start, end = int(each.start[0]), int(each.start[-1]), int(each.end[-1])
    place = np.arange(begin, start + 1)
    steps = np.where(place > 0, 1 / np.maximum(place, 1), 0.0).cumsum()
    h = _harmonic(max(begin - 1, 0)) + np.append(0.0, steps)  # H_(begin-1) to H_start
    sums = np.add.reduceat(top - h[1:], each.start - begin)
    last = h[np.minimum(each.end - begin, len(h) - 1)]
    if end > start + 1:  # of the last group there is only the first place, but its sum has a closed form
        h_start, h_end = float(h[-1]), _harmonic(end)
        sums[-1] = (end - start) * (1 + top - h_end) - start * (h_end - h_start)
        last[-1] = h_end - 1 / end
    return sums, h[each.start - begin], last


def _jackknife(number: float, without: Tally) -> Estimate:
    """Return a number with its standard error from n - 1 times what it is without each sample; of one there is none."""
    count = without.count
    if count < 2:
        return Estimate(number)
    return Estimate(number, (without.squares / (count * (count - 1))) ** 0.5)
