"""Whether the confident guesses are the right ones: the risk of answering only those.

The risk at a coverage is the share of wrong guesses among the most confident samples. Of equally confident samples
any may come first, so each counts as wrong as they are on average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil

import torch
from torch import Tensor

from plateaux.bins import equals, unpack
from plateaux.errors import RecipeError
from plateaux.estimates import share
from plateaux.exchange import Measure
from plateaux.kept import confidences
from plateaux.registry import measure
from plateaux.tables import row_names
from plateaux.types import Tree, Value

TIES = "confidence is the largest probability; ties count as their mean"


@measure
def aurc() -> Measure:
    """Area under the risk-coverage curve: the mean risk over all coverages, the most confident samples first."""
    return _kept(
        lambda doubt, wrong: _jackknife(*_areas(doubt, wrong)),
        f"mean over coverages 1/n to n/n, as a share; {TIES}; jackknife error",
    )


@measure
def e_aurc() -> Measure:
    """Excess area under the risk-coverage curve: what is above the best order, in which wrong guesses come last."""

    def excess(doubt: Tensor, wrong: Tensor) -> Value:
        area, without = _areas(doubt, wrong)
        best, best_without = _best(wrong)
        return _jackknife(area - best, without - best_without)

    return _kept(excess, f"aurc less that of the best order of the same guesses; {TIES}; jackknife error")


@measure
def risk_at_coverage(*, coverage: float = 0.8) -> Measure:
    """The share of wrong guesses among the most confident samples, so many that they cover a share of all (0.8)."""
    if not 0 < coverage <= 1:
        raise RecipeError(f"coverage = {coverage}: it is a share of the samples, above 0 and at most 1; try 0.8")

    def risk(doubt: Tensor, wrong: Tensor) -> Value:
        count = max(ceil(coverage * len(doubt) - 1e-9), 1)  # 0.07 * 100 is a little more than 7
        group, size, start = equals(doubt)
        taken = (count - start).clamp(min=0).minimum(size)
        return share(float((group.bincount(wrong) / size * taken).sum()), count)

    return _kept(risk, f"the first {coverage:.12g} of all samples, rounded up; {TIES}; binomial error", percent=True)


def _kept(value: Callable[[Tensor, Tensor], Value], convention: str, *, percent: bool = False) -> Measure:
    """Return the measure that keeps every sample's confidence and rightness; `value` gets doubt and wrongness `[N]`."""

    def finish(sums: Tree) -> Mapping[str, Value]:
        kept = sums["kept"].T.cpu()
        return {name: of(*unpack(row)) for name, row in zip(row_names(len(kept)), kept, strict=True)}

    def of(doubt: Tensor, right: Tensor) -> Value:
        return Value(float("nan")) if doubt.isnan().any() else value(doubt, 1 - right.double())

    return Measure(
        confidences, finish, merge="cat", better="lower", asks="sure", percent=percent, convention=convention
    )


def _reach(count: int) -> Tensor:
    """Return the sum over places 1 to i of H_n - H_(i-1), for i = 0 to n: a wrong guess at place i counts so often."""
    places = torch.arange(1, count + 1, dtype=torch.float64)
    tail = (1 / places).flip(0).cumsum(0).flip(0)  # H_n - H_(i-1)
    return torch.cat([tail.new_zeros(1), tail.cumsum(0)])


def _areas(doubt: Tensor, wrong: Tensor) -> tuple[float, Tensor]:
    """Return the area under the risk-coverage curve, and that without each of the samples in turn.

    Without one sample, those before it keep their places, those after it move up by one, and its equals share one
    place and one error less.
    """
    count = len(doubt)
    group, size, start = equals(doubt)
    errors = group.bincount(wrong)
    end, rate = start + size, errors / size
    reach, less = _reach(count), _reach(count - 1)
    area = float((rate * (reach[end] - reach[start])).sum() / count)
    stay = rate * (less[end.clamp(max=count - 1)] - less[start])  # of the last group never used: nobody comes after it
    move = rate * (less[end - 1] - less[(start - 1).clamp(min=0)])  # of the first group never used
    others = stay.cumsum(0) - stay + move.sum() - move.cumsum(0)
    tied = (errors[group] - wrong) / (size - 1).clamp(min=1)[group] * (less[end - 1] - less[start])[group]
    return area, (others[group] + tied) / (count - 1)


def _best(wrong: Tensor) -> tuple[float, Tensor]:
    """Return the least area that as many errors can have, and that without each of the samples in turn."""
    count, errors = len(wrong), int(wrong.sum())
    reach, less = _reach(count), _reach(count - 1)
    area = float((reach[count] - reach[count - errors]) / count)
    left = errors - wrong.long()
    return area, (less[count - 1] - less[count - 1 - left]) / (count - 1)


def _jackknife(number: float, without: Tensor) -> Value:
    """Return a number with its standard error from what it is without each of the samples; of one there is none."""
    count = len(without)
    if count < 2:
        return Value(number)
    return Value(number, float((((without - without.mean()) ** 2).sum() * (count - 1) / count).sqrt()))
