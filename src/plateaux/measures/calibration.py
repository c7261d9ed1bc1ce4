"""Whether confidence is deserved: expected calibration error."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plateaux.exchange import Measure
from plateaux.registry import measure
from plateaux.tables import log_probabilities, row_names
from plateaux.types import Batch, Tree, Value


@measure
def ece(*, bins: int = 15) -> Measure:
    """Expected calibration error: |accuracy - confidence| over equal-width bins, weighted by their samples.

    Bin i holds confidences in [i/bins, (i+1)/bins); the last one is closed, so that a confidence of 1 has a home.
    """

    def settle(table: Tensor, batch: Batch) -> Tree:
        confidence, guess = log_probabilities(table).double().exp().max(-1)  # [R, B]
        home = (confidence * bins).long().clamp(0, bins - 1)
        sums = torch.zeros(len(home), bins, 3, dtype=torch.float64, device=table.device)
        parts = torch.stack([torch.ones_like(confidence), confidence, (guess == batch.y).double()], -1)
        return {"sums": sums.scatter_add_(1, home[..., None].expand(-1, -1, 3), parts)}

    def finish(sums: Tree) -> Mapping[str, Value]:
        count, confidence, right = sums["sums"].unbind(-1)
        errors = (right - confidence).abs().sum(-1) / count.sum(-1)
        return {name: Value(float(e)) for name, e in zip(row_names(len(errors)), errors, strict=True)}

    return Measure(settle, finish, better="lower")
