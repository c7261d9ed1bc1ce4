"""Shared image operations of the corruptions: per-image random numbers, smoothing, and interpolation.

Images are float32 `[N, H, W, C]` in [0, 1]; layers are `[N, H, W]`. Every function here and in the corruption modules
processes each image independently, in the same order of operations for any N, so that the batch size changes no bit of
the result. This excludes products of dense matrices: their order of summation depends on the size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import DataError

Array = NDArray[np.float32]
IntArray = NDArray[np.int64]
Generators = Sequence[np.random.Generator]  # one per image
PaddingMode = Literal["mirror", "reflect"]
"""How an image is padded beyond its edge: `c b | a b c` (mirror) or `b a | a b c` (reflect)."""


def generators(seed: int, ids: Sequence[int]) -> list[np.random.Generator]:
    """Return one random generator per image, which depends only on `seed` and the image's id."""
    return [np.random.Generator(np.random.Philox(key=np.array([seed, i], dtype=np.uint64))) for i in ids]


def sample_each(rngs: Generators, draw: Callable[[np.random.Generator], Array]) -> Array:
    """Call `draw` with the generator of each image and stack the results."""
    return np.stack([draw(rng) for rng in rngs])


def normals(rngs: Generators, *shape: int) -> Array:
    """Sample standard normal numbers `[N, *shape]`."""
    return sample_each(rngs, lambda rng: rng.standard_normal(shape, dtype=np.float32))


def uniforms(rngs: Generators, *shape: int) -> Array:
    """Sample uniform numbers in [0, 1), `[N, *shape]`."""
    return sample_each(rngs, lambda rng: rng.random(shape, dtype=np.float32))


def smooth(x: Array, sigma: float, *, mode: str = "nearest", truncate: float = 4.0) -> Array:
    """Smooth images or layers with a Gaussian of `sigma` pixels."""
    result: Array = import_vision("scipy.ndimage").gaussian_filter(x, sigma, axes=(1, 2), mode=mode, truncate=truncate)
    return result


def bilinear(x: Array, rows: Array, columns: Array, *, padding: PaddingMode) -> Array:
    """Sample images `[N, H, W, C]` at fractional positions `[N, H, W]` by bilinear interpolation."""
    n, height, width, channels = x.shape
    start = np.arange(n).reshape(-1, 1, 1) * (height * width)
    top, left = np.floor(rows), np.floor(columns)
    down, right = (rows - top).astype(np.float32), (columns - left).astype(np.float32)
    upper, lower = (start + fold_index(top.astype(np.int64) + i, height, padding) * width for i in (0, 1))
    west, east = (fold_index(left.astype(np.int64) + i, width, padding) for i in (0, 1))
    corners = [row + column for row in (upper, lower) for column in (west, east)]
    out = np.empty_like(x)
    for channel in range(channels):  # one channel at a time: several times as fast as rows of three values
        plane = np.ascontiguousarray(x[..., channel]).reshape(-1)
        a, b, c, d = (plane.take(corner) for corner in corners)
        above, below = a + (b - a) * right, c + (d - c) * right
        out[..., channel] = above + (below - above) * down
    return out


def fold_index(index: IntArray, size: int, padding: PaddingMode) -> IntArray:
    """Map indices into 0 .. size-1 according to the padding mode."""
    last = 2 * size - 1 if padding == "reflect" else 2 * size - 2
    index = index % (last + 1 if padding == "reflect" else last)
    return np.minimum(index, last - index)


def zoom_weights(size: int, zoom: float) -> tuple[IntArray, IntArray, Array]:
    """Return the two source pixels and the weight of the second one, for each of `size` pixels of an enlarged crop.

    The center crop of ceil(size / zoom) pixels is enlarged by `zoom` with aligned corners, and the excess is cropped on
    both sides.
    """
    crop = int(np.ceil(size / zoom))
    enlarged = round(crop * zoom)
    index = np.arange(size) + (enlarged - size) // 2
    position = index * ((crop - 1) / (enlarged - 1))
    low = np.minimum(position.astype(np.int64), crop - 1)
    start = (size - crop) // 2
    return start + low, start + np.minimum(low + 1, crop - 1), (position - low).astype(np.float32)


def import_vision(name: str) -> ModuleType:
    """Import SciPy or Pillow, which only the corruptions need."""
    try:
        return import_module(name)
    except ImportError as error:
        package = {"PIL": "Pillow"}.get(root := name.partition(".")[0], root)
        raise DataError(f"Image corruptions need {package}. Install it: pip install 'plateaux[vision]'") from error
