"""A2D: members are right together on labeled samples and disagree on the others."""

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
    diversity_weight: float = 1.0,
    disagree_on: Literal["unlabeled", "labeled", "both"] = "unlabeled",
    training: Literal["joint", "sequential"] = "joint",
    update: SamVariant = "plain",
    rho: float | None = None,
) -> Method:
    """Agree to disagree: the loss plus, on unlabeled samples, how surely pairs say the same (Pagliardini et al. 2022).

    A row's term is the mean of -log(p(1 - q) + q(1 - p)) over its company, p and q what the two give the class that the
    other finds likeliest. `joint`: over all other members, and gradients flow through both. `sequential`, as first
    published: members train one after the other, and the company of one is those before it, finished and taken as they
    are; the first has no such term.
    """
    weights = mean_over_others if training == "joint" else mean_over_previous

    def settle(table: Tensor, batch: Batch) -> Tensor:
        size = len(batch)
        chosen = {"unlabeled": table[:, size:], "labeled": table[:, :size], "both": table}[disagree_on]
        pairs = disagreement(chosen.softmax(-1), frozen=training == "sequential")  # [R, R, K]
        alike = torch.einsum("rs,rsk->rk", weights(len(table), pairs), pairs)
        # Unlabeled samples have no place in [R, B]: their mean is a part of every labeled sample's loss.
        return loss(table[:, :size], batch) + diversity_weight * (
            alike if disagree_on == "labeled" else alike.mean(1, keepdim=True)
        )

    if disagree_on == "labeled":
        objective = Objective(settle, logits, gather="members")
    else:
        objective = Objective(
            settle, logits_with_unlabeled, gather="batch", per_sample=False, extra_inputs=("unlabeled",)
        )
    return Method(objective, get_update(update, rho), member_order="parallel" if training == "joint" else "sequential")
