"""Noise, colour, geometry and compression: the distortions of images that are neither blurs nor weather.

Every function takes images, float32 `[N, H, W, 3]` in [0, 1], a generator for each image, and its constants; what it
returns may lie outside [0, 1] and is clipped once, at the door (`corrupt.py`).
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.data.corruptions.image_ops import Array, Generators, bilinear, import_scipy, sample_each, smooth, uniforms


def brightness(x: Array, rngs: Generators, added: float) -> Array:
    """The V of HSV raised by `added`, at most to 1."""
    value: Array = x.max(-1, keepdims=True)
    raised: Array = np.minimum(value + np.float32(added), 1)
    # Hue and saturation stay when all three values are scaled alike; black has neither and becomes grey.
    return np.where(value > 0, x * (raised / np.where(value > 0, value, 1)), raised)


def saturate(x: Array, rngs: Generators, factor: float, added: float) -> Array:
    """The S of HSV times `factor` plus `added`, within [0, 1]; grey counts as red, as everywhere in HSV."""
    value: Array = x.max(-1, keepdims=True)
    away = value - x  # V S times what the hue makes of each value
    widest = away.max(-1, keepdims=True)
    grey = widest == 0
    saturation = np.where(value > 0, widest / np.where(value > 0, value, 1), 0)
    new: Array = np.clip(saturation * np.float32(factor) + np.float32(added), 0, 1)
    hue: Array = np.where(grey, np.array([0, 1, 1], np.float32), away / np.where(grey, 1, widest))
    return value - value * new * hue


def contrast(x: Array, rngs: Generators, factor: float) -> Array:
    """The distance of every value from the mean of its image and channel times `factor`."""
    mean: Array = x.mean((1, 2), keepdims=True, dtype=np.float64).astype(np.float32)
    return (x - mean) * np.float32(factor) + mean


def elastic_transform(x: Array, rngs: Generators, pull: float, sigma: float, shift: float) -> Array:
    """Three points moved by up to `shift`, and the image with them, then a smooth field of shifts.

    All are parts of the image's size. The field is uniform noise in [-1, 1] under a Gaussian of `sigma`, times `pull`.
    """
    height, width = x.shape[1:3]
    side = min(height, width)
    moved = sample_each(rngs, lambda rng: rng.uniform(-shift * side, shift * side, (3, 2)).astype(np.float32))
    x = bilinear(x, *_affine(height, width, moved), edge="mirror")
    if pull == 0:
        return x
    noise = 2 * uniforms(rngs, 2, height, width) - 1
    across, down = (
        smooth(noise[:, i], sigma * side, mode="reflect", truncate=3.0) * np.float32(pull * side) for i in (0, 1)
    )
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    return bilinear(x, rows + down, columns + across, edge="reflect")


def _affine(height: int, width: int, moved: Array) -> tuple[Array, Array]:
    """Return rows and columns `[N, H, W]` to read at, so that three points of the image move by `moved` `[N, 3, 2]`."""
    middle, arm = np.array([width // 2, height // 2]), min(height, width) // 3
    corners = middle + arm * np.array([[1, 1], [1, -1], [-1, -1]])
    targets = np.concatenate([corners + moved.astype(np.float64), np.ones((len(moved), 3, 1))], axis=2)
    back = np.linalg.solve(targets, np.broadcast_to(corners.astype(np.float64), (len(moved), 3, 2)))  # [N, 3, 2]
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    x, y = (
        back[:, 0, i, None, None] * columns + back[:, 1, i, None, None] * rows + back[:, 2, i, None, None]
        for i in (0, 1)
    )
    return y.astype(np.float32), x.astype(np.float32)


def pixelate(x: Array, rngs: Generators, factor: float) -> Array:
    """The image at `factor` of its size and back, each pixel a mean over the box it covers."""
    image = import_scipy("PIL.Image")
    height, width = x.shape[1:3]
    small, box = (int(width * factor), int(height * factor)), image.Resampling.BOX

    def coarse(pixels: Any) -> Any:
        return np.asarray(image.fromarray(pixels).resize(small, box).resize((width, height), box))

    return np.stack([coarse(pixels) for pixels in to_bytes(x)]).astype(np.float32) / np.float32(255)


def jpeg_compression(x: Array, rngs: Generators, quality: float) -> Array:
    """The image through JPEG of this quality."""
    image = import_scipy("PIL.Image")

    def compressed(pixels: Any) -> Any:
        held = BytesIO()
        image.fromarray(pixels).save(held, "JPEG", quality=int(quality))
        return np.asarray(image.open(held))

    return np.stack([compressed(pixels) for pixels in to_bytes(x)]).astype(np.float32) / np.float32(255)


def to_bytes(x: Array) -> NDArray[np.uint8]:
    """Return values in [0, 1] as bytes, clipped and rounded to the nearest."""
    found: NDArray[np.uint8] = np.rint(np.clip(x, 0, 1) * np.float32(255)).astype(np.uint8)
    return found
