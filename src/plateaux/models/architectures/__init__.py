"""Plug-ins: one architecture or family of architectures per file, registered by name. The registry imports all files.

Changes to any network (pruning, adapters) belong in `models`."""

from __future__ import annotations

from plateaux.core.errors import RecipeError


def channels(shape: tuple[int, ...]) -> int:
    """Return the number of channels of images of that shape; raise an error if inputs are not images."""
    if len(shape) != 3:
        raise RecipeError(
            f"The inputs of the data set have shape {shape}. This model needs images (channels, height, width). Use a "
            "data set of images, or the model 'mlp', which takes any shape."
        )
    return shape[0]
