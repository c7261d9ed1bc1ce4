"""Losses as settles: a table of outputs `[R, B, ...]` and its batch to losses `[R, B]`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from plateaux.errors import RecipeError, nearest
from plateaux.exchange import Settle
from plateaux.types import Batch


def cross_entropy(*, label_smoothing: float = 0.0, class_weights: tuple[float, ...] = ()) -> Settle:
    """Cross entropy of every row and sample; labels may be class numbers [B] or probabilities [B, C].

    Class weights are normalised to mean one over the classes, so that a batch's loss stays a mean over its samples.
    """

    def settle(table: Tensor, batch: Batch) -> Tensor:
        rows = len(table)
        weight = None
        if class_weights:
            weight = torch.tensor(class_weights, dtype=table.dtype, device=table.device)
            weight = weight * (len(class_weights) / weight.sum())
        losses = [
            F.cross_entropy(table[row], batch.y, weight, reduction="none", label_smoothing=label_smoothing)
            for row in range(rows)
        ]
        table_of = torch.stack(losses)  # [R, B, ...]: text has a loss for every token
        return table_of.flatten(2).mean(-1) if table_of.ndim > 2 else table_of

    settle.plain = not label_smoothing and not class_weights  # type: ignore[attr-defined]  # its gradient has a closed form
    return settle


LOSSES: dict[str, Callable[..., Settle]] = {"cross_entropy": cross_entropy}
NOT_YET = {
    "mse": "regression", "l1": "regression", "huber": "regression", "gaussian_nll": "regression",
    "bce": "multi-label classification", "binary_cross_entropy": "multi-label classification",
}  # fmt: skip


def loss_by_name(name: str) -> Callable[..., Settle]:
    """Return the factory of the loss called `name`."""
    if name in NOT_YET:
        raise RecipeError(
            f"loss {name!r} is for {NOT_YET[name]}, which Plateaux does not train yet; "
            f"available: {', '.join(LOSSES)}. From Python, pass one of your own: plateaux.Given(loss=settle)"
        )
    if name not in LOSSES:
        raise RecipeError(f"There is no loss called {name!r}; {nearest(name, [*LOSSES, *NOT_YET])}")
    return LOSSES[name]
