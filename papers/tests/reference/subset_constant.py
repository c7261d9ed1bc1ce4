"""The constant C of Theorem 2 by simulation."""

from __future__ import annotations

import numpy as np

from plateaux_papers.theory import Setting


def simulated_constant(setting: Setting, matrices: int) -> tuple[float, float]:
    """Return the mean of |sum_s B_s^k W w|^2 over random data and unit vectors w, with its standard error."""
    d, values_of_c = setting.d, []
    for seed in range(matrices):
        rng = np.random.default_rng(seed)
        data = rng.standard_normal((setting.parts, setting.rows, d)) / np.sqrt(d)
        eigenvalues, vectors = np.linalg.eigh(data.transpose(0, 2, 1) @ data)
        total = np.einsum("sij,sj,skj->ik", vectors, eigenvalues, vectors, optimize=True)
        steps = (1 - setting.eta * eigenvalues - setting.eta * setting.rho * eigenvalues**2) ** setting.k
        product = np.einsum("sij,sj,skj->ik", vectors, steps, vectors, optimize=True) @ total
        values_of_c.append((product**2).sum() / d)  # the mean over all directions of w
    return float(np.mean(values_of_c)), float(np.std(values_of_c, ddof=1)) / np.sqrt(matrices)
