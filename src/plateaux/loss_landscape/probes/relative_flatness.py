"""Relative flatness: what the curvature in a layer is, measured against the layer's own weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.registry import probe
from plateaux.core.types import Value
from plateaux.loss_landscape.loss_surface import Ground, Probe
from plateaux.loss_landscape.per_sample import over_draws, over_samples
from plateaux.loss_landscape.relative_flatness import last_layer_flatness, last_linear, layer_flatness, unit_spread


@probe
def relative_flatness(*, layer: str | None = None, scaling: Literal["none", "std"] = "none", draws: int = 30) -> Probe:
    """Relative flatness of a layer: the sum over its rows of <w_s, w_s'> Tr(H_ss'), H the Hessian of the mean loss.

    Of the last layer by a closed form, in one forward pass and without an error of draws; `scaling="std"` first moves
    the features' standard deviations into the layer. Of any other `layer`, named, by one Hessian-vector product for
    each of `draws` random directions.
    """
    if layer is not None and scaling != "none":
        raise RecipeError('scaling = "std" is for the last layer in closed form; leave out layer, or scaling')
    if draws < 1:
        raise RecipeError(f"draws = {draws}: give 1 or more")

    def ask(ground: Ground) -> Mapping[str, Value]:
        if layer is not None:
            return {"": over_draws(layer_flatness(ground, layer, draws=draws))}
        return {"": over_samples(_last(ground, scaling))}

    how = "closed form for the last layer" if layer is None else f"layer {layer}, {draws} draws of random signs"
    scaled = "; features scaled to a standard deviation of one" if scaling == "std" else ""
    return Probe(
        ask,
        passes=lambda samples: samples / 3 if layer is None else 4.0 * draws * samples,
        rescaled="same",
        convention=f"{how}{scaled}; weights without biases, filters as rows; not divided by the layer's width",
    )


def _last(ground: Ground, scaling: str) -> Tensor:
    """Return every sample's share `[N]`; scaling needs all features at once, else they pass by."""
    if ground.unit_logits:
        raise RecipeError("The closed form of relative flatness is for plain logits; name the layer: layer = ...")
    name = last_linear(ground)
    weight = ground.module.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    passing = (ground.record(batch, [name]) for batch in ground.batches)
    seen = ((record[name].inputs, logits) for logits, record in passing)
    if scaling == "none":
        return torch.cat([last_layer_flatness(features, logits, weight.detach()) for features, logits in seen])
    features, logits = (torch.cat(each) for each in zip(*seen, strict=True))
    features, weight = unit_spread(features, weight.detach())
    return last_layer_flatness(features, logits, weight)
