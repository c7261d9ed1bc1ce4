"""Snapshot ensembles: members are the ends of cycles of one course."""

from __future__ import annotations

from plateaux.core.method import LossFn, Method, Objective
from plateaux.core.registry import method
from plateaux.optim.sam import SamVariant, get_update


@method
def snapshot(loss: LossFn, *, update: SamVariant = "plain", rho: float | None = None) -> Method:
    """Take one network through a cycle of the learning rate for each member, kept at its end (Huang et al. 2017).

    `train.epochs` is the length of a cycle. A member begins with the weights and moments that the one before it ended
    with, and with the schedule from its start: cosine, per step, is lr(t) = (lr / 2) (cos(pi (t - 1) / T) + 1), t the
    step of the cycle and T its length.
    """
    return Method(Objective(loss), get_update(update, rho), member_order="chained")
