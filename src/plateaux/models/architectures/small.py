"""Small networks: an MLP for inputs of any shape, and a simple CNN."""

from __future__ import annotations

from math import prod
from typing import Literal

from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.ranges import MAX_DEPTH, Size
from plateaux.core.registry import model
from plateaux.models.architectures import channels as image_channels

Activation = Literal["relu", "gelu", "tanh"]
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


@model
def mlp(
    *, shape: tuple[int, ...], classes: int, hidden_sizes: tuple[Size, ...] = (64, 64), activation: Activation = "relu"
) -> nn.Module:
    """A multilayer perceptron on the flattened input.

    >>> mlp(shape=(2,), classes=3, hidden=(8,))[1]
    Linear(in_features=2, out_features=8, bias=True)
    """
    if len(hidden_sizes) > MAX_DEPTH:
        raise RecipeError(f"hidden_sizes lists {len(hidden_sizes):,} layers. Expected: at most {MAX_DEPTH:,}")
    layers: list[nn.Module] = [nn.Flatten()]
    width = prod(shape)
    for size in hidden_sizes:
        layers += [nn.Linear(width, size), ACTIVATIONS[activation]()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, classes))


@model
def cnn(
    *,
    shape: tuple[int, ...],
    classes: int,
    channels: tuple[Size, ...] = (16, 32, 64),
    norm: Literal["none", "batch"] = "none",
) -> nn.Module:
    """A simple CNN: stages of 3x3 convolution and max-pooling, global average pooling, and a linear head."""
    stages: list[nn.Module] = []
    width = image_channels(shape)
    for size in channels:
        stages.append(_stage(width, size, norm))
        width = size
    return nn.Sequential(*stages, SpatialMean(), nn.Linear(width, classes))


class SpatialMean(nn.Module):
    """Global average pooling."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _stage(width: int, size: int, norm: str) -> nn.Module:
    conv = nn.Conv2d(width, size, 3, padding=1, bias=norm == "none")
    norms = [nn.BatchNorm2d(size)] if norm == "batch" else []
    # ceil_mode keeps the last row of odd sizes, and supports images that are too small for all stages.
    return nn.Sequential(conv, *norms, nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True))
