"""How alike members' features are, whatever basis they are written in."""

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

WIDEST = 4096  # a pair's products are D x D numbers of 8 bytes: 134 MB at this width
CONSTANT = 1e-12  # a centred square so small against the raw one is rounding


@metric
def cka() -> Metric:
    """Linear centred kernel alignment of two members' features: 1, alike up to rotation and scale; 0, unrelated.

    |Y'X|^2 / (|X'X| |Y'Y|) of centred features X, Y `[N, D]`, Frobenius norms, from sums over samples alone.
    """
    return Metric(
        _settle,
        _finish,
        output=features,
        higher_is_better=None,
        group="diversity",
        min_members=2,
        definition=(
            "linear, centred, biased: it rises when samples are few against the width of the features; no standard "
            "error; nan for constant features, left out of the mean of pairs"
        ),
    )


def _settle(table: Tensor, batch: Batch) -> TensorTree:
    width = table.shape[-1]
    if width > WIDEST:
        raise RecipeError(
            f"cka was given features {width} wide, allowed: up to {WIDEST}, since every pair keeps {width} x {width} "
            "numbers. Leave cka out, or measure a network whose last layer sees fewer features"
        )
    x = table.double()  # [M, B, D]
    return {
        "sum": x.sum(1),
        "own": x.mT @ x,  # [M, D, D]
        "cross": torch.stack([x[i].T @ x[j] for i, j in pairs(len(x))]),  # [P, D, D]
        "count": torch.tensor(len(batch)),
    }


def _finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
    total, count = sums["sum"], float(sums["count"])
    raw = sums["own"].diagonal(dim1=1, dim2=2)  # [M, D]
    varies = (raw - total * total / count > CONSTANT * raw).double()

    def size(products: Tensor, i: int, j: int) -> float:
        centred = products - torch.outer(total[i], total[j]) / count
        return float((centred * torch.outer(varies[i], varies[j])).norm())

    own = [size(products, i, i) for i, products in enumerate(sums["own"])]
    rows: dict[RowName, Estimate] = {}
    for products, (i, j) in zip(sums["cross"], pairs(len(total)), strict=True):
        scale = own[i] * own[j]
        rows[RowName.pair(i, j)] = Estimate(size(products, i, j) ** 2 / scale if scale else nan)
    numbers = [value.value for value in rows.values() if not isnan(value.value)]
    return {**rows, MEAN_OF_PAIRS: Estimate(sum(numbers) / len(numbers) if numbers else nan)}
