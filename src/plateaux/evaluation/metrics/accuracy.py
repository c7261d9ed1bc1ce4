"""Top-1 and top-k accuracy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.metric import Metric
from plateaux.core.ranges import Count
from plateaux.core.registry import metric
from plateaux.core.row_names import RowName, row_names
from plateaux.core.stats.estimates import proportion
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import log_probabilities, predictions


@metric
def accuracy() -> Metric:
    """Top-1 accuracy: fraction of samples whose most likely class is the correct one, with binomial standard error."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        return _count_correct(predictions(logits) == batch.y)

    return Metric(update, _compute, percent=True, definition="ties go to the first class; binomial standard error")


@metric
def top5(*, k: Count = 5) -> Metric:
    """Top-k accuracy: fraction of samples whose correct class is among the k most likely (5), with binomial error."""
    if k < 1:
        raise RecipeError(f"top5 was given k = {k}; allowed: 1 or more. Omit it to use the default, 5")

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        return _count_correct(_rank(log_probabilities(logits), batch.y) < k)

    return Metric(
        update,
        _compute,
        percent=True,
        definition=f"k = {k}; ties go to the first class, so k = 1 equals accuracy; binomial standard error",
    )


def _rank(log_p: Tensor, y: Tensor) -> Tensor:
    """Return the rank of the correct class `[R, B]`: the number of classes that are more likely, or tied and first."""
    correct = log_p.gather(-1, y.expand(len(log_p), -1)[..., None])  # [R, B, 1]
    first = torch.arange(log_p.shape[-1], device=y.device) < y[:, None]  # [B, C]
    # `~(a < b)` and not `a >= b`: if all values are NaN the prediction is the first class, as it is for argmax.
    return torch.where(first, ~(log_p < correct), log_p > correct).sum(-1)


def _count_correct(correct: Tensor) -> TensorTree:
    return {"correct": correct.sum(-1), "count": torch.tensor(correct.shape[-1])}


def _compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
    counts = sums["correct"].tolist()
    return {
        name: proportion(correct, float(sums["count"]))
        for name, correct in zip(row_names(len(counts)), counts, strict=True)
    }
