"""DivDis: members whose predictions on unlabeled samples are statistically independent."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.method import LossFn, Method, Objective
from plateaux.core.outputs import logits, logits_with_unlabeled
from plateaux.core.ranges import Fraction, NonNegative
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
    diversity_weight: NonNegative = 10.0,
    disagree_on: Literal["unlabeled", "labeled", "both"] = "unlabeled",
    diversity: Literal["mi", "l1"] = "mi",
    regularizer: Literal["kl_backward", "kl_forward", "entropy", "ratio"] = "kl_backward",
    regularizer_weight: NonNegative = 10.0,
    class_ratio: tuple[Fraction, ...] = (),
    update: SamVariant = "plain",
    rho: NonNegative | None = None,
) -> Method:
    """Diversify and disambiguate: the loss plus the mutual information between members (Lee et al. 2023).

    A member's penalty is `diversity_weight` times its mean mutual information with the other members over unlabeled
    samples (`l1`: minus its mean L1 distance), plus `regularizer_weight` times a regularizer of its mean prediction
    there, which keeps it from collapsing to one class. `kl_backward` and `kl_forward` compare it with the mean
    prediction of all members on labeled samples, `entropy` with the uniform distribution, `ratio` with `class_ratio`.
    """
    if (regularizer == "ratio") != bool(class_ratio):
        raise RecipeError(
            f"method.class_ratio = {list(class_ratio)} with method.regularizer = {regularizer!r}: only 'ratio' uses "
            "class_ratio, and it needs the share of every class among the unlabeled samples. Set, for example, "
            'method.regularizer = "ratio" and method.class_ratio = [0.5, 0.5]'
        )
    similarity = mutual_information if diversity == "mi" else l1_distance
    regularizers = {
        "kl_backward": kl_backward,
        "kl_forward": kl_forward,
        "entropy": entropy,
        "ratio": ratio(class_ratio),
    }

    def joint_loss(outputs: Tensor, batch: Batch) -> Tensor:
        size = len(batch)
        p = outputs.softmax(-1)
        target = {"unlabeled": p[:, size:], "labeled": p[:, :size], "both": p}[disagree_on]
        pairs = similarity(target)  # [R, R]
        penalty = (mean_over_others(len(p), pairs) * pairs).sum(1)
        collapse = regularizers[regularizer](target, p[:, :size])  # [R]
        return loss(outputs[:, :size], batch) + (diversity_weight * penalty + regularizer_weight * collapse)[:, None]

    labeled = disagree_on == "labeled"
    objective = Objective(
        joint_loss,
        logits if labeled else logits_with_unlabeled,
        gather="batch",
        per_sample=False,
        extra_inputs=() if labeled else ("unlabeled",),
    )
    return Method(objective, get_update(update, rho))
