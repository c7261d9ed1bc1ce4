"""Weather corruptions: snow, frost, fog, and spatter (drops of water or mud on the lens)."""

from __future__ import annotations

from functools import lru_cache
from math import cos, pi, sin
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.data.corruptions.blur import blur_along
from plateaux.data.corruptions.image_ops import (
    Array,
    Generators,
    IntArray,
    import_vision,
    normals,
    sample_each,
    smooth,
    uniforms,
    zoom_weights,
)

Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

LUMA = np.array([0.299, 0.587, 0.114], np.float32)
WATER = np.array([175, 238, 238], np.float32) / np.float32(255)
MUD = np.array([63, 42, 20], np.float32) / np.float32(255)
MAX_DEPTH_PX = 20  # the distance from the outline at which a drop reaches its full depth
EMBOSS = np.array([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])  # filter: light from one side on slopes
TAN_22_5 = 0.41421356  # below it, a direction is nearer to an axis than to a diagonal


def snow(
    x: Array,
    rngs: Generators,
    mean: float,
    std: float,
    zoom: float,
    threshold: float,
    radius: float,
    sigma: float,
    opacity: float,
) -> Array:
    """Add snowflakes that fall within 45 degrees of the vertical to a whitened image with weight `opacity`.

    Flakes are Gaussian noise, enlarged by `zoom`, set to 0 below `threshold`, and motion-blurred.
    """
    flakes = enlarge(mean + std * normals(rngs, *x.shape[1:3]), zoom)
    flakes = np.clip(np.where(flakes < threshold, 0, flakes), 0, 1).astype(np.float32)[..., None]
    flakes = blur_along(flakes, 90 * uniforms(rngs, 1)[:, 0] - 135, radius, sigma)
    gray = (x[..., 0] * LUMA[0] + x[..., 1] * LUMA[1] + x[..., 2] * LUMA[2])[..., None]
    bright = np.maximum(x, gray * np.float32(1.5) + np.float32(0.5))
    whitened: Array = np.float32(opacity) * x + np.float32(1 - opacity) * bright
    return whitened + flakes + flakes[:, ::-1, ::-1]


def enlarge(layers: Array, zoom: float) -> Array:
    """Enlarge the center of layers `[N, H, W]` to their full size by bilinear interpolation."""
    low, high, weight = zoom_weights(layers.shape[1], zoom)
    layers = layers[:, low] * (1 - weight)[:, None] + layers[:, high] * weight[:, None]
    low, high, weight = zoom_weights(layers.shape[2], zoom)
    return layers[:, :, low] * (1 - weight) + layers[:, :, high] * weight


def frost(x: Array, rngs: Generators, opacity: float, ice: float, scale: float) -> Array:
    """Add a random crop of a frost texture, times `ice`, to the image, times `opacity`."""
    height, width = x.shape[1:3]
    textures = frost_textures(max(scale, max(height, width) / SIDE))
    side = textures.shape[1]

    def crop(rng: np.random.Generator) -> Array:
        texture, top, left = rng.integers((len(textures), side - height + 1, side - width + 1)).tolist()
        return textures[texture, top : top + height, left : left + width]

    return np.float32(opacity) * x + np.float32(ice) * sample_each(rngs, crop)


def fog(x: Array, rngs: Generators, amount: float, decay: float) -> Array:
    """Add plasma noise times `amount`, then rescale so that the brightest value is preserved."""
    height, width = x.shape[1:3]
    clouds = plasma(rngs, max(height, width), decay)[:, :height, :width, None]
    brightest: Array = x.max((1, 2, 3), keepdims=True)
    return (x + np.float32(amount) * clouds) * (brightest / (brightest + np.float32(amount)))


def plasma(rngs: Generators, size: int, decay: float) -> Array:
    """Return plasma noise `[N, S, S]` in [0, 1] by the diamond-square algorithm on a torus.

    S is the smallest power of two that is at least `size`. The noise of each level is uniform within plus or minus the
    square of an amplitude, which is divided by `decay` from level to level.
    """
    side = 1 << max(size - 1, 1).bit_length()
    noise = 2 * uniforms(rngs, side, side) - 1
    field: Array = np.zeros_like(noise)
    step, amplitude = side, 100.0
    while step >= 2:
        half, scale = step // 2, np.float32(amplitude**2)
        corners = field[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, 1)
        centers = (pairs + np.roll(pairs, -1, 2)) / 4 + scale * noise[:, half::step, half::step]
        field[:, half::step, half::step] = centers
        across = centers + np.roll(centers, 1, 1) + corners + np.roll(corners, -1, 2)
        field[:, ::step, half::step] = across / 4 + scale * noise[:, ::step, half::step]
        down = centers + np.roll(centers, 1, 2) + corners + np.roll(corners, -1, 1)
        field[:, half::step, ::step] = down / 4 + scale * noise[:, half::step, ::step]
        step, amplitude = half, amplitude / decay
    field -= field.min((1, 2), keepdims=True)
    highest: Array = field.max((1, 2), keepdims=True)
    return field / highest


def spatter(
    x: Array, rngs: Generators, mean: float, std: float, sigma: float, threshold: float, strength: float, mud: float
) -> Array:
    """Add drops where smoothed Gaussian noise exceeds `threshold`: of water, or of mud if `mud` is 1."""
    liquid = smooth(mean + np.float32(std) * normals(rngs, *x.shape[1:3]), sigma)
    liquid = np.where(liquid < threshold, 0, liquid)
    if not mud:
        return x + np.float32(strength) * glints(liquid)[..., None] * WATER
    covered = smooth((liquid > threshold).astype(np.float32), strength)
    covered = np.where(covered < 0.8, 0, covered)[..., None]
    return x * (1 - covered) + covered * MUD


def glints(liquid: Array) -> Array:
    """Return highlights of drops `[N, H, W]`, at most 1: lit from one side; depth is the distance to the outline."""
    ndimage = import_vision("scipy.ndimage")
    levels = np.floor(np.clip(liquid, 0, 1) * 255)
    distance = np.stack([_distance(layer) for layer in outlines(levels)])
    depth = equalize(ndimage.uniform_filter(distance, (1, 3, 3), mode="mirror").astype(np.int64))
    lit = np.clip(ndimage.correlate(depth, EMBOSS[None], mode="mirror"), 0, 255)
    intensity = levels * np.rint(ndimage.uniform_filter(lit, (1, 3, 3), mode="mirror"))
    brightest = intensity.max((1, 2), keepdims=True)
    highlights: Array = (intensity / np.where(brightest > 0, brightest, 1)).astype(np.float32)
    return highlights


def _distance(outline: BoolArray) -> Float64Array:
    """Return the distance of every pixel of a layer from an outline, at most MAX_DEPTH_PX."""
    if not outline.any():
        return np.full(outline.shape, float(MAX_DEPTH_PX))
    distance: Float64Array = np.minimum(import_vision("scipy.ndimage").distance_transform_edt(~outline), MAX_DEPTH_PX)
    return distance


def equalize(depths: IntArray) -> Float64Array:
    """Equalize the histogram of depths `[N, H, W]` in 0 .. MAX_DEPTH_PX, per layer, to levels 0 .. 255."""
    counts = np.stack([(depths == depth).sum((1, 2)) for depth in range(MAX_DEPTH_PX + 1)], axis=1)
    lowest = np.take_along_axis(counts, (counts > 0).argmax(1)[:, None], axis=1)
    others = depths[0].size - lowest
    levels = np.rint((counts.cumsum(1) - lowest) * 255 / np.maximum(others, 1))
    levels = np.where(others > 0, levels, np.arange(MAX_DEPTH_PX + 1))  # a layer of constant depth is unchanged
    return np.take_along_axis(levels, depths.reshape(len(depths), -1), axis=1).reshape(depths.shape)


def outlines(levels: Float64Array, *, weak: float = 50, strong: float = 150) -> BoolArray:
    """Return the edges of layers `[N, H, W]` of gray levels by the Canny algorithm.

    Edges are ridges of the Sobel gradient |dx| + |dy| above `weak` that are connected to a pixel above `strong`.
    """
    ndimage = import_vision("scipy.ndimage")
    down, across = (_sobel(levels, axis) for axis in (1, 2))
    gradient = np.abs(down) + np.abs(across)
    ridge = _suppress_non_maxima(gradient, down, across) & (gradient > weak)
    neighborhood = np.zeros((3, 3, 3), dtype=bool)
    neighborhood[1] = True  # connect pixels only within one layer
    components, count = ndimage.label(ridge, neighborhood)
    is_edge = np.zeros(count + 1, dtype=bool)
    is_edge[components[ridge & (gradient > strong)]] = True
    is_edge[0] = False
    edges: BoolArray = is_edge[components]
    return edges


def _sobel(levels: Float64Array, axis: int) -> Float64Array:
    ndimage = import_vision("scipy.ndimage")
    difference = ndimage.correlate1d(levels, [-1, 0, 1], axis=axis, mode="nearest")
    derivative: Float64Array = ndimage.correlate1d(difference, [1, 2, 1], axis=3 - axis, mode="nearest")
    return derivative


def _suppress_non_maxima(gradient: Float64Array, down: Float64Array, across: Float64Array) -> BoolArray:
    """Return the local maxima of the gradient along its direction, rounded to one of four neighbor directions."""
    padded = np.pad(gradient, ((0, 0), (1, 1), (1, 1)))
    height, width = gradient.shape[1:]

    def at(y: int, x: int) -> Float64Array:
        return padded[:, 1 + y : 1 + y + height, 1 + x : 1 + x + width]

    horizontal, vertical = np.abs(down) < TAN_22_5 * np.abs(across), np.abs(across) < TAN_22_5 * np.abs(down)
    # Of two equal neighbors the first is the edge, so that an edge is one pixel wide.
    along_row = (gradient > at(0, -1)) & (gradient >= at(0, 1))
    along_column = (gradient > at(-1, 0)) & (gradient >= at(1, 0))
    falling = (gradient > at(-1, -1)) & (gradient > at(1, 1))
    rising = (gradient > at(-1, 1)) & (gradient > at(1, -1))
    along_axis, along_diagonal = (
        np.where(horizontal, along_row, along_column),
        np.where(down * across > 0, falling, rising),
    )
    return np.where(horizontal | vertical, along_axis, along_diagonal)


TEXTURES = 5
SIDE = 700  # pixels of a texture at scale 1
SHEETS, FERNS = 8, 5  # ferns on one sheet occlude each other; sheets are added
STEP = 16.0  # pixels between branches
SHADOW, LIGHT = np.array([[0.14, 0.21, 0.30], [0.92, 0.96, 0.99]], np.float32)  # RGB of the darkest and brightest ice


@lru_cache(maxsize=4)
def frost_textures(scale: float) -> Array:
    """Return the frost textures `[TEXTURES, S, S, 3]` in [0, 1], S = scale times SIDE; deterministic."""
    image = import_vision("PIL.Image")
    side = round(SIDE * scale)
    textures = []
    for seed in range(TEXTURES):
        rng = np.random.Generator(np.random.Philox(key=seed))
        ice = np.clip(0.6 * _haze(rng) ** 2 + 0.8 * _ferns(rng), 0, 1)
        resized = image.fromarray(ice).resize((side, side), image.Resampling.BOX)
        textures.append(np.asarray(resized)[..., None] * (LIGHT - SHADOW) + SHADOW)
    return np.stack(textures).astype(np.float32)


def _haze(rng: np.random.Generator) -> Array:
    """Return smooth noise of four octaves in [0, 1]."""
    image = import_vision("PIL.Image")
    total = np.zeros((SIDE, SIDE), np.float32)
    for octave in range(4):
        coarse = image.fromarray(rng.random((4 * 2**octave,) * 2, dtype=np.float32))
        total += 2.0**-octave * np.asarray(coarse.resize((SIDE, SIDE), image.Resampling.BICUBIC))
    low, high = total.min(), total.max()
    haze: Array = (total - low) / (high - low)
    return haze


def _ferns(rng: np.random.Generator) -> Array:
    """Draw overlapping ferns of ice; 0 is background."""
    image, draw = import_vision("PIL.Image"), import_vision("PIL.ImageDraw")
    total = np.zeros((SIDE, SIDE), np.float32)
    for _ in range(SHEETS):
        sheet = image.new("L", (SIDE, SIDE))
        for _ in range(FERNS):
            _fern(draw.Draw(sheet), rng)
        total += np.asarray(sheet, dtype=np.float32) / 255
    return total


def _fern(pen: Any, rng: np.random.Generator) -> None:
    """Draw a stem from a random point in a random direction, with branches."""
    (x, y), angle, bend = rng.uniform(0, SIDE, 2).tolist(), rng.uniform(0, 2 * pi), rng.normal(0, 0.02)
    shade, length = rng.uniform(75, 200), rng.uniform(150, 400)
    steps = int(length / STEP)
    branches = rng.uniform(0.5, 1, (steps, 2)) * (0.45 * length * (1 - np.arange(steps) / steps))[:, None]
    for branch_lengths in branches.tolist():  # shorter towards the tip
        for direction, branch in zip((angle - pi / 3, angle + pi / 3), branch_lengths, strict=True):
            fill = int(shade * rng.uniform(0.4, 1))
            pen.line((x, y, x + branch * cos(direction), y + branch * sin(direction)), fill=fill, width=6)
        end = x + STEP * cos(angle), y + STEP * sin(angle)
        pen.line((x, y, *end), fill=int(shade), width=11)
        (x, y), angle = end, angle + bend
