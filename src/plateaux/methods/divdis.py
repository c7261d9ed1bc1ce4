"""DivDis: members whose predictions on unlabelled samples tell nothing of each other."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.method import LossFn, Method, Objective
from plateaux.core.outputs import logits, logits_with_unlabeled
from plateaux.core.registry import method
from plateaux.core.types import Batch
from plateaux.optim.losses import (
    entropy,
    kl_backward,
    kl_forward,
    l1_distance,
    mean_over_others,
    mutual_information,
    ratio,
)
from plateaux.optim.sam import SamVariant, get_update


@method
def divdis(
    loss: LossFn,
    *,
    strength: float = 10.0,
    on: Literal["unlabelled", "labelled", "both"] = "unlabelled",
    mode: Literal["mi", "l1"] = "mi",
    regulariser: Literal["kl_backward", "kl_forward", "entropy", "ratio"] = "kl_backward",
    regularise: float = 10.0,
    shares: tuple[float, ...] = (),
    update: SamVariant = "plain",
    rho: float | None = None,
) -> Method:
    """Diversify and disambiguate: the loss plus what pairs' predictions tell of each other (Lee et al. 2023).

    A row's term is `strength` times its mean mutual information with the others over unlabelled samples (`l1`: minus
    its mean distance from them), plus `regularise` times what keeps its mean prediction there from collapsing:
    `kl_backward` and `kl_forward` hold it to everyone's mean on labelled samples, `entropy` to all classes alike,
    `ratio` to the `shares` of the classes.
    """
    if (regulariser == "ratio") != bool(shares):
        raise RecipeError(
            f"method.shares = {list(shares)} with method.regulariser = {regulariser!r}: 'ratio', and no other, needs "
            "the share of every class among the unlabelled samples, such as shares = [0.5, 0.5]"
        )
    apart = mutual_information if mode == "mi" else l1_distance
    keeping = {"kl_backward": kl_backward, "kl_forward": kl_forward, "entropy": entropy, "ratio": ratio(shares)}

    def settle(table: Tensor, batch: Batch) -> Tensor:
        size = len(batch)
        p = table.softmax(-1)
        target = {"unlabelled": p[:, size:], "labelled": p[:, :size], "both": p}[on]
        pairs = apart(target)  # [R, R]
        alike = (mean_over_others(len(p), pairs) * pairs).sum(1)
        collapse = keeping[regulariser](target, p[:, :size])  # [R]
        return loss(table[:, :size], batch) + (strength * alike + regularise * collapse)[:, None]

    labelled = on == "labelled"
    objective = Objective(
        settle,
        logits if labelled else logits_with_unlabeled,
        gather="batch",
        per_sample=False,
        extra_inputs=() if labelled else ("unlabelled",),
    )
    return Method(objective, get_update(update, rho))
