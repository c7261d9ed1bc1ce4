# A record, not run at HEAD. It ran at commit 51a1f498c62c: `git checkout 51a1f498c62c`, then `python studies/sed_steps.py`.
"""Does a step of SED cost the same however many members there are? Claim 10 of the ledger.

    python studies/sed_steps.py runs/sed_steps            # a few minutes on one thread
    python studies/sed_steps.py runs/sed_steps --quick    # seconds, for a look

Linear heads, two of them drawn a step, every head touched before anything is timed; the sizes take turns within a
round. In every round the slope of log seconds on log members; its mean over rounds with a 95 % t interval. A round is
the median of several steps. The evidence is written to `evidence/` in that folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from _leaving import leave

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from joint import timed

from plateaux.machine import settle_in

CLAIM = "10-sed-costs-the-same-for-many"
STEPS = 11  # of each size in a round


def slopes(times: dict[int, list[float]]) -> list[float]:
    """Return the slope of log time on log members in every round."""
    members = np.log(list(times))
    table = [[statistics.median(row[at : at + STEPS]) for at in range(0, len(row), STEPS)] for row in times.values()]
    return [float(np.polyfit(members, np.log(each), 1)[0]) for each in zip(*table, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true", help="few and thin heads")
    args = parser.parse_args()
    began = time.monotonic()
    settle_in(threads=1)
    sizes, width, classes, rounds = ((5, 20, 40), 96, 50, 3) if args.quick else ((5, 50, 500, 1000), 768, 1000, 20)
    found = slopes(dict(zip(sizes, timed(sizes, (), width, classes, STEPS * rounds)[0].values(), strict=True)))
    for number, slope in enumerate(found):
        print(f"round {number}: slope {slope:.4f}")
    leave(CLAIM, found, args.out, began)


if __name__ == "__main__":
    main()
