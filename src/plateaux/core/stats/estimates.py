"""Numbers with their standard errors, from sums that add over batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from plateaux.core.types import Estimate, TensorTree

Name = TypeVar("Name", bound=str)


def sums_and_squares(scores: Tensor) -> TensorTree:
    """Return what `means` needs of the samples' scores `[..., B]`: their sum, that of their squares, their count."""
    wide = scores.double()
    return {"sum": wide.sum(-1), "squares": (wide * wide).sum(-1), "count": torch.tensor(wide.shape[-1])}


def means_from_sums(sums: TensorTree, names: Sequence[Name]) -> Mapping[Name, Estimate]:
    """Return the mean of each row of scores, with its standard error over samples."""
    count = float(sums["count"])
    found = zip(names, sums["sum"].reshape(-1), sums["squares"].reshape(-1), strict=True)
    return {name: mean(float(total), float(squares), count) for name, total, squares in found}


def mean(total: float, squares: float, count: float) -> Estimate:
    """Return a mean over samples from their sum and the sum of their squares."""
    middle = total / count
    if count < 2:
        return Estimate(middle)
    spread = max(squares / count - middle * middle, 0.0) * count / max(count - 1, 1)
    return Estimate(middle, (spread / count) ** 0.5)


def mean_of_independent(numbers: Sequence[float]) -> Estimate:
    """Return the mean of independent numbers, with its standard error over them; of one there is none."""
    wide = torch.tensor(numbers, dtype=torch.float64)
    return Estimate(float(wide.mean()), float(wide.std()) / len(wide) ** 0.5 if len(wide) > 1 else None)


def mean_of_paired(values: Sequence[Estimate]) -> Estimate:
    """Return the mean of numbers that share their samples; its error is the mean of theirs, and cannot be larger."""
    errors = [value.stderr for value in values if value.stderr is not None]
    error = sum(errors) / len(errors) if len(errors) == len(values) else None
    return Estimate(sum(value.value for value in values) / len(values), error)


def proportion(right: float, count: float) -> Estimate:
    """Return a share of samples, with its binomial standard error."""
    part = right / count
    if count < 2:
        return Estimate(part)
    return Estimate(part, (max(part * (1 - part), 0.0) / count) ** 0.5)


def ratio(above: Tensor, below: Tensor) -> TensorTree:
    """Return what `ratios` needs of two scores of the same samples `[..., B]`."""
    a, b = above.double(), below.double()
    parts = {"a": a, "b": b, "aa": a * a, "bb": b * b, "ab": a * b}
    return {**{name: part.sum(-1) for name, part in parts.items()}, "count": torch.tensor(a.shape[-1])}


def ratios(sums: TensorTree, names: Sequence[Name]) -> Mapping[Name, Estimate]:
    """Return mean(above) / mean(below) of each row, with its standard error by the delta method.

    Where the lower mean is zero there is no ratio: the number is nan.
    """
    count = float(sums["count"])
    found: dict[Name, Estimate] = {}
    for position, name in enumerate(names):
        a, b, aa, bb, ab = (float(sums[part].reshape(-1)[position]) for part in ("a", "b", "aa", "bb", "ab"))
        if b == 0:
            found[name] = Estimate(float("nan"))
            continue
        r = a / b
        if count < 2:
            found[name] = Estimate(r)
            continue
        spread = max(aa - 2 * r * ab + r * r * bb, 0.0) / max(count - 1, 1)
        found[name] = Estimate(r, (spread / count) ** 0.5 / (b / count))
    return found
