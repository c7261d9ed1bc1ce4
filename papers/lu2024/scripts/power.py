# A record, not run at HEAD. It ran at commit 927cdc99ef05: `git checkout 927cdc99ef05`, then `python studies/power.py`.
"""How many repetitions does the test of SharpBalance need? Power of the paired t test, from the noncentral t.

    python studies/power.py                     # standard deviations of .1 to 2 points
    python studies/power.py --effect 1 --sd .6  # one of them

The interval of a claim excludes zero if the two-sided t test at 5 % does. Its power for a true difference of `effect`
points with a standard deviation of `sd` points over repetitions is the probability that |T| exceeds the 97.5 % quantile
of Student's t, where T has the noncentral t distribution with noncentrality effect / (sd / sqrt(n)).
"""

from __future__ import annotations

import argparse
from math import sqrt

from scipy import stats

POWER = 0.9
MOST = 200


def power(effect: float, sd: float, repetitions: int) -> float:
    """Return the probability that the 95 % t interval excludes zero, on the side of the effect or on the other."""
    freedom = repetitions - 1
    critical = stats.t.ppf(0.975, freedom)
    shift = effect / (sd / sqrt(repetitions))
    return float(stats.nct.sf(critical, freedom, shift) + stats.nct.cdf(-critical, freedom, shift))


def repetitions_for(effect: float, sd: float, wanted: float = POWER) -> int | None:
    """Return the smallest number of repetitions with the wanted power, or None above 200."""
    return next((number for number in range(2, MOST + 1) if power(effect, sd, number) >= wanted), None)


def detectable(sd: float, repetitions: int, wanted: float = POWER) -> float:
    """Return the smallest effect in points, to .01, that is detected with the wanted power."""
    return next(step / 100 for step in range(1, 100_000) if power(step / 100, sd, repetitions) >= wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effect", type=float, default=1.0, help="in points; 1.0 is that of Figure 7a")
    parser.add_argument("--sd", type=float, action="append", help="standard deviation of the paired differences")
    args = parser.parse_args()
    wanted = f"repetitions for {args.effect:g} points at power {POWER:.0%}"
    print(f"| sd of paired differences | {wanted} | points detected with 10 |")
    print("|---:|---:|---:|")
    for sd in args.sd or (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0):
        print(f"| {sd:g} | {repetitions_for(args.effect, sd) or f'more than {MOST}'} | {detectable(sd, 10):.2f} |")


if __name__ == "__main__":
    main()
