"""Sensitivity of the predictions to the weights: the Fisher-Rao norm, and the trace of the Fisher matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.ranges import Size
from plateaux.core.registry import probe
from plateaux.core.types import Batch, Estimate
from plateaux.loss_landscape.forward_mode import jvp_outputs
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.per_sample import mean_over_samples, squared_gradient_norms
from plateaux.loss_landscape.probe import Probe

LINEAR_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORM_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)
Labels = Literal["true", "model"]


@probe
def fisher_rao(
    *,
    labels: Labels = "true",
    method: Literal["jvp", "logit"] = "jvp",
    layers: Size | None = None,
    force: bool = False,
) -> Probe:
    """The Fisher-Rao norm: the square root of theta' F theta = E[<theta, gradient of a sample's loss>^2].

    It takes one forward-mode pass in the direction of the weights themselves. `labels` are those of the data, or the
    expectation over those of the model. `method="logit"` takes only a forward pass: in a network without biases and
    normalization and with L hidden layers (`layers`; counted by default), <theta, gradient> is (L + 1) <logits,
    gradient with respect to the logits>. Other networks are rejected unless `force` is set.
    """

    def run(surface: LossSurface) -> Mapping[str, Estimate]:
        degree = None if method == "jvp" else _degree(surface, layers, force)
        squares = torch.cat([_squares(surface, batch, labels, degree) for batch in surface.batches])
        square = mean_over_samples(squares)
        return {"": _square_root(square), "squared": square}

    label_text = "labels of the data" if labels == "true" else "expectation over the labels of the model"
    method_text = "forward-mode differentiation" if method == "jvp" else "closed form for homogeneous networks"
    return Probe(
        run,
        passes=lambda samples: samples * (1 if method == "jvp" else 1 / 3),
        scale_invariant=True,
        definition=f"the square root of the mean square, with the square as additional value; {label_text}; "
        f"{method_text}; all trained weights, including biases and normalization; with BatchNorm in training mode, "
        "convolutions before a BatchNorm layer contribute nothing, in evaluation mode they do",
    )


@probe
def fisher_trace() -> Probe:
    """The trace of the Fisher matrix: the mean squared norm of the samples' gradients."""
    return Probe(
        lambda surface: {"": mean_over_samples(squared_gradient_norms(surface))},
        passes=float,
        definition="labels of the data (the empirical Fisher matrix); a sum over weights, a mean over samples",
    )


def _squares(surface: LossSurface, batch: Batch, labels: Labels, degree: int | None) -> Tensor:
    """Return the square of <theta, gradient> for every sample `[B]`, or its mean over the labels of the model."""
    if degree is None:
        logits, change = jvp_outputs(surface.logits_fn(batch), surface.origin, surface.origin)
    else:
        logits = surface.record(batch)[0]
        change = degree * logits
    if labels == "true":
        return _jvp_logits(lambda z: surface.losses_from_logits(z, batch), logits, change)[1].square()
    log_p, slopes = _jvp_logits(lambda z: surface.prepare_logits(z).log_softmax(-1), logits, change)
    return (log_p.exp() * slopes.square()).sum(-1)


def _jvp_logits(function: Callable[[Tensor], Tensor], logits: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    return jvp_outputs(lambda tree: function(tree[""]), {"": logits.double()}, {"": change.double()})


def _square_root(square: Estimate) -> Estimate:
    root = square.value**0.5
    # The delta method: d sqrt(s) = ds / (2 sqrt(s)).
    return Estimate(root, None if square.stderr is None or root == 0 else square.stderr / (2 * root))


def _degree(surface: LossSurface, layers: int | None, force: bool) -> int:
    """Return the degree of homogeneity: if all weights are multiplied by c, the logits are multiplied by c^degree."""
    trained = {id(p) for p in surface.params.values()}
    num_layers = sum(
        isinstance(layer, LINEAR_LAYERS) and id(layer.weight) in trained for layer in surface.module.modules()
    )
    degree = num_layers if layers is None else layers + 1
    if not force:
        _require_homogeneous(surface, degree)
    return degree


def _require_homogeneous(surface: LossSurface, degree: int) -> None:
    biases = [name for name, _ in surface.module.named_parameters() if name.split(".")[-1].endswith("bias")]
    norms = [name for name, layer in surface.module.named_modules() if isinstance(layer, NORM_LAYERS)]
    if biases or norms:
        kinds = " and ".join(kind for kind, names in (("biases", biases), ("normalization", norms)) if names)
        raise RecipeError(
            f'method = "logit" needs a network without biases and normalization, and this one has {kinds} '
            f'({", ".join([*biases, *norms][:3])}); use method = "jvp", or set force = true'
        )
    two = surface.batches[0].take(slice(0, 2))
    with torch.no_grad():
        scaled_params = tensor_tree.scale(surface.origin, 1.1)
        logits, scaled = (surface.logits_fn(two)(params) for params in (surface.origin, scaled_params))
    if not torch.allclose(scaled, 1.1**degree * logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
        raise RecipeError(
            f'method = "logit" with {degree - 1} hidden layers does not hold for this network: if all weights are '
            f"multiplied by 1.1, its logits are not multiplied by 1.1^{degree}; set layers, use "
            'method = "jvp", or set force = true'
        )
