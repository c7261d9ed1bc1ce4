"""How often the right class is the most likely one, or one of the most likely."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.metric import Metric
from plateaux.core.registry import metric
from plateaux.core.row_names import RowName, row_names
from plateaux.core.stats.estimates import proportion
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import log_probabilities, predictions


@metric
def accuracy() -> Metric:
    """The share of samples whose most likely class is the right one, with its binomial standard error."""

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        return _count(predictions(table) == batch.y)

    return Metric(
        settle, _finish, percent=True, definition="of equally likely classes the first is the guess; binomial error"
    )


@metric
def top5(*, k: int = 5) -> Metric:
    """The share of samples whose right class is among the k most likely (5), with its binomial standard error."""
    if k < 1:
        raise RecipeError(f"top5 with k = {k}: the right class is sought among the 1 or more most likely; try k = 5")

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        return _count(_ahead(log_probabilities(table), batch.y) < k)

    return Metric(
        settle,
        _finish,
        percent=True,
        definition=f"k = {k}; of equally likely classes the first is ahead, so that k = 1 is accuracy; binomial error",
    )


def _ahead(log_p: Tensor, y: Tensor) -> Tensor:
    """Return how many classes are ahead of the right one `[R, B]`: likelier, or as likely and before it."""
    right = log_p.gather(-1, y.expand(len(log_p), -1)[..., None])  # [R, B, 1]
    before = torch.arange(log_p.shape[-1], device=y.device) < y[:, None]  # [B, C]
    # "Not less" rather than "as much": where nothing is a number the first class is the guess, as it is for argmax.
    return torch.where(before, ~(log_p < right), log_p > right).sum(-1)


def _count(hits: Tensor) -> TensorTree:
    return {"right": hits.sum(-1), "count": torch.tensor(hits.shape[-1])}


def _finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
    rights = sums["right"].tolist()
    return {
        name: proportion(right, float(sums["count"]))
        for name, right in zip(row_names(len(rights)), rights, strict=True)
    }
