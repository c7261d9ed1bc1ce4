"""Relative flatness: what the curvature in a layer is, measured against the layer's own weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from plateaux.core.errors import RecipeError, suggest
from plateaux.core.member import is_same_tensor
from plateaux.core.registry import probe
from plateaux.core.types import Estimate
from plateaux.loss_landscape.forward_mode import ParamsFn, second_derivative
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.per_sample import mean_over_draws, mean_over_samples
from plateaux.loss_landscape.probe import Probe


@probe
def relative_flatness(
    *, layer: str | None = None, scaling: Literal["none", "std"] = "none", mc_samples: int = 30
) -> Probe:
    """Relative flatness of a layer: the sum over its rows of <w_s, w_s'> Tr(H_ss'), H the Hessian of the mean loss.

    Of the last layer by a closed form, in one forward pass and without an error of draws; `scaling="std"` first moves
    the features' standard deviations into the layer. Of any other `layer`, named, by one Hessian-vector product for
    each of `mc_samples` random directions.
    """
    if layer is not None and scaling != "none":
        raise RecipeError('scaling = "std" is for the last layer in closed form; leave out layer, or scaling')
    if mc_samples < 1:
        raise RecipeError(f"mc_samples = {mc_samples}: give 1 or more")

    def ask(ground: LossSurface) -> Mapping[str, Estimate]:
        if layer is not None:
            return {"": mean_over_draws(layer_flatness(ground, layer, mc_samples=mc_samples))}
        return {"": mean_over_samples(_last(ground, scaling))}

    how = "closed form for the last layer" if layer is None else f"layer {layer}, {mc_samples} draws of random signs"
    scaled = "; features scaled to a standard deviation of one" if scaling == "std" else ""
    return Probe(
        ask,
        passes=lambda samples: samples / 3 if layer is None else 4.0 * mc_samples * samples,
        scale_invariant=True,
        definition=f"{how}{scaled}; weights without biases, filters as rows; not divided by the layer's width",
    )


def _last(ground: LossSurface, scaling: str) -> Tensor:
    """Return every sample's share `[N]`; scaling needs all features at once, else they pass by."""
    if ground.normalize_logits:
        raise RecipeError("The closed form of relative flatness is for plain logits; name the layer: layer = ...")
    name = find_last_linear(ground)
    weight = ground.module.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    passing = (ground.record(batch, [name]) for batch in ground.batches)
    seen = ((record[name].inputs, logits) for logits, record in passing)
    if scaling == "none":
        return torch.cat([last_layer_flatness(features, logits, weight.detach()) for features, logits in seen])
    features, logits = (torch.cat(each) for each in zip(*seen, strict=True))
    features, weight = standardize_features(features, weight.detach())
    return last_layer_flatness(features, logits, weight)


ROWS = 2048  # samples worked on at once


def last_layer_flatness(features: Tensor, logits: Tensor, weight: Tensor) -> Tensor:
    """Return every sample's share of the relative flatness of a last layer, `[N]`; their mean is kappa.

    |phi|^2 (sum_s p_s |w_s|^2 - |sum_s p_s w_s|^2), from what the layer sees `[N, m]`, puts out `[N, C]` and its
    weight `[C, m]`. In float64, O(N C m), and memory for a few thousand samples at a time.
    """
    wide = weight.double()
    wide = wide - wide.mean(0)  # a shift common to all rows changes no spread, and costs digits
    parts = zip(torch.split(features, ROWS), torch.split(logits, ROWS), strict=True)
    return torch.cat([f.double().square().sum(1) * _spread(z.double().softmax(-1), wide) for f, z in parts])


def _spread(p: Tensor, weight: Tensor) -> Tensor:
    """Return the variance of the rows of `weight` under every sample's probabilities.

    Taken around the row of the likeliest class: around zero it would cancel where a sample is nearly certain.
    """
    top = p.argmax(-1)
    rest, home = p.scatter(1, top[:, None], 0.0), weight[top]
    squares = weight.square().sum(1)
    distances = squares + squares[top, None] - 2 * home @ weight.T  # [B, C]
    shift = rest @ weight - rest.sum(1, keepdim=True) * home  # [B, m]
    return ((rest * distances).sum(1) - shift.square().sum(1)).clamp(min=0)


def standardize_features(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Move the scale of the features into the layer: each has a standard deviation of one, and no output changes.

    A feature that is the same for all samples stays as it is.
    """
    scale = features.double().std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    return features.double() / scale, weight.double() * scale


def find_last_linear(ground: LossSurface) -> str:
    """Return the name of the nn.Linear whose output the network returns."""
    layers = [name for name, part in ground.module.named_modules() if isinstance(part, nn.Linear)]
    out, seen = ground.record(ground.batches[0].take(slice(0, 2)), layers)
    for name, each in seen.items():
        if is_same_tensor(each.output, out) and each.inputs.ndim == 2:
            return name
    raise RecipeError(
        f"The closed form of relative flatness needs a network whose output is that of an nn.Linear, and this "
        f"{type(ground.module).__name__} has none; name a layer: layer = {_layers(ground)[-1]!r}"
    )


def layer_flatness(ground: LossSurface, layer: str, *, mc_samples: int) -> Tensor:
    """Return <V, H_i V> of every draw and sample `[mc_samples, N]`, V = W R, R random signs; their mean is kappa."""
    name = f"{layer}.weight"
    if layer not in _layers(ground):
        raise RecipeError(
            f"There is no trained layer {layer!r} with a matrix of weights; {suggest(layer, _layers(ground))}"
        )
    weight = ground.origin[name]
    root = _root(weight.flatten(1))
    return torch.stack([_along(ground, name, _direction(ground, root, weight, draw)) for draw in range(mc_samples)])


def _along(ground: LossSurface, name: str, direction: Tensor) -> Tensor:
    """Return the second derivative of every sample's loss `[N]` where one weight moves and the others stay."""
    place, way = {name: ground.origin[name]}, {name: direction}
    functions = [_one_moves(ground, ground.loss_fn(batch)) for batch in ground.batches]
    return torch.cat([second_derivative(function, place, way) for function in functions]).double()


def _one_moves(ground: LossSurface, function: ParamsFn) -> ParamsFn:
    return lambda own: function({**ground.origin, **own})


def _root(rows: Tensor) -> Tensor:
    """Return a matrix A with A A' = W W': W itself where it is tall, else a square one, so that R stays small."""
    if rows.shape[0] >= rows.shape[1]:
        return rows
    values, vectors = torch.linalg.eigh((rows @ rows.T).double())
    root: Tensor = vectors * values.clamp(min=0).sqrt()
    return root.to(rows.dtype)


def _direction(ground: LossSurface, root: Tensor, weight: Tensor, draw: int) -> Tensor:
    return (root @ _signs(ground, (root.shape[1], weight[0].numel()), draw).to(root.dtype)).view_as(weight)


def _signs(ground: LossSurface, shape: tuple[int, int], draw: int) -> Tensor:
    maker = ground.generator("relative_flatness", draw)
    return 2 * torch.randint(0, 2, shape, generator=maker, device=ground.device) - 1


def _layers(ground: LossSurface) -> list[str]:
    """Return the names of the trained layers with a matrix (or filters) of weights."""
    found = [name for name, tensor in ground.origin.items() if tensor.ndim > 1]
    return [name.removesuffix(".weight") for name in found if name.endswith(".weight")]
