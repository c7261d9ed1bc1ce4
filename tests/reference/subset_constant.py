"""The constant C of Theorem 2, from random matrices."""

from __future__ import annotations

import numpy as np

from plateaux.theory import Setting


def simulated_constant(setting: Setting, matrices: int) -> tuple[float, float]:
    """Return the mean of |sum_s B_s^k W w|^2 over random data and w of length one, with its error."""
    d, found = setting.d, []
    for number in range(matrices):
        random = np.random.default_rng(number)
        data = random.standard_normal((setting.parts, setting.rows, d)) / np.sqrt(d)
        values, vectors = np.linalg.eigh(data.transpose(0, 2, 1) @ data)
        whole = np.einsum("sij,sj,skj->ik", vectors, values, vectors, optimize=True)
        steps = (1 - setting.eta * values - setting.eta * setting.rho * values**2) ** setting.k
        product = np.einsum("sij,sj,skj->ik", vectors, steps, vectors, optimize=True) @ whole
        found.append((product**2).sum() / d)  # the mean over all directions of w
    return float(np.mean(found)), float(np.std(found, ddof=1)) / np.sqrt(matrices)
