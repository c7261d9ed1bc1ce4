"""SED: members disagree where the ensemble finds the training samples hard, a few members at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.method import ActiveFn, LossFn, Method, Objective
from plateaux.core.registry import method
from plateaux.core.types import Batch, derive_seed
from plateaux.optim.losses import disagreement, mean_over_others, sample_hardness
from plateaux.optim.sam import SamVariant, get_update


@method
def sed(
    loss: LossFn,
    *,
    diversity_weight: float = 0.05,
    members_per_step: int | Literal["all"] = 2,
    floor: float = 1e-3,
    update: SamVariant = "plain",
    rho: float | None = None,
) -> Method:
    """Scalable ensemble diversification: A2D on labeled samples, weighed by how hard they are (SED 2024).

    In every step `pair` members drawn at random take part and no others run. Their loss is the loss plus `strength`
    times alpha_n A2D, mean over the pairs of them (the paper's lambda is twice that, 0.1), with alpha_n = CE_n / (mean
    CE)^2 of their averaged logits, taken as it is. `floor` is the least mean CE that alpha is divided by.
    """
    if members_per_step != "all" and members_per_step < 2:
        raise RecipeError(
            f"method.members_per_step = {members_per_step}: at least 2 members meet in a step; give 2 or more, or 'all'"
        )
    if floor <= 0:
        raise RecipeError(f"method.floor = {floor}: alpha is divided by it where a batch is fitted; give more than 0")

    def settle(table: Tensor, batch: Batch) -> Tensor:
        pairs = disagreement(table.softmax(-1))  # [R, R, B]
        alike = torch.einsum("rs,rsb->rb", mean_over_others(len(table), pairs), pairs)
        return loss(table, batch) + diversity_weight * sample_hardness(table, batch, floor=floor) * alike

    present = None if members_per_step == "all" else random_members(members_per_step)
    return Method(Objective(settle, gather="batch", per_sample=False, active=present), get_update(update, rho))


def random_members(count: int) -> ActiveFn:
    """Return the rule by which so many members take part in a step, all equally often, as the batch's key says."""

    def present(members: int, step: int) -> Sequence[int]:
        order = torch.randperm(members, generator=torch.Generator().manual_seed(derive_seed(step, "present")))
        return sorted(order[:count].tolist())

    return present
