"""Simulation of SAM on least squares: random data, many starts, measured diversity and sharpness.

There is no loop over steps. The eigenvectors of A^T A of each data subset give the weights of SAM after any number of
steps in closed form, and the worst perturbation is computed exactly, so all settings share one set of random data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, sqrt

import numpy as np
from numpy.typing import NDArray

from plateaux.commands import Progress, WorkDone, log_messages
from plateaux.errors import RecipeError
from plateaux.stats import derive_seed
from plateaux_papers.theory.phi import Floats, contraction
from plateaux_papers.theory.quadratic import worst_case
from plateaux_papers.theory.setting import Setting

TEST_ROWS = 1000  # as in the paper


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Diversity and sharpness of one setting for each data matrix."""

    diversity: Floats  # [matrices]
    sharpness: Floats  # [matrices]


@dataclass(frozen=True, slots=True)
class MatrixSample:
    """The random draws of one experiment, shared by all settings of the same size."""

    values: Floats  # [d] eigenvalues of all data
    vectors: Floats  # [d, d]
    tests: Floats  # [d, d] second moments of the test data
    starts: Floats  # [d, starts] initial weights of variance 1
    teacher: Floats  # [d] of length 1
    grams: Floats  # [pieces, d, d] A^T A of the smallest subsets


@dataclass(frozen=True, slots=True)
class DataSubset:
    """One subset of the data, with the starts of its members in the basis of its eigenvectors."""

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
    progress: Progress = log_messages,
) -> list[SimulationResult]:
    """Return the simulated diversity and sharpness of settings of one size, all on the same random data.

    >>> result = simulate([Setting(n=40, d=10, k=1, eta=0.01)], matrices=4, starts=8)[0]
    >>> result.diversity.shape, bool((result.sharpness > 0).all())
    ((4,), True)
    """
    if len({(each.n, each.d) for each in settings}) != 1:
        raise RecipeError("simulate needs one or more settings with the same n and d. Call it once for each size.")
    if matrices < 2 or starts < 2:
        raise RecipeError(f"matrices = {matrices}, starts = {starts}: a standard error needs at least 2 of each.")
    values = np.empty((2, len(settings), matrices))
    for number in range(matrices):
        values[:, :, number] = _simulate_matrix(settings, starts, seed, number)
        progress(WorkDone(number + 1, matrices))
    return [SimulationResult(*values[:, at]) for at in range(len(settings))]


def _simulate_matrix(settings: Sequence[Setting], starts: int, seed: int, number: int) -> Floats:
    """Return diversity and sharpness [2, settings] on one random data matrix."""
    first, counts = settings[0], {each.parts for each in settings}
    random = np.random.default_rng(derive_seed("theory", seed, number))
    sample = _sample_matrix(first.n, first.d, lcm(*counts), starts, random)
    subsets = {}
    for count in counts:
        subset_ids = np.random.default_rng(derive_seed("theory", seed, number, "parts", count)).integers(
            count, size=starts
        )
        subsets[count] = _split_data(sample, count, subset_ids)
    trained = [_train(each, subsets[each.parts]) for each in settings]
    diversity = [_variance(members, sample.tests) for members, _ in trained]
    slopes = sample.values * (np.stack([error for _, error in trained]) @ sample.vectors)
    radius = np.array([each.radius for each in settings])
    return np.stack([np.array(diversity), worst_case(sample.values, slopes, radius).rise])


def _sample_matrix(n: int, d: int, pieces: int, starts: int, random: np.random.Generator) -> MatrixSample:
    data = random.standard_normal((pieces, n // pieces, d)) / sqrt(d)
    grams = data.transpose(0, 2, 1) @ data
    values, vectors = np.linalg.eigh(grams.sum(0))
    new = random.standard_normal((TEST_ROWS, d)) / sqrt(d)
    teacher = np.full(d, 1 / sqrt(d))  # the data are isotropic, so the direction does not matter
    return MatrixSample(values, vectors, new.T @ new / TEST_ROWS, random.standard_normal((d, starts)), teacher, grams)


def _split_data(sample: MatrixSample, count: int, subset_ids: NDArray[np.int64]) -> list[DataSubset]:
    d = len(sample.values)
    subsets = []
    for number, gram in enumerate(sample.grams.reshape(count, -1, d, d).sum(1)):
        values, vectors = np.linalg.eigh(gram)
        starts = vectors.T @ sample.starts[:, subset_ids == number]
        subsets.append(DataSubset(values, vectors, starts, vectors.T @ sample.teacher))
    return subsets


def _train(setting: Setting, subsets: Sequence[DataSubset]) -> tuple[Floats, Floats]:
    """Return the trained members minus the teacher, [d, members], and their expectation over starts, [d]."""
    members, mean_error = [], np.zeros(setting.d)
    for subset in subsets:
        factor = contraction(subset.values, eta=setting.eta, rho=setting.rho) ** setting.k
        errors = sqrt(setting.variance) * subset.starts - setting.norm * subset.teacher[:, None]
        members.append(subset.vectors @ (factor[:, None] * errors))
        mean_error -= subset.vectors @ (factor * subset.teacher) * (setting.norm / len(subsets))
    return np.concatenate(members, 1), mean_error


def _variance(members: Floats, tests: Floats) -> float:
    """Return the unbiased variance of the members' predictions, averaged over the test data."""
    centered = members - members.mean(1, keepdims=True)
    return float((centered * (tests @ centered)).sum() / (members.shape[1] - 1))
