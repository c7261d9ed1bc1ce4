"""Snapshot ensembles: members are checkpoints of one training run at the ends of learning-rate cycles."""

from __future__ import annotations

from plateaux.core.method import LossFn, Method, Objective
from plateaux.core.ranges import NonNegative
from plateaux.core.registry import method
from plateaux.optim.sam import SamVariant, get_update


@method
def snapshot(loss: LossFn, *, update: SamVariant = "plain", rho: NonNegative | None = None) -> Method:
    """Train one network through one learning-rate cycle per member (Huang et al. 2017).

    `train.epochs` is the length of a cycle. A member starts from the weights and optimizer state at the end of the
    previous member, and restarts the schedule: cosine, per step, is lr(t) = (lr / 2) (cos(pi (t - 1) / T) + 1), where t
    is the step in the cycle and T its length.
    """
    return Method(Objective(loss), get_update(update, rho), member_order="chained")
