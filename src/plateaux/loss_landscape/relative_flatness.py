"""Relative flatness (Petzka et al., 2021): the curvature of the loss in a layer, weighed by the layer's own weights.

For a layer W with rows w_s, kappa = sum over s, s' of <w_s, w_s'> Tr(H_ss'), with H_ss' the Hessian of the mean loss
between rows s and s'. It does not change when neighbouring layers are rescaled. For the last layer under cross entropy
there is a closed form, a number for each sample; for any layer it is a trace, found by random directions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plateaux.core.errors import RecipeError, nearest
from plateaux.core.method import same_memory
from plateaux.loss_landscape.forward_mode import Function, bend
from plateaux.loss_landscape.loss_surface import Ground

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


def unit_spread(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Move the scale of the features into the layer: each has a standard deviation of one, and no output changes.

    A feature that is the same for all samples stays as it is.
    """
    scale = features.double().std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    return features.double() / scale, weight.double() * scale


def last_linear(ground: Ground) -> str:
    """Return the name of the nn.Linear whose output the network returns."""
    layers = [name for name, part in ground.module.named_modules() if isinstance(part, nn.Linear)]
    out, seen = ground.record(ground.batches[0].part(slice(0, 2)), layers)
    for name, each in seen.items():
        if same_memory(each.output, out) and each.inputs.ndim == 2:
            return name
    raise RecipeError(
        f"The closed form of relative flatness needs a network whose output is that of an nn.Linear, and this "
        f"{type(ground.module).__name__} has none; name a layer: layer = {_layers(ground)[-1]!r}"
    )


def layer_flatness(ground: Ground, layer: str, *, draws: int) -> Tensor:
    """Return <V, H_i V> of every draw and sample `[draws, N]`, V = W R with R of random signs; their mean is kappa."""
    name = f"{layer}.weight"
    if layer not in _layers(ground):
        raise RecipeError(
            f"There is no trained layer {layer!r} with a matrix of weights; {nearest(layer, _layers(ground))}"
        )
    weight = ground.home[name]
    root = _root(weight.flatten(1))
    return torch.stack([_along(ground, name, _direction(ground, root, weight, draw)) for draw in range(draws)])


def _along(ground: Ground, name: str, direction: Tensor) -> Tensor:
    """Return the second derivative of every sample's loss `[N]` where one weight moves and the others stay."""
    place, way = {name: ground.home[name]}, {name: direction}
    functions = [_one_moves(ground, ground.function(batch)) for batch in ground.batches]
    return torch.cat([bend(function, place, way) for function in functions]).double()


def _one_moves(ground: Ground, function: Function) -> Function:
    return lambda own: function({**ground.home, **own})


def _root(rows: Tensor) -> Tensor:
    """Return a matrix A with A A' = W W': W itself where it is tall, else a square one, so that R stays small."""
    if rows.shape[0] >= rows.shape[1]:
        return rows
    values, vectors = torch.linalg.eigh((rows @ rows.T).double())
    root: Tensor = vectors * values.clamp(min=0).sqrt()
    return root.to(rows.dtype)


def _direction(ground: Ground, root: Tensor, weight: Tensor, draw: int) -> Tensor:
    return (root @ _signs(ground, (root.shape[1], weight[0].numel()), draw).to(root.dtype)).view_as(weight)


def _signs(ground: Ground, shape: tuple[int, int], draw: int) -> Tensor:
    maker = ground.generator("relative_flatness", draw)
    return 2 * torch.randint(0, 2, shape, generator=maker, device=ground.device) - 1


def _layers(ground: Ground) -> list[str]:
    """Return the names of the trained layers with a matrix (or filters) of weights."""
    found = [name for name, tensor in ground.home.items() if tensor.ndim > 1]
    return [name.removesuffix(".weight") for name in found if name.endswith(".weight")]
