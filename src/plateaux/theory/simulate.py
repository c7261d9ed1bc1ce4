"""The experiment itself: random data, many starts, diversity and sharpness as they come out.

Nothing is iterated. The eigenvectors of every part's A^T A give SAM's weights after any number of steps in closed form,
and the worst perturbation is found exactly, so that one set of data serves every setting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm, sqrt

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import RecipeError
from plateaux.core.types import derive_seed
from plateaux.theory.phi import Floats, contraction
from plateaux.theory.quadratic import worst_case
from plateaux.theory.setting import Setting

TESTS = 1000  # rows of new data, as in the paper


@dataclass(frozen=True, slots=True)
class Simulated:
    """Diversity and sharpness of one setting, one of each for every data matrix."""

    diversity: Floats  # [matrices]
    sharpness: Floats  # [matrices]


@dataclass(frozen=True, slots=True)
class MatrixSample:
    """One random experiment, before any step: what all settings of the same size share."""

    values: Floats  # [d] eigenvalues of all data
    vectors: Floats  # [d, d]
    tests: Floats  # [d, d] second moments of the new data
    starts: Floats  # [d, starts] of variance 1
    teacher: Floats  # [d] of length 1
    grams: Floats  # [pieces, d, d] of the finest parts


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """One part of the data, and what its members start from in the basis of its eigenvectors."""

    values: Floats  # [d]
    vectors: Floats  # [d, d]
    starts: Floats  # [d, members]
    teacher: Floats  # [d]


def simulate(
    settings: Sequence[Setting],
    *,
    matrices: int = 50,
    starts: int = 50,
    seed: int = 0,
    seen: Callable[[int, int], None] | None = None,
) -> list[Simulated]:
    """Return what happens in every setting, all of one size, on the same random data.

    >>> found = simulate([Setting(n=40, d=10, k=1, eta=0.01)], matrices=4, starts=8)[0]
    >>> found.diversity.shape, bool((found.sharpness > 0).all())
    ((4,), True)
    """
    if len({(each.n, each.d) for each in settings}) != 1:
        raise RecipeError("simulate needs settings that share n and d, at least one; call it once for every size")
    if matrices < 2 or starts < 2:
        raise RecipeError(f"{matrices} matrices and {starts} starts: a mean with its error needs two of each at least")
    found = np.empty((2, len(settings), matrices))
    for number in range(matrices):
        found[:, :, number] = _experiment(settings, starts, seed, number)
        if seen is not None:
            seen(number + 1, matrices)
    return [Simulated(*found[:, at]) for at in range(len(settings))]


def _experiment(settings: Sequence[Setting], starts: int, seed: int, number: int) -> Floats:
    """Return diversity and sharpness [2, settings] on one random data matrix."""
    first, counts = settings[0], {each.parts for each in settings}
    random = np.random.default_rng(derive_seed("theory", seed, number))
    draw = _draw(first.n, first.d, lcm(*counts), starts, random)
    cut = {}
    for count in counts:
        who = np.random.default_rng(derive_seed("theory", seed, number, "parts", count)).integers(count, size=starts)
        cut[count] = _cut(draw, count, who)
    ends = [_train(each, cut[each.parts]) for each in settings]
    diversity = [_variance(members, draw.tests) for members, _ in ends]
    slopes = draw.values * (np.stack([error for _, error in ends]) @ draw.vectors)
    radius = np.array([each.radius for each in settings])
    return np.stack([np.array(diversity), worst_case(draw.values, slopes, radius).rise])


def _draw(n: int, d: int, pieces: int, starts: int, random: np.random.Generator) -> MatrixSample:
    data = random.standard_normal((pieces, n // pieces, d)) / sqrt(d)
    grams = data.transpose(0, 2, 1) @ data
    values, vectors = np.linalg.eigh(grams.sum(0))
    new = random.standard_normal((TESTS, d)) / sqrt(d)
    teacher = np.full(d, 1 / sqrt(d))  # any direction will do: data have none
    return MatrixSample(values, vectors, new.T @ new / TESTS, random.standard_normal((d, starts)), teacher, grams)


def _cut(draw: MatrixSample, count: int, who: NDArray[np.int64]) -> list[MatrixPart]:
    d = len(draw.values)
    parts = []
    for number, gram in enumerate(draw.grams.reshape(count, -1, d, d).sum(1)):
        values, vectors = np.linalg.eigh(gram)
        parts.append(MatrixPart(values, vectors, vectors.T @ draw.starts[:, who == number], vectors.T @ draw.teacher))
    return parts


def _train(setting: Setting, parts: Sequence[MatrixPart]) -> tuple[Floats, Floats]:
    """Return the members after their steps, less the teacher, [d, members], and the mean [d] over all starts."""
    members, mean_error = [], np.zeros(setting.d)
    for part in parts:
        left = contraction(part.values, eta=setting.eta, rho=setting.rho) ** setting.k
        errors = sqrt(setting.variance) * part.starts - setting.norm * part.teacher[:, None]
        members.append(part.vectors @ (left[:, None] * errors))
        mean_error -= part.vectors @ (left * part.teacher) * (setting.norm / len(parts))
    return np.concatenate(members, 1), mean_error


def _variance(members: Floats, tests: Floats) -> float:
    """Return the variance of the members' predictions, without bias, on average over the new data."""
    apart = members - members.mean(1, keepdims=True)
    return float((apart * (tests @ apart)).sum() / (members.shape[1] - 1))
