"""What lies between the lens and the world: snow, frost, fog, and drops of water or mud on the lens."""

from __future__ import annotations

from functools import lru_cache
from math import cos, pi, sin
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.data.corruptions.blur import trail
from plateaux.data.corruptions.image_ops import (
    Array,
    Generators,
    Whole,
    import_scipy,
    normals,
    sample_each,
    smooth,
    stretch,
    uniforms,
)

Exact = NDArray[np.float64]
Flags = NDArray[np.bool_]

GREY = np.array([0.299, 0.587, 0.114], np.float32)
WATER = np.array([175, 238, 238], np.float32) / np.float32(255)
MUD = np.array([63, 42, 20], np.float32) / np.float32(255)
DEEPEST = 20  # pixels from an outline beyond which a drop is no deeper
SLANT = np.array([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])  # how light from one side falls on slopes
TAN = 0.41421356  # of 22.5 degrees: nearer to an axis than to a diagonal


def snow(
    x: Array,
    rngs: Generators,
    mean: float,
    spread: float,
    zoom: float,
    least: float,
    radius: float,
    sigma: float,
    kept: float,
) -> Array:
    """Flakes falling within 45 degrees of the vertical over a whitened image, of which `kept` remains.

    Flakes are normal noise, enlarged by `zoom`; what is below `least` is left out, the rest is smeared.
    """
    flakes = enlarge(mean + spread * normals(rngs, *x.shape[1:3]), zoom)
    flakes = np.clip(np.where(flakes < least, 0, flakes), 0, 1).astype(np.float32)[..., None]
    flakes = trail(flakes, 90 * uniforms(rngs, 1)[:, 0] - 135, radius, sigma)
    grey = (x[..., 0] * GREY[0] + x[..., 1] * GREY[1] + x[..., 2] * GREY[2])[..., None]
    white: Array = np.float32(kept) * x + np.float32(1 - kept) * np.maximum(x, grey * np.float32(1.5) + np.float32(0.5))
    return white + flakes + flakes[:, ::-1, ::-1]


def enlarge(layers: Array, zoom: float) -> Array:
    """Return the middle of layers `[N, H, W]` enlarged to their size by bilinear interpolation."""
    low, high, share = stretch(layers.shape[1], zoom)
    layers = layers[:, low] * (1 - share)[:, None] + layers[:, high] * share[:, None]
    low, high, share = stretch(layers.shape[2], zoom)
    return layers[:, :, low] * (1 - share) + layers[:, :, high] * share


def frost(x: Array, rngs: Generators, kept: float, ice: float, scale: float) -> Array:
    """A random cut of a frost picture times `ice` over the image times `kept`."""
    height, width = x.shape[1:3]
    pictures = frost_textures(max(scale, max(height, width) / SIDE))
    side = pictures.shape[1]

    def cut(rng: np.random.Generator) -> Array:
        which, top, left = rng.integers((len(pictures), side - height + 1, side - width + 1)).tolist()
        return pictures[which, top : top + height, left : left + width]

    return np.float32(kept) * x + np.float32(ice) * sample_each(rngs, cut)


def fog(x: Array, rngs: Generators, amount: float, decay: float) -> Array:
    """Clouds of plasma noise, `amount` of them, and the whole darkened back to its brightest value."""
    height, width = x.shape[1:3]
    clouds = plasma(rngs, max(height, width), decay)[:, :height, :width, None]
    brightest: Array = x.max((1, 2, 3), keepdims=True)
    return (x + np.float32(amount) * clouds) * (brightest / (brightest + np.float32(amount)))


def plasma(rngs: Generators, size: int, decay: float) -> Array:
    """Return clouds `[N, S, S]` in [0, 1], S the power of two from `size`, by the diamond-square algorithm on a torus.

    Noise is uniform within plus or minus the square of an amplitude that falls by `decay` from size to size.
    """
    side = 1 << max(size - 1, 1).bit_length()
    noise = 2 * uniforms(rngs, side, side) - 1
    field: Array = np.zeros_like(noise)
    step, amplitude = side, 100.0
    while step >= 2:
        half, reach = step // 2, np.float32(amplitude**2)
        corners = field[:, ::step, ::step]
        beside = corners + np.roll(corners, -1, 1)
        centres = (beside + np.roll(beside, -1, 2)) / 4 + reach * noise[:, half::step, half::step]
        field[:, half::step, half::step] = centres
        across = centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 2)
        field[:, ::step, half::step] = across / 4 + reach * noise[:, ::step, half::step]
        down = centres + np.roll(centres, 1, 2) + corners + np.roll(corners, -1, 1)
        field[:, half::step, ::step] = down / 4 + reach * noise[:, half::step, ::step]
        step, amplitude = half, amplitude / decay
    field -= field.min((1, 2), keepdims=True)
    highest: Array = field.max((1, 2), keepdims=True)
    return field / highest


def spatter(
    x: Array, rngs: Generators, mean: float, spread: float, sigma: float, least: float, strength: float, mud: float
) -> Array:
    """Drops on the lens where smoothed normal noise exceeds `least`: of water, or of mud where `mud` is 1."""
    liquid = smooth(mean + np.float32(spread) * normals(rngs, *x.shape[1:3]), sigma)
    liquid = np.where(liquid < least, 0, liquid)
    if not mud:
        return x + np.float32(strength) * glints(liquid)[..., None] * WATER
    covered = smooth((liquid > least).astype(np.float32), strength)
    covered = np.where(covered < 0.8, 0, covered)[..., None]
    return x * (1 - covered) + covered * MUD


def glints(liquid: Array) -> Array:
    """Return how drops `[N, H, W]` catch the light, at most 1: lit from one side, by their distance to an outline."""
    ndimage = import_scipy("scipy.ndimage")
    levels = np.floor(np.clip(liquid, 0, 1) * 255)
    distance = np.stack([_distance(layer) for layer in outlines(levels)])
    depth = equalize(ndimage.uniform_filter(distance, (1, 3, 3), mode="mirror").astype(np.int64))
    lit = np.clip(ndimage.correlate(depth, SLANT[None], mode="mirror"), 0, 255)
    shine = levels * np.rint(ndimage.uniform_filter(lit, (1, 3, 3), mode="mirror"))
    brightest = shine.max((1, 2), keepdims=True)
    found: Array = (shine / np.where(brightest > 0, brightest, 1)).astype(np.float32)
    return found


def _distance(outline: Flags) -> Exact:
    """Return how far every pixel of a layer is from an outline, at most DEEPEST."""
    if not outline.any():
        return np.full(outline.shape, float(DEEPEST))
    found: Exact = np.minimum(import_scipy("scipy.ndimage").distance_transform_edt(~outline), DEEPEST)
    return found


def equalize(depths: Whole) -> Exact:
    """Return depths `[N, H, W]` in 0 .. DEEPEST spread over 0 .. 255, each layer's histogram as even as can be."""
    counts = np.stack([(depths == depth).sum((1, 2)) for depth in range(DEEPEST + 1)], axis=1)
    lowest = np.take_along_axis(counts, (counts > 0).argmax(1)[:, None], axis=1)
    others = depths[0].size - lowest
    spread = np.rint((counts.cumsum(1) - lowest) * 255 / np.maximum(others, 1))
    spread = np.where(others > 0, spread, np.arange(DEEPEST + 1))  # a layer of one depth stays as it is
    return np.take_along_axis(spread, depths.reshape(len(depths), -1), axis=1).reshape(depths.shape)


def outlines(levels: Exact, *, weak: float = 50, strong: float = 150) -> Flags:
    """Return where layers `[N, H, W]` of grey levels have edges, by Canny's rule.

    Edges are ridges of |slope across| + |slope down|, Sobel's slopes, above `weak` that touch one above `strong`.
    """
    ndimage = import_scipy("scipy.ndimage")
    down, across = (_slope(levels, axis) for axis in (1, 2))
    steep = np.abs(down) + np.abs(across)
    ridge = _ridge(steep, down, across) & (steep > weak)
    inside = np.zeros((3, 3, 3), dtype=bool)
    inside[1] = True  # pixels touch within their own layer only
    pieces, count = ndimage.label(ridge, inside)
    held = np.zeros(count + 1, dtype=bool)
    held[pieces[ridge & (steep > strong)]] = True
    held[0] = False
    found: Flags = held[pieces]
    return found


def _slope(levels: Exact, axis: int) -> Exact:
    ndimage = import_scipy("scipy.ndimage")
    along = ndimage.correlate1d(levels, [-1, 0, 1], axis=axis, mode="nearest")
    found: Exact = ndimage.correlate1d(along, [1, 2, 1], axis=3 - axis, mode="nearest")
    return found


def _ridge(steep: Exact, down: Exact, across: Exact) -> Flags:
    """Return where it is steepest along the slope, of the four directions of neighbours the nearest to it."""
    wide = np.pad(steep, ((0, 0), (1, 1), (1, 1)))
    height, width = steep.shape[1:]

    def at(y: int, x: int) -> Exact:
        return wide[:, 1 + y : 1 + y + height, 1 + x : 1 + x + width]

    level, upright = np.abs(down) < TAN * np.abs(across), np.abs(across) < TAN * np.abs(down)
    # Of two equal neighbours the first is the edge, so that an edge is one pixel wide.
    sideways = np.where(level, (steep > at(0, -1)) & (steep >= at(0, 1)), (steep > at(-1, 0)) & (steep >= at(1, 0)))
    falling, rising = (steep > at(-1, -1)) & (steep > at(1, 1)), (steep > at(-1, 1)) & (steep > at(1, -1))
    return np.where(level | upright, sideways, np.where(down * across > 0, falling, rising))


PICTURES = 5


SIDE = 700  # pixels of a picture at scale 1


SHEETS, FERNS = 8, 5  # ferns of one sheet hide one another, those of different sheets add up


STEP = 16.0  # pixels from branch to branch


SHADOW, LIGHT = np.array([[0.14, 0.21, 0.30], [0.92, 0.96, 0.99]], np.float32)  # the colours between which it lies


@lru_cache(maxsize=4)
def frost_textures(scale: float) -> Array:
    """Return the frost pictures `[PICTURES, S, S, 3]` in [0, 1], S = scale times SIDE; the same ones every time."""
    image = import_scipy("PIL.Image")
    side = round(SIDE * scale)
    found = []
    for number in range(PICTURES):
        rng = np.random.Generator(np.random.Philox(key=number))
        ice = np.clip(0.6 * _haze(rng) ** 2 + 0.8 * _ferns(rng), 0, 1)
        small = image.fromarray(ice).resize((side, side), image.Resampling.BOX)
        found.append(np.asarray(small)[..., None] * (LIGHT - SHADOW) + SHADOW)
    return np.stack(found).astype(np.float32)


def _haze(rng: np.random.Generator) -> Array:
    """Return smooth noise of four sizes in [0, 1]."""
    image = import_scipy("PIL.Image")
    total = np.zeros((SIDE, SIDE), np.float32)
    for octave in range(4):
        coarse = image.fromarray(rng.random((4 * 2**octave,) * 2, dtype=np.float32))
        total += 2.0**-octave * np.asarray(coarse.resize((SIDE, SIDE), image.Resampling.BICUBIC))
    low, high = total.min(), total.max()
    found: Array = (total - low) / (high - low)
    return found


def _ferns(rng: np.random.Generator) -> Array:
    """Return crossing ferns of ice, 0 where there are none."""
    image, draw = import_scipy("PIL.Image"), import_scipy("PIL.ImageDraw")
    total = np.zeros((SIDE, SIDE), np.float32)
    for _ in range(SHEETS):
        sheet = image.new("L", (SIDE, SIDE))
        for _ in range(FERNS):
            _fern(draw.Draw(sheet), rng)
        total += np.asarray(sheet, dtype=np.float32) / 255
    return total


def _fern(pen: Any, rng: np.random.Generator) -> None:
    """Draw a stem from a random place in a random direction, and its branches."""
    (x, y), angle, bend = rng.uniform(0, SIDE, 2).tolist(), rng.uniform(0, 2 * pi), rng.normal(0, 0.02)
    shade, length = rng.uniform(75, 200), rng.uniform(150, 400)
    steps = int(length / STEP)
    branches = rng.uniform(0.5, 1, (steps, 2)) * (0.45 * length * (1 - np.arange(steps) / steps))[:, None]
    for step in branches.tolist():  # shorter towards the tip
        for turn, reach in zip((angle - pi / 3, angle + pi / 3), step, strict=True):
            fill = int(shade * rng.uniform(0.4, 1))
            pen.line((x, y, x + reach * cos(turn), y + reach * sin(turn)), fill=fill, width=6)
        ahead = x + STEP * cos(angle), y + STEP * sin(angle)
        pen.line((x, y, *ahead), fill=int(shade), width=11)
        (x, y), angle = ahead, angle + bend
