"""Frost on a window, drawn: the published scripts cut theirs from photographs, which do not come with this package.

A picture is a dark bluish pane with a haze of smooth noise, overgrown by ferns of ice: stems with side branches at 60
degrees, brighter where they lie over one another.
"""

from __future__ import annotations

from functools import lru_cache
from math import cos, pi, sin
from typing import Any

import numpy as np

from plateaux.data.corruptions.image_ops import Array, guest

PICTURES = 5
SIDE = 700  # pixels of a picture at scale 1
SHEETS, FERNS = 8, 5  # ferns of one sheet hide one another, those of different sheets add up
STEP = 16.0  # pixels from branch to branch
SHADOW, LIGHT = np.array([[0.14, 0.21, 0.30], [0.92, 0.96, 0.99]], np.float32)  # the colours between which it lies


@lru_cache(maxsize=4)
def panes(scale: float) -> Array:
    """Return the frost pictures `[PICTURES, S, S, 3]` in [0, 1], S = scale times SIDE; the same ones every time."""
    image = guest("PIL.Image")
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
    image = guest("PIL.Image")
    total = np.zeros((SIDE, SIDE), np.float32)
    for octave in range(4):
        coarse = image.fromarray(rng.random((4 * 2**octave,) * 2, dtype=np.float32))
        total += 2.0**-octave * np.asarray(coarse.resize((SIDE, SIDE), image.Resampling.BICUBIC))
    low, high = total.min(), total.max()
    found: Array = (total - low) / (high - low)
    return found


def _ferns(rng: np.random.Generator) -> Array:
    """Return crossing ferns of ice, 0 where there are none."""
    image, draw = guest("PIL.Image"), guest("PIL.ImageDraw")
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
