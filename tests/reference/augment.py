"""Augmentation one sample and one pixel at a time: slow, obvious twins of plateaux.data.augment."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def scramble(z: int) -> int:
    """splitmix64's finaliser in Python's own whole numbers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(key: int, sample: int, draw: int) -> float:
    """The one number of (key, sample, draw)."""
    start = scramble((key + GOLDEN) & MASK)
    row = scramble(start ^ ((sample * GOLDEN) & MASK))
    return (scramble((row + (draw + 1) * GOLDEN) & MASK) >> 11) / 2**53


def crop(image: Tensor, top: int, left: int, pad: int) -> Tensor:
    """One image `[C, H, W]`, pixel by pixel."""
    _, height, width = image.shape
    out = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            row, column = i + top - pad, j + left - pad
            if 0 <= row < height and 0 <= column < width:
                out[:, i, j] = image[:, row, column]
    return out


def flip(image: Tensor) -> Tensor:
    """One image `[C, H, W]`, mirrored column by column."""
    return torch.stack([image[:, :, j] for j in reversed(range(image.shape[2]))], 2)


def move(image: Tensor, key: int, sample: int, pad: int, flips: bool) -> Tensor:
    """Pad-and-crop, then flip, of one image."""
    if pad:
        top, left = (math.floor(uniform(key, sample, draw) * (2 * pad + 1)) for draw in (0, 1))
        image = crop(image, top, left, pad)
    return flip(image) if flips and uniform(key, sample, 2) < 0.5 else image


def box(height: int, width: int, share: float, row: float, column: float) -> Tensor:
    """The pixels `[H, W]` of a cutmix box that would cover 1 - share of the image."""
    side = math.sqrt(1 - share)
    tall, wide = math.floor(side * height), math.floor(side * width)
    top, left = math.floor(row * height) - tall // 2, math.floor(column * width) - wide // 2
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[max(top, 0) : max(top + tall, 0), max(left, 0) : max(left + wide, 0)] = True
    return mask


def mixed_label(y: int, other: int, share: float, classes: int) -> list[float]:
    """`share` for one's own class, the rest for the partner's."""
    probabilities = [0.0] * classes
    probabilities[y] += share
    probabilities[other] += 1 - share
    return probabilities
