"""A2D: members are right together on labelled samples and disagree on the others."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from plateaux.core.method import LossFn, Method, Objective
from plateaux.core.outputs import logits, logits_with_unlabeled
from plateaux.core.registry import method
from plateaux.core.types import Batch
from plateaux.optim.losses import disagreement, mean_over_others, mean_over_previous
from plateaux.optim.sam import SamVariant, get_update


@method
def a2d(
    loss: LossFn,
    *,
    strength: float = 1.0,
    on: Literal["unlabelled", "labelled", "both"] = "unlabelled",
    mode: Literal["joint", "sequential"] = "joint",
    update: SamVariant = "plain",
    rho: float | None = None,
) -> Method:
    """Agree to disagree: the loss plus, on unlabelled samples, how surely pairs say the same (Pagliardini et al. 2022).

    A row's term is the mean of -log(p(1 - q) + q(1 - p)) over its company, p and q what the two give the class that the
    other finds likeliest. `joint`: over all other members, and gradients flow through both. `sequential`, as first
    published: members train one after the other, and the company of one is those before it, finished and taken as they
    are; the first has no such term.
    """
    weights = mean_over_others if mode == "joint" else mean_over_previous

    def settle(table: Tensor, batch: Batch) -> Tensor:
        size = len(batch)
        chosen = {"unlabelled": table[:, size:], "labelled": table[:, :size], "both": table}[on]
        pairs = disagreement(chosen.softmax(-1), frozen=mode == "sequential")  # [R, R, K]
        alike = torch.einsum("rs,rsk->rk", weights(len(table), pairs), pairs)
        # Unlabelled samples have no place in [R, B]: their mean is a part of every labelled sample's loss.
        return loss(table[:, :size], batch) + strength * (alike if on == "labelled" else alike.mean(1, keepdim=True))

    if on == "labelled":
        objective = Objective(settle, logits, gather="members")
    else:
        objective = Objective(
            settle, logits_with_unlabeled, gather="batch", per_sample=False, extra_inputs=("unlabelled",)
        )
    return Method(objective, get_update(update, rho), member_order="parallel" if mode == "joint" else "sequential")
