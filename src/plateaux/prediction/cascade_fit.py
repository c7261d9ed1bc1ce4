"""The cascade of a calibration: what it is fitted on, where it is refused, and its calibrated probabilities."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.ensembles import cascade as cascades
from plateaux.ensembles.cascade import Cascade, CascadeOptions
from plateaux.ensembles.temperature import Order, Temperatures, apply
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import MemberOutputs
from plateaux.models.backbone import common_backbone


def fit_cascade(held: MemberOutputs, options: CascadeOptions) -> Cascade:
    """Fit a cascade on one half of the held-out samples."""
    cascade = cascades.fit(held.logits, held.y, options)
    needed = cascades.needed_samples(options)
    if cascade.samples >= needed:
        return cascade
    advice = f"Half of the held-out samples fit the cascade: give {2 * needed} or more."
    return replace(cascade, remark=f"{cascade.remark} {advice}")


def describe_cascade(cascade: Cascade) -> str:
    """Return one line on what a cascade saves and guarantees."""
    if cascade.threshold is None:
        return f"cascade: queries all {cascade.members} members"
    stages = ", ".join(map(str, cascade.stages))
    loss = "lose a correct prediction" if cascade.kind == "harm" else "get another prediction"
    return (
        f"cascade (stages {stages}): queries {cascade.queried:.2f} of {cascade.members} members; with "
        f"{100 * cascade.confidence:g} % confidence at most {100 * cascade.max_harm:g} % of the samples {loss}"
    )


def check_cascade(order: Order, evaluator: Evaluator) -> None:
    """Raise an error if a cascade has no meaning, or saves nothing."""
    if order != "pool then calibrate":
        raise RecipeError(
            f"order = {order!r} was given with a cascade, whose members differ between samples. Use the order 'pool "
            "then calibrate' (--order pool), or leave the cascade out"
        )
    is_python_model = evaluator.components.model is not None  # the recipe does not say what it shares
    loaded = [member.module for member in evaluator.modules] if is_python_model else []
    modules = [module for module in loaded if isinstance(module, nn.Module)]
    if evaluator.recipe.model.backbone is not None or common_backbone(modules) is not None:
        raise RecipeError(
            "The members of this run share a backbone, which every input runs through once. Their heads cost almost "
            "nothing, so a cascade would save nothing. Leave out --cascade"
        )


def pool(logits: Tensor, cascade: Cascade | None) -> Tensor:
    """Return logits `[M, N, C]`, or the log of the mean probability of a cascade as those of one member."""
    return logits if cascade is None else cascade.log_p(logits)[None]


def calibrated_log_p(logits: Tensor, temperatures: Temperatures, cascade: Cascade | None) -> Tensor:
    """Return the calibrated log-probabilities `[N, C]` of all members, or of a cascade, from logits `[M, N, C]`."""
    if cascade is None or temperatures.order == "calibrate then pool":
        return apply(logits, temperatures)
    return apply(pool(logits, cascade), replace(temperatures, members=1))
