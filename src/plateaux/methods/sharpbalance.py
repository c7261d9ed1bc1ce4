"""SharpBalance: each member applies SAM to the samples that are sharp for the other members."""

from __future__ import annotations

from typing import Literal

from plateaux.core.errors import RecipeError
from plateaux.core.method import DataPartition, LossFn, Method, Objective
from plateaux.core.outputs import OutputFn
from plateaux.core.ranges import Count, CountOrZero, Fraction, NonNegative
from plateaux.core.registry import method
from plateaux.data.partition.rules import get_rule
from plateaux.optim.losses import CrossEntropy
from plateaux.optim.sam import asam_direction, gsam, plain_gradient, sam, sam_on_subset
from plateaux.optim.sample_scores import gradient_norm, last_layer, sample_loss

GSAM_ALPHA = 0.4


@method
def sharpbalance(
    loss: LossFn,
    *,
    epochs: int,
    rho: NonNegative = 0.05,
    top_k: Fraction = 0.4,
    partition_epoch: CountOrZero | None = None,
    repartition_every: Count | None = None,
    rule: str = "paper",
    score: Literal["gradient_norm", "last_layer", "loss"] = "gradient_norm",
    sam_variant: Literal["sam", "asam", "gsam"] = "sam",
    warmup: Literal["sam", "plain"] = "sam",
    alpha: NonNegative | None = None,
) -> Method:
    """Apply SAM to samples that are sharp for other members, and plain gradients to the rest (Lu et al. 2024).

    After `partition_epoch` epochs (half of them by default) every member scores every training sample, and `rule`
    assigns a sharpness-aware set to every member from the `top_k` fraction of the scores. Until then all members apply
    SAM to all samples, or to none with `warmup = "plain"`. `alpha` is that of GSAM (default 0.4), for
    `sam_variant = "gsam"` only.
    """
    if alpha is not None and sam_variant != "gsam":
        raise RecipeError(
            f"method.alpha = {alpha} belongs to GSAM, but method.sam_variant is {sam_variant!r}. Set sam_variant = "
            "'gsam', or leave out alpha"
        )
    options = {"alpha": GSAM_ALPHA if alpha is None else alpha} if sam_variant == "gsam" else {}
    partition_epochs = _partition_epochs(
        epochs, epochs // 2 if partition_epoch is None else partition_epoch, repartition_every
    )
    sam_update = {
        "sam": sam(rho),
        "asam": sam(rho, direction=asam_direction(0.01)),
        "gsam": gsam(rho, alpha=options.get("alpha", GSAM_ALPHA), rho_min=rho),
    }[sam_variant]
    # Without a loss, scores use the closed form of the gradient of cross entropy.
    score_loss = None if isinstance(loss, CrossEntropy) and loss.is_unweighted else loss
    scores: dict[str, OutputFn] = {
        "gradient_norm": gradient_norm(score_loss),
        "last_layer": last_layer(score_loss),
        "loss": sample_loss(score_loss),
    }
    return Method(
        Objective(loss),
        sam_on_subset(sam_update, warmup=sam_update if warmup == "sam" else plain_gradient),
        DataPartition(
            after=partition_epochs,
            output=scores[score],
            assign=get_rule(rule, top_k=top_k),
            metadata={"rule": rule, "top_k": top_k, "score": score},
            prefix_method={"name": sam_variant, "rho": rho, **options}
            if warmup == "sam"
            else {"name": "deep_ensemble"},
        ),
    )


def _partition_epochs(epochs: int, first: int, every: int | None) -> tuple[int, ...]:
    """Return the numbers of completed epochs after which the samples are partitioned."""
    if not 0 <= first < epochs:
        raise RecipeError(
            f"method.partition_epoch = {first} must be between 0 and {epochs - 1}, so that some of the {epochs} epochs "
            "are left for training on the partition"
        )
    if every is not None and every < 1:
        raise RecipeError(f"method.repartition_every = {every} must be at least 1 epoch")
    return tuple(range(first, epochs, every)) if every is not None else (first,)
