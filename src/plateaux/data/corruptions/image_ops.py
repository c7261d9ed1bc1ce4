"""What the image distortions share: arrays of images, draws that belong to one image each, reading between pixels.

Images are float32 `[N, H, W, C]` in [0, 1]; layers are `[N, H, W]`. Every function here and in the files of the
distortions works on each image alone, in the same order of operations whatever N is: how images are cut into batches
changes no bit of them. That is why nothing here multiplies dense matrices: their order of summation hangs on the size.
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
Whole = NDArray[np.int64]
Generators = Sequence[np.random.Generator]  # one an image
Edge = Literal["mirror", "reflect"]
"""How an image goes on beyond its edge: `c b | a b c` (mirror) or `b a | a b c` (reflect)."""


def generators(first: int, ids: Sequence[int]) -> list[np.random.Generator]:
    """Return a generator for each image, which depends on `first` and on its id only."""
    return [np.random.Generator(np.random.Philox(key=np.array([first, i], dtype=np.uint64))) for i in ids]


def sample_each(rngs: Generators, draw: Callable[[np.random.Generator], Array]) -> Array:
    """Return what `draw` makes of each image's generator, side by side."""
    return np.stack([draw(rng) for rng in rngs])


def normals(rngs: Generators, *shape: int) -> Array:
    """Return standard normal numbers `[N, *shape]`."""
    return sample_each(rngs, lambda rng: rng.standard_normal(shape, dtype=np.float32))


def uniforms(rngs: Generators, *shape: int) -> Array:
    """Return numbers in [0, 1), `[N, *shape]`."""
    return sample_each(rngs, lambda rng: rng.random(shape, dtype=np.float32))


def smooth(x: Array, sigma: float, *, mode: str = "nearest", truncate: float = 4.0) -> Array:
    """Return images or layers under a Gaussian of `sigma` pixels."""
    found: Array = import_scipy("scipy.ndimage").gaussian_filter(x, sigma, axes=(1, 2), mode=mode, truncate=truncate)
    return found


def bilinear(x: Array, rows: Array, columns: Array, *, edge: Edge) -> Array:
    """Return images `[N, H, W, C]` read at fractional places `[N, H, W]`, by bilinear interpolation."""
    n, height, width, channels = x.shape
    start = np.arange(n).reshape(-1, 1, 1) * (height * width)
    top, left = np.floor(rows), np.floor(columns)
    down, right = (rows - top).astype(np.float32), (columns - left).astype(np.float32)
    upper, lower = (start + fold_index(top.astype(np.int64) + i, height, edge) * width for i in (0, 1))
    west, east = (fold_index(left.astype(np.int64) + i, width, edge) for i in (0, 1))
    corners = [row + column for row in (upper, lower) for column in (west, east)]
    out = np.empty_like(x)
    for channel in range(channels):  # a channel at a time: long rows are several times as fast as rows of three
        plane = np.ascontiguousarray(x[..., channel]).reshape(-1)
        a, b, c, d = (plane.take(corner) for corner in corners)
        above, below = a + (b - a) * right, c + (d - c) * right
        out[..., channel] = above + (below - above) * down
    return out


def fold_index(index: Whole, size: int, edge: Edge) -> Whole:
    """Return indices brought back into 0 .. size-1 as the edge says."""
    last = 2 * size - 1 if edge == "reflect" else 2 * size - 2
    index = index % (last + 1 if edge == "reflect" else last)
    return np.minimum(index, last - index)


def stretch(size: int, zoom: float) -> tuple[Whole, Whole, Array]:
    """Return for each of `size` places of a middle crop, enlarged by `zoom`, its two neighbours and the second's share.

    The crop has ceil(size / zoom) pixels, its corners stay corners, and what is left over is cut on both sides.
    """
    crop = int(np.ceil(size / zoom))
    large = round(crop * zoom)
    places = np.arange(size) + (large - size) // 2
    at = places * ((crop - 1) / (large - 1))
    low = np.minimum(at.astype(np.int64), crop - 1)
    start = (size - crop) // 2
    return start + low, start + np.minimum(low + 1, crop - 1), (at - low).astype(np.float32)


def import_scipy(name: str) -> ModuleType:
    """Import a library that only distortions need."""
    try:
        return import_module(name)
    except ImportError as error:
        package = {"PIL": "Pillow"}.get(root := name.partition(".")[0], root)
        raise DataError(f"Image corruptions need {package}; install it with: pip install 'plateaux[vision]'") from error
