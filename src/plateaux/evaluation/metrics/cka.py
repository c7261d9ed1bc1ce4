"""Centered kernel alignment (CKA): the similarity of the features of two members."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan, nan

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.metric import Metric
from plateaux.core.outputs import features
from plateaux.core.registry import metric
from plateaux.core.row_names import MEAN_OF_PAIRS, RowName, pairs
from plateaux.core.types import Batch, Estimate, TensorTree

MAX_WIDTH = 4096  # features; the products of a pair are D x D numbers of 8 bytes: 134 MB at this width
CONSTANT = 1e-12  # relative to the uncentered sum of squares, a smaller centered one is a rounding error


@metric
def cka() -> Metric:
    """Linear centered kernel alignment (CKA) of two members' features: 1 equal up to rotation and scale, 0 unrelated.

    |Y'X|^2 / (|X'X| |Y'Y|) of centered features X, Y `[N, D]` with Frobenius norms, computed from sums over samples.
    """
    return Metric(
        _update,
        _compute,
        output=features,
        higher_is_better=None,
        group="diversity",
        min_members=2,
        definition=(
            "linear, centered, biased: it rises when there are few samples relative to the width of the features; no "
            "standard error; NaN for constant features, omitted from the mean of pairs"
        ),
    )


def _update(outputs: Tensor, batch: Batch) -> TensorTree:
    width = outputs.shape[-1]
    if width > MAX_WIDTH:
        raise RecipeError(
            f"cka was given features of width {width}; allowed: up to {MAX_WIDTH}, because every pair stores "
            f"{width} x {width} numbers. Remove cka from the metrics, or use a network with a narrower last layer"
        )
    x = outputs.double()  # [M, B, D]
    return {
        "sum": x.sum(1),
        "own": x.mT @ x,  # [M, D, D]
        "cross": torch.stack([x[i].T @ x[j] for i, j in pairs(len(x))]),  # [P, D, D]
        "count": torch.tensor(len(batch)),
    }


def _compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
    total, count = sums["sum"], float(sums["count"])
    uncentered = sums["own"].diagonal(dim1=1, dim2=2)  # [M, D]
    is_varying = (uncentered - total * total / count > CONSTANT * uncentered).double()

    def centered_norm(products: Tensor, i: int, j: int) -> float:
        centered = products - torch.outer(total[i], total[j]) / count
        return float((centered * torch.outer(is_varying[i], is_varying[j])).norm())

    norms = [centered_norm(products, i, i) for i, products in enumerate(sums["own"])]
    rows: dict[RowName, Estimate] = {}
    for products, (i, j) in zip(sums["cross"], pairs(len(total)), strict=True):
        scale = norms[i] * norms[j]
        rows[RowName.pair(i, j)] = Estimate(centered_norm(products, i, j) ** 2 / scale if scale else nan)
    values = [row.value for row in rows.values() if not isnan(row.value)]
    return {**rows, MEAN_OF_PAIRS: Estimate(sum(values) / len(values) if values else nan)}
