"""C of Theorem 2 (Lu et al. 2024) as printed, corrected, and simulated: three settings of 150 columns.

python studies/subset_constant.py                   # 100 matrices a setting, a quarter of a minute of one core
python studies/subset_constant.py --matrices 200    # wider errors
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from plateaux.theory import Setting, subset_constant

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from reference.subset_constant import simulated_constant

SETTINGS = ((3, 3, 0.05, 0.5), (5, 10, 0.05, 0.4), (10, 14, 0.01, 0.4))  # S, k, eta, rho; 300 rows a part


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
