"""SED: A2D on hard training samples, with a random subset of members in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.method import ActiveFn, LossFn, Method, Objective
from plateaux.core.ranges import NonNegative, Size
from plateaux.core.registry import method
from plateaux.core.types import Batch, derive_seed
from plateaux.optim.losses import disagreement, mean_over_others, sample_hardness
from plateaux.optim.sam import SamVariant, get_update


@method
def sed(
    loss: LossFn,
    *,
    diversity_weight: NonNegative = 0.05,
    members_per_step: Size | Literal["all"] = 2,
    floor: NonNegative = 1e-3,
    update: SamVariant = "plain",
    rho: NonNegative | None = None,
) -> Method:
    """Scalable ensemble diversification: A2D on labeled samples, weighted by their hardness (SED 2024).

    In every step `members_per_step` random members are active. Their loss is the loss plus `diversity_weight` times
    alpha_n A2D, averaged over pairs (the paper's lambda is twice that, 0.1), with alpha_n = CE_n / (mean CE)^2 of
    their averaged logits, without a gradient. `floor` is a lower bound of the mean CE in alpha.
    """
    if members_per_step != "all" and members_per_step < 2:
        raise RecipeError(
            f"method.members_per_step = {members_per_step}: SED compares pairs of members; set 2 or more, or 'all'"
        )
    if floor <= 0:
        raise RecipeError(f"method.floor = {floor}: alpha can be divided by it; set a value above 0")

    def joint_loss(logits: Tensor, batch: Batch) -> Tensor:
        pairs = disagreement(logits.softmax(-1))  # [R, R, B]
        penalty = torch.einsum("rs,rsb->rb", mean_over_others(len(logits), pairs), pairs)
        return loss(logits, batch) + diversity_weight * sample_hardness(logits, batch, floor=floor) * penalty

    active = None if members_per_step == "all" else random_members(members_per_step)
    return Method(Objective(joint_loss, gather="batch", per_sample=False, active=active), get_update(update, rho))


def random_members(count: int) -> ActiveFn:
    """Choose `count` members in every step, uniformly, from a seed derived from the seed of the batch."""

    def active(members: int, step: int) -> Sequence[int]:
        order = torch.randperm(members, generator=torch.Generator().manual_seed(derive_seed(step, "present")))
        return sorted(order[:count].tolist())

    return active
