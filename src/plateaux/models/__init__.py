"""Plug-ins: one model a file, found by name."""

from __future__ import annotations

from plateaux.errors import RecipeError


def channels(shape: tuple[int, ...]) -> int:
    """Return the channels of an image of that shape, or say that the data set has no images."""
    if len(shape) != 3:
        raise RecipeError(
            f"This model takes images (channels, height, width), but the data set's inputs have shape {shape}; "
            "choose a data set of images, or the model 'mlp', which takes any shape"
        )
    return shape[0]
