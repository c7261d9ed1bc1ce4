"""Relative flatness: the curvature of the loss in one layer, relative to the weights of that layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError, suggest
from plateaux.core.member import find_last_linear
from plateaux.core.ranges import Count
from plateaux.core.registry import probe
from plateaux.core.types import Estimate
from plateaux.loss_landscape.forward_mode import ParamsFn, second_derivative
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.per_sample import mean_over_draws, mean_over_samples, require_cross_entropy
from plateaux.loss_landscape.probe import Probe


@probe
def relative_flatness(
    *, layer: str | None = None, scaling: Literal["none", "std"] = "none", mc_samples: Count = 30
) -> Probe:
    """Relative flatness of a layer: the sum over its rows of <w_s, w_s'> Tr(H_ss'), H the Hessian of the mean loss.

    By default of the last layer, in closed form: one forward pass, no Monte Carlo error. `scaling="std"` first moves
    the standard deviations of the features into the layer. Any other `layer` is selected by name and takes one
    Hessian-vector product for each of `mc_samples` random directions.
    """
    if layer is not None and scaling != "none":
        raise RecipeError('scaling = "std" needs the closed form of the last layer; leave out layer or scaling')

    def run(surface: LossSurface) -> Mapping[str, Estimate]:
        if layer is not None:
            return {"": mean_over_draws(layer_flatness(surface, layer, mc_samples=mc_samples))}
        return {"": mean_over_samples(_last_layer_values(surface, scaling))}

    method = "closed form for the last layer" if layer is None else f"layer {layer}, {mc_samples} draws of random signs"
    scaled = "; features scaled to a standard deviation of one" if scaling == "std" else ""
    return Probe(
        run,
        passes=lambda samples: samples / 3 if layer is None else 4.0 * mc_samples * samples,
        scale_invariant=True,
        definition=f"{method}{scaled}; weights without biases, filters as rows; not divided by the layer's width",
    )


def _last_layer_values(surface: LossSurface, scaling: str) -> Tensor:
    """Return the value of every sample `[N]`. Only scaling needs the features of all samples in memory at once."""
    require_cross_entropy(surface, "The closed form of relative flatness")
    if surface.normalize_logits:
        raise RecipeError(
            "The closed form of relative flatness does not support normalized logits; select the layer by name: "
            "layer = ..."
        )
    name = _last_layer_name(surface)
    weight = surface.module.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    recorded = (surface.record(batch, [name]) for batch in surface.batches)
    pairs = ((records[name].inputs, logits) for logits, records in recorded)
    if scaling == "none":
        return torch.cat([last_layer_flatness(features, logits, weight.detach()) for features, logits in pairs])
    features, logits = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    features, weight = standardize_features(features, weight.detach())
    return last_layer_flatness(features, logits, weight)


MAX_ROWS = 2048  # samples processed at once


def last_layer_flatness(features: Tensor, logits: Tensor, weight: Tensor) -> Tensor:
    """Return the contribution of every sample to the relative flatness of a last layer, `[N]`; the mean is kappa.

    |phi|^2 (sum_s p_s |w_s|^2 - |sum_s p_s w_s|^2), from the inputs of the layer `[N, m]`, its outputs `[N, C]`, and
    its weight `[C, m]`. In float64, O(N C m), in chunks of a few thousand samples.
    """
    weight = weight.double()
    weight = weight - weight.mean(0)  # a shift of all rows does not change the variance, and costs digits
    chunks = zip(torch.split(features, MAX_ROWS), torch.split(logits, MAX_ROWS), strict=True)
    return torch.cat([f.double().square().sum(1) * _row_variance(z.double().softmax(-1), weight) for f, z in chunks])


def _row_variance(p: Tensor, weight: Tensor) -> Tensor:
    """Return the variance of the rows of `weight` under the probabilities of every sample.

    It is computed relative to the row of the most likely class: relative to zero, digits would cancel if a prediction
    is almost certain.
    """
    top = p.argmax(-1)
    others, center = p.scatter(1, top[:, None], 0.0), weight[top]
    squares = weight.square().sum(1)
    distances = squares + squares[top, None] - 2 * center @ weight.T  # [B, C]
    shift = others @ weight - others.sum(1, keepdim=True) * center  # [B, m]
    return ((others * distances).sum(1) - shift.square().sum(1)).clamp(min=0)


def standardize_features(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scale features to a standard deviation of one, and the weights inversely, so that no output changes.

    A feature that is the same for all samples does not change.
    """
    scale = features.double().std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    return features.double() / scale, weight.double() * scale


def _last_layer_name(surface: LossSurface) -> str:
    """Return the name of the nn.Linear whose output the network returns."""
    with torch.no_grad(), surface.preserve_buffers():
        record = find_last_linear(surface.member, surface.batches[0].take(slice(0, 2)).x)
    if record is None:
        raise RecipeError(
            f"The closed form of relative flatness needs a network whose output is the output of an nn.Linear, and "
            f"this {type(surface.module).__name__} has none; select a layer: layer = {_layer_names(surface)[-1]!r}"
        )
    return record.name


def layer_flatness(surface: LossSurface, layer: str, *, mc_samples: int) -> Tensor:
    """Return <V, H_i V> of every draw and sample `[mc_samples, N]`, V = W R with random signs R; the mean is kappa."""
    name = f"{layer}.weight"
    if layer not in _layer_names(surface):
        raise RecipeError(
            f"There is no trained layer {layer!r} with a weight matrix; {suggest(layer, _layer_names(surface))}"
        )
    weight = surface.origin[name]
    factor = _gram_factor(weight.flatten(1))
    directions = (_random_direction(surface, factor, weight, draw) for draw in range(mc_samples))
    return torch.stack([_quadratic_forms(surface, name, direction) for direction in directions])


def _quadratic_forms(surface: LossSurface, name: str, direction: Tensor) -> Tensor:
    """Return the second derivative of every sample's loss `[N]` along a direction in one weight tensor."""
    functions = [_fix_other_params(surface, surface.loss_fn(batch)) for batch in surface.batches]
    at = {name: surface.origin[name]}
    return torch.cat([second_derivative(function, at, {name: direction}) for function in functions]).double()


def _fix_other_params(surface: LossSurface, function: ParamsFn) -> ParamsFn:
    return lambda params: function({**surface.origin, **params})


def _gram_factor(weight: Tensor) -> Tensor:
    """Return a matrix A with A A' = W W': W itself if it is tall, else a square matrix, so that R stays small."""
    if weight.shape[0] >= weight.shape[1]:
        return weight
    values, vectors = torch.linalg.eigh((weight @ weight.T).double())
    factor: Tensor = vectors * values.clamp(min=0).sqrt()
    return factor.to(weight.dtype)


def _random_direction(surface: LossSurface, factor: Tensor, weight: Tensor, draw: int) -> Tensor:
    signs = _random_signs(surface, (factor.shape[1], weight[0].numel()), draw)
    return (factor @ signs.to(factor.dtype)).view_as(weight)


def _random_signs(surface: LossSurface, shape: tuple[int, int], draw: int) -> Tensor:
    generator = surface.generator("relative_flatness", draw)
    return 2 * torch.randint(0, 2, shape, generator=generator, device=surface.device) - 1


def _layer_names(surface: LossSurface) -> list[str]:
    """Return the names of the trained layers with a weight matrix or filters."""
    names = [name for name, tensor in surface.origin.items() if tensor.ndim > 1]
    return [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
