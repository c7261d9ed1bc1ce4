"""Noise corruptions."""

from __future__ import annotations

import numpy as np

from plateaux.data.corruptions.image_ops import Array, Generators, normals, sample_each, uniforms


def gaussian_noise(x: Array, rngs: Generators, sigma: float) -> Array:
    """Add Gaussian noise of standard deviation `sigma`."""
    return x + np.float32(sigma) * normals(rngs, *x.shape[1:])


def shot_noise(x: Array, rngs: Generators, photons: float) -> Array:
    """Replace each value by a Poisson count with mean `photons` times the value, divided by `photons`."""
    means = iter(x.astype(np.float64) * photons)
    return sample_each(rngs, lambda rng: rng.poisson(next(means)).astype(np.float32)) / np.float32(photons)


def impulse_noise(x: Array, rngs: Generators, fraction: float) -> Array:
    """Replace a `fraction` of all values by 0 or 1 with equal probability (salt and pepper)."""
    u = uniforms(rngs, *x.shape[1:])
    return np.where(u < fraction, (u < fraction / 2).astype(np.float32), x)


def speckle_noise(x: Array, rngs: Generators, sigma: float) -> Array:
    """Add Gaussian noise with a standard deviation of `sigma` times the value."""
    return x + np.float32(sigma) * x * normals(rngs, *x.shape[1:])
