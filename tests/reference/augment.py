"""Reference implementation of plateaux.data.augment, one sample and one pixel at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def scramble(z: int) -> int:
    """Apply the splitmix64 finalizer with Python integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, sample: int, column: int) -> float:
    """Return the random number of (seed, sample, column)."""
    start = scramble((seed + GOLDEN) & MASK)
    row = scramble(start ^ ((sample * GOLDEN) & MASK))
    return (scramble((row + (column + 1) * GOLDEN) & MASK) >> 11) / 2**53


def crop(image: Tensor, top: int, left: int, pad: int, fill: int = 0) -> Tensor:
    """Crop one padded image `[C, H, W]`, pixel by pixel."""
    _, height, width = image.shape
    out = torch.full_like(image, fill)
    for i in range(height):
        for j in range(width):
            source_row, source_column = i + top - pad, j + left - pad
            if 0 <= source_row < height and 0 <= source_column < width:
                out[:, i, j] = image[:, source_row, source_column]
    return out


def flip(image: Tensor) -> Tensor:
    """Flip one image `[C, H, W]` horizontally, column by column."""
    return torch.stack([image[:, :, j] for j in reversed(range(image.shape[2]))], 2)


def crop_and_flip(image: Tensor, seed: int, sample: int, pad: int, random_flip: bool) -> Tensor:
    """Crop and then flip one image."""
    if pad:
        top, left = (math.floor(uniform(seed, sample, column) * (2 * pad + 1)) for column in (0, 1))
        image = crop(image, top, left, pad)
    return flip(image) if random_flip and uniform(seed, sample, 2) < 0.5 else image


def crop_box(seed: int, sample: int, height: int, width: int, areas: tuple[float, float]) -> tuple[int, int, int, int]:
    """Return top, left, height, and width of a random resized crop, one try after another."""
    for number in range(10):
        area = height * width * (areas[0] + (areas[1] - areas[0]) * uniform(seed, sample, 8 + number))
        low, high = math.log(3 / 4), math.log(4 / 3)
        ratio = math.exp(low + (high - low) * uniform(seed, sample, 18 + number))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = math.floor(uniform(seed, sample, 0) * (height - h + 1))
            return top, math.floor(uniform(seed, sample, 1) * (width - w + 1)), h, w
    w, h = width, height
    if width / height < 3 / 4:
        h = round(width / (3 / 4))
    elif width / height > 4 / 3:
        w = round(height * (4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def box(height: int, width: int, share: float, row: float, column: float) -> Tensor:
    """Return the mask `[H, W]` of a cutmix box that covers 1 - share of the image before clipping."""
    side = math.sqrt(1 - share)
    box_height, box_width = math.floor(side * height), math.floor(side * width)
    top, left = math.floor(row * height) - box_height // 2, math.floor(column * width) - box_width // 2
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[max(top, 0) : max(top + box_height, 0), max(left, 0) : max(left + box_width, 0)] = True
    return mask


def mixed_label(y: int, partner: int, share: float, classes: int) -> list[float]:
    """Return label probabilities: `share` for the class, the rest for the partner's class."""
    probabilities = [0.0] * classes
    probabilities[y] += share
    probabilities[partner] += 1 - share
    return probabilities
