"""Means and ratios with standard errors, from sums that can be accumulated over batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from plateaux.core.types import Estimate, TensorTree

Name = TypeVar("Name", bound=str)


def sums_and_squares(scores: Tensor) -> TensorTree:
    """Return the sum, the sum of squares, and the count of per-sample scores `[..., B]`, for `means_from_sums`."""
    values = scores.double()
    return {"sum": values.sum(-1), "squares": (values * values).sum(-1), "count": torch.tensor(values.shape[-1])}


def means_from_sums(sums: TensorTree, names: Sequence[Name]) -> Mapping[Name, Estimate]:
    """Return the mean of each row of scores, with its standard error over samples."""
    count = float(sums["count"])
    rows = zip(names, sums["sum"].reshape(-1), sums["squares"].reshape(-1), strict=True)
    return {name: mean(float(total), float(squares), count) for name, total, squares in rows}


def mean(total: float, squares: float, count: float) -> Estimate:
    """Return a mean over samples from their sum and the sum of their squares."""
    value = total / count
    if count < 2:
        return Estimate(value)
    variance = max(squares / count - value * value, 0.0) * count / max(count - 1, 1)
    return Estimate(value, (variance / count) ** 0.5)


def mean_of_independent(numbers: Sequence[float]) -> Estimate:
    """Return the mean of independent numbers with its standard error; one number has no standard error."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return Estimate(float(values.mean()), float(values.std()) / len(values) ** 0.5 if len(values) > 1 else None)


def mean_of_paired(values: Sequence[Estimate]) -> Estimate:
    """Return the mean of numbers on the same samples; its standard error is the mean of theirs, an upper bound."""
    errors = [value.stderr for value in values if value.stderr is not None]
    error = sum(errors) / len(errors) if len(errors) == len(values) else None
    return Estimate(sum(value.value for value in values) / len(values), error)


def proportion(hits: float, count: float) -> Estimate:
    """Return a fraction of samples with its binomial standard error."""
    fraction = hits / count
    if count < 2:
        return Estimate(fraction)
    return Estimate(fraction, (max(fraction * (1 - fraction), 0.0) / count) ** 0.5)


def ratio(numerator: Tensor, denominator: Tensor) -> TensorTree:
    """Return the sums that `ratios` needs from two scores of the same samples `[..., B]`."""
    a, b = numerator.double(), denominator.double()
    parts = {"a": a, "b": b, "aa": a * a, "bb": b * b, "ab": a * b}
    return {**{name: part.sum(-1) for name, part in parts.items()}, "count": torch.tensor(a.shape[-1])}


def ratios(sums: TensorTree, names: Sequence[Name]) -> Mapping[Name, Estimate]:
    """Return mean(numerator) / mean(denominator) of each row, with its standard error by the delta method.

    The value is NaN if the mean of the denominator is zero.
    """
    count = float(sums["count"])
    estimates: dict[Name, Estimate] = {}
    for position, name in enumerate(names):
        a, b, aa, bb, ab = (float(sums[part].reshape(-1)[position]) for part in ("a", "b", "aa", "bb", "ab"))
        if b == 0:
            estimates[name] = Estimate(float("nan"))
            continue
        r = a / b
        if count < 2:
            estimates[name] = Estimate(r)
            continue
        variance = max(aa - 2 * r * ab + r * r * bb, 0.0) / max(count - 1, 1)
        estimates[name] = Estimate(r, (variance / count) ** 0.5 / (b / count))
    return estimates
