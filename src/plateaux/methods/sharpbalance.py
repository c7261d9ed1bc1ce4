"""SharpBalance: members meet, and each is careful about the samples that the others find sharp."""

from __future__ import annotations

from typing import Literal

from plateaux.core.errors import RecipeError
from plateaux.core.method import DataPartition, LossFn, Method, Objective
from plateaux.core.outputs import OutputFn
from plateaux.core.registry import method
from plateaux.data.partition.rules import get_rule as rule_named
from plateaux.optim.sam import asam_direction, gsam, plain_gradient, sam_on_subset
from plateaux.optim.sam import sam as by_climbing
from plateaux.optim.sample_scores import gradient_norm, last_layer, sample_loss


@method
def sharpbalance(
    loss: LossFn,
    *,
    epochs: int,
    rho: float = 0.05,
    top_k: float = 0.4,
    partition_epoch: int | None = None,
    repartition_every: int | None = None,
    rule: str = "paper",
    score: Literal["gradient_norm", "last_layer", "loss"] = "gradient_norm",
    sam_variant: Literal["sam", "asam", "gsam"] = "sam",
    warmup: Literal["sam", "plain"] = "sam",
    step: Literal["split", "shared"] = "split",
) -> Method:
    """Climb on the samples that the other members find sharp, descend plainly on the rest (Lu et al. 2024).

    After `meet_after` epochs (half of them by default) every member scores every training sample, and `rule` decides
    from the `top` share of the scores who is careful about what. Until then all climb on everything, or with `warmup =
    "plain"` nobody does.
    """
    meets = _meetings(epochs, epochs // 2 if partition_epoch is None else partition_epoch, repartition_every)
    climbing = {
        "sam": by_climbing(rho),
        "asam": by_climbing(rho, direction=asam_direction(0.01)),
        "gsam": gsam(rho, alpha=0.4, rho_min=rho),
    }[sam_variant]
    own_loss = None if getattr(loss, "plain", False) else loss
    offers: dict[str, OutputFn] = {
        "gradient_norm": gradient_norm(own_loss),
        "last_layer": last_layer(own_loss),
        "loss": sample_loss(own_loss),
    }
    return Method(
        Objective(loss),
        sam_on_subset(climbing, warmup=climbing if warmup == "sam" else plain_gradient, step=step),
        DataPartition(
            after=meets,
            output=offers[score],
            assign=rule_named(rule, top_k=top_k),
            metadata={"rule": rule, "top_k": top_k, "score": score},
            prefix_method={"name": sam_variant, "rho": rho} if warmup == "sam" else {"name": "deep_ensemble"},
        ),
    )


def _meetings(epochs: int, first: int, every: int | None) -> tuple[int, ...]:
    """Return the completed epochs at which members meet."""
    if not 0 <= first < epochs:
        raise RecipeError(
            f"method.partition_epoch = {first}: members meet after 0 to {epochs - 1} of their {epochs} epochs, so "
            "that some "
            "are left to be careful in"
        )
    if every is not None and every < 1:
        raise RecipeError(f"method.repartition_every = {every}: members can meet again after 1 epoch or more")
    return tuple(range(first, epochs, every)) if every is not None else (first,)
