"""Noise corruptions."""

from __future__ import annotations

import numpy as np

from plateaux.data.corruptions.image_ops import Array, Generators, normals, sample_each, uniforms


def gaussian_noise(x: Array, rngs: Generators, sigma: float) -> Array:
    """Normal noise of standard deviation `sigma` on every value."""
    return x + np.float32(sigma) * normals(rngs, *x.shape[1:])


def shot_noise(x: Array, rngs: Generators, photons: float) -> Array:
    """Counts of light: a Poisson number with mean `photons` times the value, over `photons`."""
    means = iter(x.astype(np.float64) * photons)
    return sample_each(rngs, lambda rng: rng.poisson(next(means)).astype(np.float32)) / np.float32(photons)


def impulse_noise(x: Array, rngs: Generators, share: float) -> Array:
    """A `share` of all values replaced by 0 or 1, half and half."""
    u = uniforms(rngs, *x.shape[1:])
    return np.where(u < share, (u < share / 2).astype(np.float32), x)


def speckle_noise(x: Array, rngs: Generators, sigma: float) -> Array:
    """Normal noise of standard deviation `sigma` times the value."""
    return x + np.float32(sigma) * x * normals(rngs, *x.shape[1:])
