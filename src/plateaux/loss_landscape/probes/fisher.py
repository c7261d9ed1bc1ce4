"""How much the member's answers hang on its weights: the Fisher-Rao norm, and the trace of the Fisher matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.registry import probe
from plateaux.core.types import Batch, Estimate
from plateaux.loss_landscape.forward_mode import jvp_outputs
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.per_sample import mean_over_samples, squared_gradient_norms
from plateaux.loss_landscape.probe import Probe

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)
Labels = Literal["true", "model"]


@probe
def fisher_rao(
    *,
    labels: Labels = "true",
    method: Literal["jvp", "logit"] = "jvp",
    layers: int | None = None,
    force: bool = False,
) -> Probe:
    """The Fisher-Rao norm: the root of theta' F theta = E[<theta, gradient of a sample's loss>^2].

    By one forward-mode pass in the direction of the weights themselves. `labels` are those of the data, or an
    expectation over the model's own. `method="logit"` needs a forward pass alone: in a network without biases or
    normalisation and with L hidden layers (`layers`; counted where not given), <theta, gradient> is (L + 1) <logits,
    gradient at the logits>. Networks to which that does not apply are refused unless it is forced.
    """

    def ask(ground: LossSurface) -> Mapping[str, Estimate]:
        degree = None if method == "jvp" else _degree(ground, layers, force)
        square = mean_over_samples(torch.cat([_squares(ground, batch, labels, degree) for batch in ground.batches]))
        return {"": _root(square), "squared": square}

    whose = "the data" if labels == "true" else "the model, in expectation"
    way = "by forward mode" if method == "jvp" else "by the form for homogeneous networks"
    return Probe(
        ask,
        passes=lambda samples: samples * (1 if method == "jvp" else 1 / 3),
        scale_invariant=True,
        definition=f"the root of the mean square, the square beside it; labels of {whose}; {way}; all trained weights, "
        "biases and those of normalisation among them; under BatchNorm in training mode the convolutions before it "
        "add nothing, in evaluation mode they do",
    )


@probe
def fisher_trace() -> Probe:
    """The trace of the Fisher matrix: the mean squared norm of the samples' gradients."""
    return Probe(
        lambda ground: {"": mean_over_samples(squared_gradient_norms(ground))},
        passes=float,
        definition="labels of the data (the empirical Fisher matrix); a sum over weights, a mean over samples",
    )


def _squares(ground: LossSurface, batch: Batch, labels: Labels, degree: int | None) -> Tensor:
    """Return the square of <theta, gradient> of every sample `[B]`, or its mean over the model's own labels."""
    if degree is None:
        logits, moved = jvp_outputs(ground.logits_fn(batch), ground.origin, ground.origin)
    else:
        logits = ground.record(batch)[0]
        moved = degree * logits
    if labels == "true":
        return _along(lambda z: ground.losses_from_logits(z, batch), logits, moved)[1].square()
    log_p, slopes = _along(lambda z: ground.prepare_logits(z).log_softmax(-1), logits, moved)
    return (log_p.exp() * slopes.square()).sum(-1)


def _along(function: Callable[[Tensor], Tensor], logits: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    return jvp_outputs(lambda at: function(at[""]), {"": logits.double()}, {"": moved.double()})


def _root(square: Estimate) -> Estimate:
    root = square.value**0.5
    # The delta method: d sqrt(s) = ds / (2 sqrt(s)).
    return Estimate(root, None if square.stderr is None or root == 0 else square.stderr / (2 * root))


def _degree(ground: LossSurface, layers: int | None, force: bool) -> int:
    """Return by which power of a factor on all weights the logits grow."""
    module = ground.module
    trained = {id(p) for p in ground.params.values()}
    counted = sum(isinstance(part, LAYERS) and id(part.weight) in trained for part in module.modules())
    degree = counted if layers is None else layers + 1
    if not force:
        _refuse_what_is_not_homogeneous(ground, degree)
    return degree


def _refuse_what_is_not_homogeneous(ground: LossSurface, degree: int) -> None:
    biases = [name for name, _ in ground.module.named_parameters() if name.split(".")[-1].endswith("bias")]
    norms = [name for name, part in ground.module.named_modules() if isinstance(part, NORMS)]
    if biases or norms:
        kinds = " and ".join(kind for kind, names in (("biases", biases), ("normalisation", norms)) if names)
        raise RecipeError(
            f'method = "logit" is for networks without biases and normalisation; this one has {kinds} '
            f'({", ".join([*biases, *norms][:3])}): take method = "jvp", or force = true'
        )
    two = ground.batches[0].take(slice(0, 2))
    with torch.no_grad():
        here, there = (ground.logits_fn(two)(at) for at in (ground.origin, tensor_tree.scale(ground.origin, 1.1)))
    if not torch.allclose(there, 1.1**degree * here, rtol=1e-3, atol=1e-3 * float(here.abs().max())):
        raise RecipeError(
            f'method = "logit" with {degree - 1} hidden layers does not hold: with all weights times 1.1 the logits '
            f'are not 1.1^{degree} times as large. Give layers, take method = "jvp", or force = true'
        )
