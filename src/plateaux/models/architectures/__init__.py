"""Plug-ins: one architecture or family of architectures per file, found by name. The registry imports every file here.

Changes to any network (pruning, adapters) belong in `models`."""

from __future__ import annotations

from plateaux.core.errors import RecipeError


def channels(shape: tuple[int, ...]) -> int:
    """Return the channels of an image of that shape, or say that the data set has no images."""
    if len(shape) != 3:
        raise RecipeError(
            f"This model takes images (channels, height, width), but the data set's inputs have shape {shape}; "
            "choose a data set of images, or the model 'mlp', which takes any shape"
        )
    return shape[0]
