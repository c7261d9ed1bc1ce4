"""A2D: members agree on labeled samples and disagree on unlabeled ones."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from plateaux.core.method import LossFn, Method, Objective
from plateaux.core.outputs import logits, logits_with_unlabeled
from plateaux.core.ranges import NonNegative
from plateaux.core.registry import method
from plateaux.core.types import Batch
from plateaux.optim.losses import disagreement, mean_over_others, mean_over_previous
from plateaux.optim.sam import SamVariant, get_update


@method
def a2d(
    loss: LossFn,
    *,
    diversity_weight: NonNegative = 1.0,
    disagree_on: Literal["unlabeled", "labeled", "both"] = "unlabeled",
    training: Literal["joint", "sequential"] = "joint",
    update: SamVariant = "plain",
    rho: NonNegative | None = None,
) -> Method:
    """Agree to disagree: the loss plus a penalty where pairs agree on unlabeled samples (Pagliardini et al. 2022).

    The penalty of a member is the mean of -log(p(1 - q) + q(1 - p)) over other members; q is the probability that the
    other member gives its predicted class, and p the probability that this member gives the same class. `joint`: the
    mean is over all other members, and gradients flow through both. `sequential`, as published: members train one
    after the other, the mean is over the finished members, which are frozen; the first member has no penalty.
    """
    pair_weights = mean_over_others if training == "joint" else mean_over_previous

    def joint_loss(outputs: Tensor, batch: Batch) -> Tensor:
        size = len(batch)
        selected = {"unlabeled": outputs[:, size:], "labeled": outputs[:, :size], "both": outputs}[disagree_on]
        pairs = disagreement(selected.softmax(-1), frozen=training == "sequential")  # [R, R, K]
        penalty = torch.einsum("rs,rsk->rk", pair_weights(len(outputs), pairs), pairs)
        # Losses are [R, B], and unlabeled samples are not part of B: their mean is added to every labeled sample.
        return loss(outputs[:, :size], batch) + diversity_weight * (
            penalty if disagree_on == "labeled" else penalty.mean(1, keepdim=True)
        )

    if disagree_on == "labeled":
        objective = Objective(joint_loss, logits, gather="members")
    else:
        objective = Objective(
            joint_loss, logits_with_unlabeled, gather="batch", per_sample=False, extra_inputs=("unlabeled",)
        )
    return Method(objective, get_update(update, rho), member_order="parallel" if training == "joint" else "sequential")
