"""Resize images at the input of a network, batch by batch: a data set stays at its own size in memory and on disk.

    resize_inputs(network, 224, "bicubic")
    network(images)                          # uint8 images of 32 x 32 that were normalized; the network sees 224 x 224

The resizing is part of the network, so whatever calls it passes images of the data set: training, evaluation on
corrupted and out-of-distribution images, predictors, and exported graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core.errors import RecipeError

Interpolation = Literal["bilinear", "bicubic"]


def resize(x: Tensor, size: int, interpolation: Interpolation = "bilinear") -> Tensor:
    """Resize images to `size` x `size` pixels, as Pillow does with floating-point pixels."""
    if x.shape[-1] == x.shape[-2] == size:
        return x
    return F.interpolate(x, (size, size), mode=interpolation, antialias=True, align_corners=False)


def resize_inputs(module: nn.Module, size: int, interpolation: Interpolation) -> None:
    """Make a network resize the images that it is called with."""
    # A hook, because a wrapper would change the names of all weights.
    module.register_forward_pre_hook(partial(_resize_first, size=size, interpolation=interpolation))


def resized_shape(shape: Sequence[int], image_size: int | None) -> tuple[int, ...]:
    """Return the shape of one input after resizing."""
    if image_size is None:
        return tuple(shape)
    if len(shape) != 3:
        raise RecipeError(
            f"model.image_size = {image_size}: the inputs of the data set have shape {list(shape)} and are no images "
            "[C, H, W]. Remove model.image_size."
        )
    return (shape[0], image_size, image_size)


def _resize_first(_: nn.Module, args: tuple[Any, ...], *, size: int, interpolation: Interpolation) -> tuple[Any, ...]:
    return (resize(args[0], size, interpolation), *args[1:])
