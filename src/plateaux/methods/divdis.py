"""DivDis: members whose predictions on unlabeled samples tell nothing of each other."""

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
    diversity_weight: float = 10.0,
    disagree_on: Literal["unlabeled", "labeled", "both"] = "unlabeled",
    diversity: Literal["mi", "l1"] = "mi",
    regularizer: Literal["kl_backward", "kl_forward", "entropy", "ratio"] = "kl_backward",
    regularizer_weight: float = 10.0,
    class_ratio: tuple[float, ...] = (),
    update: SamVariant = "plain",
    rho: float | None = None,
) -> Method:
    """Diversify and disambiguate: the loss plus what pairs' predictions tell of each other (Lee et al. 2023).

    A row's term is `strength` times its mean mutual information with the others over unlabeled samples (`l1`: minus
    its mean distance from them), plus `regularise` times what keeps its mean prediction there from collapsing:
    `kl_backward` and `kl_forward` hold it to everyone's mean on labeled samples, `entropy` to all classes alike,
    `ratio` to the `shares` of the classes.
    """
    if (regularizer == "ratio") != bool(class_ratio):
        raise RecipeError(
            f"method.class_ratio = {list(class_ratio)} with method.regularizer = {regularizer!r}: 'ratio', and no "
            "other, needs "
            "the share of every class among the unlabeled samples, such as shares = [0.5, 0.5]"
        )
    apart = mutual_information if diversity == "mi" else l1_distance
    keeping = {"kl_backward": kl_backward, "kl_forward": kl_forward, "entropy": entropy, "ratio": ratio(class_ratio)}

    def settle(table: Tensor, batch: Batch) -> Tensor:
        size = len(batch)
        p = table.softmax(-1)
        target = {"unlabeled": p[:, size:], "labeled": p[:, :size], "both": p}[disagree_on]
        pairs = apart(target)  # [R, R]
        alike = (mean_over_others(len(p), pairs) * pairs).sum(1)
        collapse = keeping[regularizer](target, p[:, :size])  # [R]
        return loss(table[:, :size], batch) + (diversity_weight * alike + regularizer_weight * collapse)[:, None]

    labeled = disagree_on == "labeled"
    objective = Objective(
        settle,
        logits if labeled else logits_with_unlabeled,
        gather="batch",
        per_sample=False,
        extra_inputs=() if labeled else ("unlabeled",),
    )
    return Method(objective, get_update(update, rho))
