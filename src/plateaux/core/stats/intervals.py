"""Honest intervals: over repetitions by Student's t, over test samples by a bootstrap, over members by a jackknife.

Every interval says what it is over. A bootstrap of two or three repetitions covers 50 to 75 % where 95 % are promised,
so repetitions are never resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plateaux.core.stats.ranking import spearman

LEVEL = 0.95
NAN = float("nan")
Cost = Literal["epochs", "passes", "seconds"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A number, and where the true one lies with probability `level`; nan where nothing can be said."""

    value: float
    low: float
    high: float
    count: int  # of what it is over
    over: str  # repetitions, test samples, members, points
    level: float = LEVEL

    @property
    def half(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside; never, where nothing is known."""
        return self.low > 0 or self.high < 0


def t_interval(numbers: ArrayLike, *, level: float = LEVEL) -> Interval:
    """Return the mean over repetitions with its Student-t interval; of one repetition there is none.

    >>> t_interval([1.0, 3.0]).half > 12
    True
    """
    return _by_t(_finite(numbers), "repetitions", level)


def paired_t_interval(numbers: ArrayLike, baseline: ArrayLike, *, level: float = LEVEL) -> Interval:
    """Return the mean difference from a baseline of the same repetitions, with its Student-t interval."""
    mine, theirs = (np.asarray(given, dtype=np.float64) for given in (numbers, baseline))
    if mine.shape != theirs.shape:
        raise ValueError(
            f"{mine.size} numbers cannot be paired with {theirs.size}; give both of the same repetitions, in one order"
        )
    return _by_t(_finite(mine - theirs), "paired repetitions", level)


def bootstrap_interval(
    scores: ArrayLike,
    generator: np.random.Generator,
    *,
    statistic: Callable[[Floats], float] = lambda drawn: float(drawn.mean()),
    resamples: int = 1000,
    level: float = LEVEL,
) -> Interval:
    """Return a percentile bootstrap over test samples of some statistic of their scores `[N]` or `[N, K]`.

    It says how the number moves with the test samples, and nothing about training again.
    """
    found = np.asarray(scores, dtype=np.float64)
    count = len(found)
    if count < 2:
        return Interval(statistic(found) if count else NAN, NAN, NAN, count, "test samples", level)
    drawn = [statistic(found[generator.integers(count, size=count)]) for _ in range(resamples)]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(statistic(found), float(low), float(high), count, "test samples", level)


def jackknife_interval(numbers: Mapping[tuple[int, ...], float], *, level: float = LEVEL) -> Interval:
    """Return the mean over ensembles of members trained once, with a jackknife over those members.

    `numbers` holds every ensemble of one size, such as all triples of six: they share members, so their own spread
    would promise too much. Leaving out one member leaves the ensembles without it. For a number that hangs on single
    members, as the best of three does, 95 % promised are about 90 % kept.
    """
    members = sorted({member for cast in numbers for member in cast})
    mean = _mean(list(numbers.values()))
    count = len(members)
    without = [[value for cast, value in numbers.items() if member not in cast] for member in members]
    if count < 2 or not all(without):
        return Interval(mean, NAN, NAN, count, "members", level)
    left = np.array([_mean(values) for values in without])
    error = math.sqrt((count - 1) / count * float(((left - left.mean()) ** 2).sum()))
    return _around(mean, error, count - 1, count, "members", level)


def slope(x: ArrayLike, y: ArrayLike, *, log: bool = True, level: float = LEVEL) -> Interval:
    """Return the slope of y on x by least squares with its t interval, in log-log unless told otherwise.

    In log-log it is the exponent beta of diversity ~ sharpness^beta; points that are not above zero are left out.
    """
    across, up = _points(x, y, log)
    count = len(across)
    spread = float(((across - across.mean()) ** 2).sum()) if count else 0.0
    if count < 2 or spread == 0:
        return Interval(NAN, NAN, NAN, count, "points", level)
    beta = float(((across - across.mean()) * (up - up.mean())).sum()) / spread
    if count < 3:
        return Interval(beta, NAN, NAN, count, "points", level)
    rest = up - up.mean() - beta * (across - across.mean())
    error = math.sqrt(float((rest**2).sum()) / (count - 2) / spread)
    return _around(beta, error, count - 2, count, "points", level)


def rank_correlation(x: ArrayLike, y: ArrayLike, *, level: float = LEVEL) -> Interval:
    """Return Spearman's rank correlation, with an interval by Fisher's z (Bonett and Wright 2000) from four points."""
    across, up = _points(x, y, False)
    count = len(across)
    if count < 2 or np.ptp(across) == 0 or np.ptp(up) == 0:
        return Interval(NAN, NAN, NAN, count, "points", level)
    found = spearman(across, up).value
    if count < 4:
        return Interval(found, NAN, NAN, count, "points", level)
    if abs(found) > 1 - 1e-12:  # Fisher's z has no end there: the interval is that of the next rank below
        found, z = math.copysign(1.0, found), math.copysign(math.atanh(1 - 6 / (count**3 - count)), found)
    else:
        z = math.atanh(found)
    reach = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt((1 + math.tanh(z) ** 2 / 2) / (count - 3))
    low, high = math.tanh(z - reach), math.tanh(z + reach)
    return Interval(found, min(low, found), max(high, found), count, "points", level)


@dataclass(frozen=True, slots=True)
class CostPoint:
    """A number, and what it cost to come to it."""

    value: float
    epochs: float
    passes: float  # forward-and-backward passes over the training samples
    seconds: float


def at_cost(course: Sequence[CostPoint], cost: float, by: Cost) -> float:
    """Return what a course of costs and numbers comes to at a cost, between two of its points by a straight line."""
    points = sorted((getattr(each, by), each.value) for each in course)
    for at, number in points:
        if math.isclose(at, cost, rel_tol=1e-9):
            return float(number)
    for (left, low), (right, high) in pairwise(points):
        if left < cost < right:
            return float(low + (high - low) * (cost - left) / (right - left))
    return NAN


def at_equal_cost(
    mine: Sequence[Sequence[CostPoint]], baseline: Sequence[Sequence[CostPoint]], by: Cost, *, level: float = LEVEL
) -> tuple[float, Interval]:
    """Return the largest cost that all courses came to, and the paired difference from the baseline there.

    There is one course a repetition: runs of several lengths, or one run as it went. Where a course has nothing at that
    cost the repetition is left out, so that of single points only those of equal cost are compared.
    """
    courses = [course for course in (*mine, *baseline) if course]
    if len(mine) != len(baseline) or len(courses) < len(mine) + len(baseline) or not courses:
        raise ValueError(f"{len(mine)} courses against {len(baseline)}: give one of each for every repetition")
    cost = min(max(float(getattr(each, by)) for each in course) for course in courses)
    here, there = ([at_cost(course, cost, by) for course in each] for each in (mine, baseline))
    return cost, paired_t_interval(here, there, level=level)


@lru_cache(maxsize=1024)
def t_quantile(share: float, freedom: int) -> float:
    """Return below what value Student's t lies with probability `share`, for whole degrees of freedom.

    >>> round(t_quantile(0.975, 1), 3), round(t_quantile(0.975, 4), 3)
    (12.706, 2.776)
    """
    if not 0 < share < 1 or freedom < 1:
        raise ValueError(f"share = {share}, freedom = {freedom}: a share lies between 0 and 1, freedom is 1 or more")
    if share < 0.5:
        return -t_quantile(1 - share, freedom)
    low, high = 0.0, math.pi / 2
    for _ in range(80):  # halves the angle until no bit is left
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 2 * share - 1 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return the probability of |t| <= tan(angle) sqrt(freedom): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = (cosine if odd else 1.0) if freedom > 1 else 0.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def _by_t(numbers: Floats, over: str, level: float) -> Interval:
    count = len(numbers)
    if count < 2:
        return Interval(_mean(list(numbers)), NAN, NAN, count, over, level)
    error = float(numbers.std(ddof=1)) / math.sqrt(count)
    return _around(float(numbers.mean()), error, count - 1, count, over, level)


def _around(number: float, error: float, freedom: int, count: int, over: str, level: float) -> Interval:
    reach = t_quantile((1 + level) / 2, freedom) * error
    return Interval(number, number - reach, number + reach, count, over, level)


def _finite(numbers: ArrayLike) -> Floats:
    found = np.asarray(numbers, dtype=np.float64).reshape(-1)
    return found[np.isfinite(found)]


def _points(x: ArrayLike, y: ArrayLike, log: bool) -> tuple[Floats, Floats]:
    across, up = (np.asarray(given, dtype=np.float64).reshape(-1) for given in (x, y))
    if len(across) != len(up):
        raise ValueError(f"{len(across)} numbers against {len(up)}: give one of each for every point")
    usable = np.isfinite(across) & np.isfinite(up)
    if log:
        usable &= (across > 0) & (up > 0)
        across, up = np.log(across[usable]), np.log(up[usable])
        return across, up
    return across[usable], up[usable]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else NAN
