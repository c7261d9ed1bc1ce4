"""Blurs of images: Gaussian, frosted glass, out of focus, motion, zoom."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from plateaux.data.corruptions.image_ops import Array, Generators, Whole, import_scipy, smooth, stretch, uniforms


def gaussian_blur(x: Array, rngs: Generators, sigma: float) -> Array:
    """A Gaussian of `sigma` pixels."""
    return smooth(x, sigma)


def glass_blur(x: Array, rngs: Generators, sigma: float, reach: float, rounds: float) -> Array:
    """Neighbours up to `reach` away laid over pixels, as behind frosted glass, between two Gaussian blurs."""
    n, height, width, channels = x.shape
    far = int(reach)
    rows, columns = np.arange(height - far, far, -1), np.arange(width - far, far, -1)
    here = np.tile((rows[:, None] * width + columns).reshape(-1), int(rounds))
    # The upper bound is left out, as in the published scripts: for a reach of 1, partners lie above and to the left.
    moves = np.stack([rng.integers(-far, far, size=(2, len(here))) for rng in rngs], axis=-1)  # [2, steps, N]
    order = copied(height * width, here, here[:, None] + moves[0] * width + moves[1])
    pixels = smooth(x, sigma).reshape(n * height * width, channels)
    mixed = pixels.take(order.T + np.arange(n)[:, None] * (height * width), axis=0)
    return smooth(mixed.reshape(x.shape), sigma)


def copied(count: int, here: Whole, there: Whole) -> Whole:
    """Return `[count, N]`, for each image the numbers 0 .. count-1 after places were copied onto others in turn.

    Step k copies the place `there[k, i]` onto `here[k]` in image i. The published scripts mean to exchange the two, but
    swap views of one array, which copies; the published files were made so.
    """
    n = there.shape[1]
    order = np.repeat(np.arange(count)[:, None], n, axis=1)
    places = order.reshape(-1)
    for row, partners in zip(here.tolist(), there * n + np.arange(n), strict=True):
        order[row] = places.take(partners)
    return order


def defocus_blur(x: Array, rngs: Generators, radius: float, alias: float) -> Array:
    """A disk of `radius` pixels with soft edges, as a lens out of focus draws a point."""
    found: Array = import_scipy("scipy.ndimage").correlate(x, disk(radius, alias)[None, :, :, None], mode="mirror")
    return found


def disk(radius: float, alias: float) -> Array:
    """Return a disk of sum 1, itself smoothed by a Gaussian of `alias` over 3 x 3 pixels (5 x 5 beyond a radius of 8).

    >>> disk(0.3, 1e-3).tolist()  # less than a pixel: nothing but its soft edge is left
    [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    soft = 1 if radius <= 8 else 2
    half = int(radius) + soft
    line = np.arange(-half, half + 1)
    inside = (line[:, None] ** 2 + line**2 <= radius**2).astype(np.float64)
    near = np.exp(-(np.arange(-soft, soft + 1) ** 2) / (2 * alias**2))
    ndimage = import_scipy("scipy.ndimage")
    for axis in (0, 1):
        inside = ndimage.correlate1d(inside, near / near.sum(), axis=axis, mode="constant")
    found: Array = (inside / inside.sum()).astype(np.float32)
    return found


def motion_blur(x: Array, rngs: Generators, radius: float, sigma: float) -> Array:
    """A trail of each pixel along a line within 45 degrees of the horizontal."""
    return trail(x, 90 * uniforms(rngs, 1)[:, 0] - 45, radius, sigma)


def trail(x: Array, degrees: Array, radius: float, sigma: float) -> Array:
    """Return images `[N, H, W, C]` smeared to one side along their own angle, by half a Gaussian.

    The Gaussian is cut after 2 radius + 1 pixels. Each step takes the nearest pixel; an edge goes on as it ends.
    """
    steps = np.arange(2 * ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    steps = steps[weights > 1e-5]
    weights = (weights[: len(steps)] / weights[: len(steps)].sum()).astype(np.float32)
    margin = len(steps)
    wide = np.pad(x, ((0, 0), (margin, margin), (margin, margin), (0, 0)), mode="edge")
    windows = sliding_window_view(wide, x.shape[1:3], axis=(1, 2))  # [N, top, left, C, H, W], without a copy
    turn = np.deg2rad(degrees.astype(np.float64))
    out = np.zeros_like(x.transpose(0, 3, 1, 2))
    for step, weight in zip(steps.tolist(), weights, strict=True):
        down, right = (np.rint(step * along(turn)).astype(np.int64) + margin for along in (np.sin, np.cos))
        out += weight * windows[np.arange(len(x)), down, right]
    return np.ascontiguousarray(out.transpose(0, 2, 3, 1))


def zoom_blur(x: Array, rngs: Generators, most: float, step: float) -> Array:
    """The mean of the image and its enlargements from 1 to `most`."""
    n, height, width, channels = x.shape
    pixels = x.reshape(n, height * width, channels).transpose(1, 0, 2).reshape(height * width, n * channels)
    # A sparse product sums each row in the order of its entries, whatever the number of columns.
    mixed: Array = _enlargements(height, width, most, step) @ np.ascontiguousarray(pixels)
    return mixed.reshape(height * width, n, channels).transpose(1, 0, 2).reshape(x.shape)


@lru_cache(maxsize=8)
def _enlargements(height: int, width: int, most: float, step: float) -> Any:
    """Return the sparse matrix `[H W, H W]` that averages all enlargements: one product instead of dozens of them."""
    sparse = import_scipy("scipy.sparse")
    zooms = np.arange(1, most, step)
    total = sparse.identity(height * width, dtype=np.float64, format="csr")
    for zoom in zooms.tolist():
        total = total + sparse.kron(_line(height, zoom), _line(width, zoom), format="csr")
    return (total / (len(zooms) + 1)).astype(np.float32).tocsr()


def _line(size: int, zoom: float) -> Any:
    low, high, share = stretch(size, zoom)
    rows = np.arange(size)
    entries = np.concatenate([1 - share, share]), (np.concatenate([rows, rows]), np.concatenate([low, high]))
    return import_scipy("scipy.sparse").csr_matrix(entries, shape=(size, size), dtype=np.float64)
