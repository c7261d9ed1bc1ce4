# A record, not run at HEAD. It ran at commit dd686b6f5a35: `git checkout dd686b6f5a35`, then `python studies/subset_constant.py`.
"""The constant C of Theorem 2 (Lu et al. 2024) as printed, corrected, and simulated, in three settings.

python studies/subset_constant.py                   # 100 matrices per setting, 15 seconds on one core
python studies/subset_constant.py --matrices 200    # smaller errors
"""

from __future__ import annotations

import argparse

import numpy as np

from plateaux.theory import Setting, subset_constant

SETTINGS = ((3, 3, 0.05, 0.5), (5, 10, 0.05, 0.4), (10, 14, 0.01, 0.4))  # S, k, eta, rho; 300 rows per subset


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", type=int, default=100)
    args = parser.parse_args()
    print("| S | k | eta | rho | simulated | printed | corrected |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for parts, k, eta, rho in SETTINGS:
        setting = Setting(n=300 * parts, k=k, eta=eta, rho=rho, parts=parts)
        mean, error = simulated_constant(setting, args.matrices)
        cells = [f"{c:.6g} ({c / mean - 1:+.2%})" for c in (subset_constant(setting, paper=p) for p in (True, False))]
        print(f"| {parts} | {k} | {eta} | {rho} | {mean:.6g} ± {error:.2g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
