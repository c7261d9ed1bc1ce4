"""What a table of logits `[M, B, C]` says: the rows of its members, and of the ensemble they make."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MEAN_PROBABILITY = "ensemble (mean probability)"
MEAN_LOGIT = "ensemble (mean logit)"


def log_probabilities(table: Tensor) -> Tensor:
    """Return log-probabilities `[M + 2, B, C]`: each member, the mean of their probabilities, the mean of their logits.

    One member alone is no ensemble: its table stays `[1, B, C]`.
    """
    wide = table.double() if table.dtype == torch.float64 else table.float()
    members = wide.log_softmax(-1)
    if len(table) == 1:
        return members
    pooled = members.logsumexp(0) - math.log(len(table))
    return torch.cat([members, pooled[None], wide.mean(0).log_softmax(-1)[None]])


def row_names(rows: int) -> list[str]:
    """Return what each row of `log_probabilities` is called."""
    if rows == 1:
        return ["member 0"]
    return [*(f"member {number}" for number in range(rows - 2)), MEAN_PROBABILITY, MEAN_LOGIT]
