# A record, not run at HEAD. It ran at commit 8bb00791be8d: `git checkout 8bb00791be8d`, then `python studies/sample_ranks.py`.
"""Do gradient norms and input curvature rank samples alike? Claim 13.

    python studies/sample_ranks.py runs/sample_ranks                      # about a quarter of an hour on two cores
    python studies/sample_ranks.py runs/sample_ranks --run runs/landscape/deep_ensemble    # of members trained before
    python studies/sample_ranks.py runs/sample_ranks --quick              # a minute, for a look

Three networks of `landscape_cifar10.py` (resnet8, 10,000 images, no augmentation), 1,000 training samples each; mean of
Spearman's correlation over networks with its 95 % t interval. The evidence is written to `evidence/` in that folder.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from _evidence import write_mean
from landscape_cifar10 import BASE, CONDITIONS, recipe_for

import plateaux
from plateaux.core.row_names import MEAN_OF_MEMBERS

CLAIM = "13-two-rankings-of-samples"
MEMBERS = 3


def correlations(run: Path, samples: int) -> list[float]:
    """Return the rank correlation of every member of a run."""
    (found,) = plateaux.probe_landscape(run, probes=["rank_agreement"], limit=samples)
    return [value.value for name, value in found.rows.items() if name != MEAN_OF_MEMBERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--run", type=Path, help="a run whose members are asked; without it three are trained")
    parser.add_argument("--quick", action="store_true", help="hardly trained networks, 64 samples")
    args = parser.parse_args()
    began = time.monotonic()
    if args.run is None:
        plateaux.train(recipe_for(CONDITIONS[BASE], members=MEMBERS, quick=args.quick), args.out / "run")
    found = correlations(args.run or args.out / "run", 64 if args.quick else 1000)
    for number, value in enumerate(found):
        print(f"network {number}: {value:.4f}")
    write_mean(CLAIM, found, args.out, began)


if __name__ == "__main__":
    main()
