"""How often the most likely class is the right one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plateaux.exchange import Measure
from plateaux.registry import measure
from plateaux.tables import log_probabilities, row_names
from plateaux.types import Batch, Tree, Value


@measure
def accuracy() -> Measure:
    """The share of samples whose most likely class is the right one, with its binomial standard error."""
    return Measure(_settle, _finish)


def _settle(table: Tensor, batch: Batch) -> Tree:
    right = (log_probabilities(table).argmax(-1) == batch.y).sum(-1)
    return {"right": right, "count": torch.tensor(len(batch))}


def _finish(sums: Tree) -> Mapping[str, Value]:
    count = float(sums["count"])
    shares = [float(right) / count for right in sums["right"]]
    return {
        name: Value(share, (share * (1 - share) / count) ** 0.5)
        for name, share in zip(row_names(len(shares)), shares, strict=True)
    }
