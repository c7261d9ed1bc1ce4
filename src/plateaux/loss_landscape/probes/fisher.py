"""Sensitivity of the predictions to the weights: the Fisher-Rao norm, and the trace of the Fisher matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from plateaux.core.registry import probe
from plateaux.core.types import Batch, Estimate
from plateaux.loss_landscape.forward_mode import jvp_outputs
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.per_sample import mean_over_samples, require_cross_entropy, squared_gradient_norms
from plateaux.loss_landscape.probe import Probe

Labels = Literal["true", "model"]


@probe
def fisher_rao(*, labels: Labels = "true") -> Probe:
    """The Fisher-Rao norm: the square root of theta' F theta = E[<theta, gradient of a sample's loss>^2].

    It takes one forward-mode pass in the direction of the weights themselves. `labels` are those of the data, or the
    expectation over those of the model.
    """

    def run(surface: LossSurface) -> Mapping[str, Estimate]:
        square = mean_over_samples(torch.cat([_squares(surface, batch, labels) for batch in surface.batches]))
        return {"": _square_root(square), "squared": square}

    label_text = "labels of the data" if labels == "true" else "expectation over the labels of the model"
    return Probe(
        run,
        passes=float,
        scale_invariant=True,
        definition=f"the square root of the mean square, with the square as additional value; {label_text}; "
        "forward-mode differentiation; all trained weights, including biases and normalization; with BatchNorm in "
        "training mode, convolutions before a BatchNorm layer contribute nothing, in evaluation mode they do",
    )


@probe
def fisher_trace() -> Probe:
    """The trace of the Fisher matrix: the mean squared norm of the samples' gradients."""
    return Probe(
        lambda surface: {"": mean_over_samples(squared_gradient_norms(surface))},
        passes=float,
        definition="labels of the data (the empirical Fisher matrix); a sum over weights, a mean over samples",
    )


def _squares(surface: LossSurface, batch: Batch, labels: Labels) -> Tensor:
    """Return the square of <theta, gradient> for every sample `[B]`, or its mean over the labels of the model."""
    logits, change = jvp_outputs(surface.logits_fn(batch), surface.origin, surface.origin)
    if labels == "true":
        return _jvp_logits(lambda z: surface.losses_from_logits(z, batch), logits, change)[1].square()
    require_cross_entropy(surface, "The expectation over the labels of the model")
    log_p, slopes = _jvp_logits(lambda z: surface.prepare_logits(z).log_softmax(-1), logits, change)
    return (log_p.exp() * slopes.square()).sum(-1)


def _jvp_logits(function: Callable[[Tensor], Tensor], logits: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    return jvp_outputs(lambda tree: function(tree[""]), {"": logits.double()}, {"": change.double()})


def _square_root(square: Estimate) -> Estimate:
    root = square.value**0.5
    # The delta method: d sqrt(s) = ds / (2 sqrt(s)).
    return Estimate(root, None if square.stderr is None or root == 0 else square.stderr / (2 * root))
