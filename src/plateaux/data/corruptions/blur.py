"""Blur corruptions: Gaussian, glass, defocus, motion, zoom."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from plateaux.data.corruptions.image_ops import (
    Array,
    Generators,
    IntArray,
    import_vision,
    smooth,
    uniforms,
    zoom_weights,
)


def gaussian_blur(x: Array, rngs: Generators, sigma: float) -> Array:
    """Apply a Gaussian blur of `sigma` pixels."""
    return smooth(x, sigma)


def glass_blur(x: Array, rngs: Generators, sigma: float, max_shift: float, iterations: float) -> Array:
    """Replace pixels by random neighbors up to `max_shift` away, like frosted glass, between two Gaussian blurs."""
    n, height, width, channels = x.shape
    shift = int(max_shift)
    rows, columns = np.arange(height - shift, shift, -1), np.arange(width - shift, shift, -1)
    targets = np.tile((rows[:, None] * width + columns).reshape(-1), int(iterations))
    # The upper bound is exclusive, as in the published scripts: for a shift of 1, sources lie above and to the left.
    shifts = np.stack([rng.integers(-shift, shift, size=(2, len(targets))) for rng in rngs], axis=-1)  # [2, steps, N]
    order = copy_in_order(height * width, targets, targets[:, None] + shifts[0] * width + shifts[1])
    pixels = smooth(x, sigma).reshape(n * height * width, channels)
    shuffled = pixels.take(order.T + np.arange(n)[:, None] * (height * width), axis=0)
    return smooth(shuffled.reshape(x.shape), sigma)


def copy_in_order(count: int, targets: IntArray, sources: IntArray) -> IntArray:
    """Return for each image the pixel indices 0 .. count-1 after sequential copies: `[count, N]`.

    Step k copies pixel `sources[k, i]` to pixel `targets[k]` in image i. The published scripts intend to swap the two,
    but they swap views of one array, which copies; the published files were generated this way.
    """
    n = sources.shape[1]
    order = np.repeat(np.arange(count)[:, None], n, axis=1)
    flat = order.reshape(-1)
    for row, source_row in zip(targets.tolist(), sources * n + np.arange(n), strict=True):
        order[row] = flat.take(source_row)
    return order


def defocus_blur(x: Array, rngs: Generators, radius: float, alias: float) -> Array:
    """Convolve with a disk of `radius` pixels with soft edges, like an out-of-focus lens."""
    blurred: Array = import_vision("scipy.ndimage").correlate(x, disk(radius, alias)[None, :, :, None], mode="mirror")
    return blurred


def disk(radius: float, alias: float) -> Array:
    """Return a disk kernel with sum 1, smoothed by a Gaussian of `alias` over 3 x 3 pixels (5 x 5 if radius > 8).

    >>> disk(0.3, 1e-3).tolist()  # less than a pixel: only the center is left
    [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    soft = 1 if radius <= 8 else 2
    half = int(radius) + soft
    line = np.arange(-half, half + 1)
    kernel = (line[:, None] ** 2 + line**2 <= radius**2).astype(np.float64)
    gaussian = np.exp(-(np.arange(-soft, soft + 1) ** 2) / (2 * alias**2))
    ndimage = import_vision("scipy.ndimage")
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, gaussian / gaussian.sum(), axis=axis, mode="constant")
    normalized: Array = (kernel / kernel.sum()).astype(np.float32)
    return normalized


def motion_blur(x: Array, rngs: Generators, radius: float, sigma: float) -> Array:
    """Blur along a random direction within 45 degrees of the horizontal."""
    return blur_along(x, 90 * uniforms(rngs, 1)[:, 0] - 45, radius, sigma)


def blur_along(x: Array, degrees: Array, radius: float, sigma: float) -> Array:
    """Blur images `[N, H, W, C]` along one angle per image with a one-sided Gaussian kernel.

    The kernel is truncated after 2 radius + 1 pixels. Each step takes the nearest pixel; edge pixels are replicated.
    """
    steps = np.arange(2 * ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    steps = steps[weights > 1e-5]
    weights = (weights[: len(steps)] / weights[: len(steps)].sum()).astype(np.float32)
    margin = len(steps)
    padded = np.pad(x, ((0, 0), (margin, margin), (margin, margin), (0, 0)), mode="edge")
    windows = sliding_window_view(padded, x.shape[1:3], axis=(1, 2))  # [N, top, left, C, H, W], without a copy
    angle = np.deg2rad(degrees.astype(np.float64))
    out = np.zeros_like(x.transpose(0, 3, 1, 2))
    for step, weight in zip(steps.tolist(), weights, strict=True):
        down, right = (np.rint(step * project(angle)).astype(np.int64) + margin for project in (np.sin, np.cos))
        out += weight * windows[np.arange(len(x)), down, right]
    return np.ascontiguousarray(out.transpose(0, 2, 3, 1))


def zoom_blur(x: Array, rngs: Generators, max_zoom: float, step: float) -> Array:
    """Average the image and its enlargements by factors from 1 to `max_zoom`."""
    n, height, width, channels = x.shape
    pixels = x.reshape(n, height * width, channels).transpose(1, 0, 2).reshape(height * width, n * channels)
    # A sparse product sums each row in the order of its entries, for any number of columns.
    averaged: Array = _mean_zoom_matrix(height, width, max_zoom, step) @ np.ascontiguousarray(pixels)
    return averaged.reshape(height * width, n, channels).transpose(1, 0, 2).reshape(x.shape)


@lru_cache(maxsize=8)
def _mean_zoom_matrix(height: int, width: int, max_zoom: float, step: float) -> Any:
    """Return the sparse matrix `[H W, H W]` that averages all enlargements: one product instead of one per zoom."""
    sparse = import_vision("scipy.sparse")
    zooms = np.arange(1, max_zoom, step)
    total = sparse.identity(height * width, dtype=np.float64, format="csr")
    for zoom in zooms.tolist():
        total = total + sparse.kron(_zoom_matrix(height, zoom), _zoom_matrix(width, zoom), format="csr")
    return (total / (len(zooms) + 1)).astype(np.float32).tocsr()


def _zoom_matrix(size: int, zoom: float) -> Any:
    low, high, weight = zoom_weights(size, zoom)
    rows = np.arange(size)
    entries = np.concatenate([1 - weight, weight]), (np.concatenate([rows, rows]), np.concatenate([low, high]))
    return import_vision("scipy.sparse").csr_matrix(entries, shape=(size, size), dtype=np.float64)
