"""Digital corruptions: brightness, saturation, contrast, elastic transform, pixelation, and JPEG compression.

Every function takes float32 images `[N, H, W, 3]` in [0, 1], one generator per image, and its constants. Results may
be outside [0, 1]; `corrupt.py` clips them once.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.data.corruptions.image_ops import (
    Array,
    Generators,
    bilinear,
    import_vision,
    sample_each,
    smooth,
    uniforms,
)


def brightness(x: Array, rngs: Generators, added: float) -> Array:
    """Add `added` to the value (V of HSV), clipped at 1."""
    value: Array = x.max(-1, keepdims=True)
    raised: Array = np.minimum(value + np.float32(added), 1)
    # Scaling all three channels alike preserves hue and saturation; black has neither and becomes gray.
    return np.where(value > 0, x * (raised / np.where(value > 0, value, 1)), raised)


def saturate(x: Array, rngs: Generators, factor: float, added: float) -> Array:
    """Multiply the saturation (S of HSV) by `factor` and add `added`, clipped to [0, 1]; gray has hue 0 (red)."""
    value: Array = x.max(-1, keepdims=True)
    distance = value - x  # V S times a factor per channel that depends on the hue
    chroma = distance.max(-1, keepdims=True)
    is_gray = chroma == 0
    saturation = np.where(value > 0, chroma / np.where(value > 0, value, 1), 0)
    new_saturation: Array = np.clip(saturation * np.float32(factor) + np.float32(added), 0, 1)
    hue: Array = np.where(is_gray, np.array([0, 1, 1], np.float32), distance / np.where(is_gray, 1, chroma))
    return value - value * new_saturation * hue


def contrast(x: Array, rngs: Generators, factor: float) -> Array:
    """Scale the distance of each value from the mean of its image and channel by `factor`."""
    mean: Array = x.mean((1, 2), keepdims=True, dtype=np.float64).astype(np.float32)
    return (x - mean) * np.float32(factor) + mean


def elastic_transform(x: Array, rngs: Generators, alpha: float, sigma: float, shift: float) -> Array:
    """Apply a random affine map that moves three points by up to `shift`, then a smooth random displacement field.

    All constants are fractions of the image size. The field is uniform noise in [-1, 1], smoothed by a Gaussian of
    `sigma`, times `alpha`.
    """
    height, width = x.shape[1:3]
    side = min(height, width)
    shifts = sample_each(rngs, lambda rng: rng.uniform(-shift * side, shift * side, (3, 2)).astype(np.float32))
    x = bilinear(x, *_affine_grid(height, width, shifts), padding="mirror")
    if alpha == 0:
        return x
    noise = 2 * uniforms(rngs, 2, height, width) - 1
    across, down = (
        smooth(noise[:, i], sigma * side, mode="reflect", truncate=3.0) * np.float32(alpha * side) for i in (0, 1)
    )
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    return bilinear(x, rows + down, columns + across, padding="reflect")


def _affine_grid(height: int, width: int, shifts: Array) -> tuple[Array, Array]:
    """Return the rows and columns `[N, H, W]` to sample at so that three points move by `shifts` `[N, 3, 2]`."""
    center, arm = np.array([width // 2, height // 2]), min(height, width) // 3
    corners = center + arm * np.array([[1, 1], [1, -1], [-1, -1]])
    targets = np.concatenate([corners + shifts.astype(np.float64), np.ones((len(shifts), 3, 1))], axis=2)
    inverse = np.linalg.solve(targets, np.broadcast_to(corners.astype(np.float64), (len(shifts), 3, 2)))  # [N, 3, 2]
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    x, y = (
        inverse[:, 0, i, None, None] * columns + inverse[:, 1, i, None, None] * rows + inverse[:, 2, i, None, None]
        for i in (0, 1)
    )
    return y.astype(np.float32), x.astype(np.float32)


def pixelate(x: Array, rngs: Generators, factor: float) -> Array:
    """Downsample the image by `factor` and upsample it again, both with a box filter."""
    image = import_vision("PIL.Image")
    height, width = x.shape[1:3]
    small, box = (int(width * factor), int(height * factor)), image.Resampling.BOX

    def resample(pixels: Any) -> Any:
        return np.asarray(image.fromarray(pixels).resize(small, box).resize((width, height), box))

    return np.stack([resample(pixels) for pixels in to_uint8(x)]).astype(np.float32) / np.float32(255)


def jpeg_compression(x: Array, rngs: Generators, quality: float) -> Array:
    """Encode and decode the image as JPEG of this quality."""
    image = import_vision("PIL.Image")

    def compress(pixels: Any) -> Any:
        buffer = BytesIO()
        image.fromarray(pixels).save(buffer, "JPEG", quality=int(quality))
        return np.asarray(image.open(buffer))

    return np.stack([compress(pixels) for pixels in to_uint8(x)]).astype(np.float32) / np.float32(255)


def to_uint8(x: Array) -> NDArray[np.uint8]:
    """Convert values to uint8: clip to [0, 1], scale by 255, and round."""
    pixels: NDArray[np.uint8] = np.rint(np.clip(x, 0, 1) * np.float32(255)).astype(np.uint8)
    return pixels
