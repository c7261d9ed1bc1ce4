"""Confidence intervals: Student's t over repetitions, and of a slope.

Every interval records what it is over. A nominal 95 % bootstrap of two or three repetitions covers only 50 to 75 %, so
repetitions are never resampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plateaux.core.types import Estimate

LEVEL = 0.95
NAN = float("nan")
Cost = Literal["epochs", "passes", "seconds"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A number with its confidence interval at `level`; the ends are NaN if no interval can be computed."""

    value: float
    low: float
    high: float
    count: int  # of repetitions, samples, members, or points
    over: str  # repetitions, test samples, members, points
    level: float = LEVEL
    stderr: float = NAN

    @property
    def half(self) -> float:
        """Half the width."""
        return (self.high - self.low) / 2


def t_interval(numbers: ArrayLike, *, level: float = LEVEL, simultaneous: int = 1) -> Interval:
    """Return the mean over repetitions with its Student-t interval; one repetition has no interval.

    With `simultaneous` = s the interval is one of s that hold jointly at `level` (Bonferroni).

    >>> t_interval([1.0, 3.0]).half > 12
    True
    """
    return _t_interval(_finite(numbers), "repetitions", level, simultaneous)


def interval_from_stderr(
    mean: Estimate, count: int, *, over: str = "repetitions", level: float = LEVEL, simultaneous: int = 1
) -> Interval:
    """Return the Student-t interval of a mean of `count` numbers from its standard error.

    With `simultaneous` = s the interval is one of s that hold jointly at `level` (Bonferroni).
    """
    return _around(mean.value, mean.stderr or 0.0, count - 1, count, over, level, simultaneous)


def paired_t_interval(numbers: ArrayLike, baseline: ArrayLike, *, level: float = LEVEL) -> Interval:
    """Return the mean difference from a baseline over the same repetitions, with its Student-t interval."""
    ours, theirs = (np.asarray(values, dtype=np.float64) for values in (numbers, baseline))
    if ours.shape != theirs.shape:
        raise ValueError(
            f"Cannot pair {ours.size} numbers with {theirs.size}. Give both for the same repetitions, in one order."
        )
    return _t_interval(_finite(ours - theirs), "paired repetitions", level)


def p_value(interval: Interval) -> float:
    """Return the two-sided p-value of zero from a Student-t interval over repetitions; 1 if there is no interval.

    >>> round(p_value(t_interval([1.0, 3.0])), 3)
    0.295
    """
    if math.isnan(interval.stderr):
        return 1.0
    if interval.stderr == 0:
        return float(interval.value == 0)
    freedom = interval.count - 1
    angle = math.atan(abs(interval.value / interval.stderr) / math.sqrt(freedom))
    return 1 - _probability_within(angle, freedom)


def slope(x: ArrayLike, y: ArrayLike, *, level: float = LEVEL) -> Interval:
    """Return the least-squares slope of y on x on log-log axes, with its t interval.

    It is the exponent beta of diversity ~ sharpness^beta; points that are not positive are left out.
    """
    across, up = _log_points(x, y)
    count = len(across)
    spread = float(((across - across.mean()) ** 2).sum()) if count else 0.0
    if count < 2 or spread == 0:
        return Interval(NAN, NAN, NAN, count, "points", level)
    beta = float(((across - across.mean()) * (up - up.mean())).sum()) / spread
    if count < 3:
        return Interval(beta, NAN, NAN, count, "points", level)
    residuals = up - up.mean() - beta * (across - across.mean())
    error = math.sqrt(float((residuals**2).sum()) / (count - 2) / spread)
    return _around(beta, error, count - 2, count, "points", level)


@dataclass(frozen=True, slots=True)
class CostPoint:
    """A number and the training cost at which it was reached."""

    value: float
    epochs: float
    passes: float  # forward-and-backward passes over the training samples
    seconds: float


def at_cost(curve: Sequence[CostPoint], cost: float, by: Cost) -> float:
    """Return the value of a cost curve at a cost, by linear interpolation; NaN outside of the curve."""
    points = sorted((getattr(point, by), point.value) for point in curve)
    for at, number in points:
        if math.isclose(at, cost, rel_tol=1e-9):
            return float(number)
    for (left, low), (right, high) in pairwise(points):
        if left < cost < right:
            return float(low + (high - low) * (cost - left) / (right - left))
    return NAN


def at_equal_cost(
    ours: Sequence[Sequence[CostPoint]], baseline: Sequence[Sequence[CostPoint]], by: Cost, *, level: float = LEVEL
) -> tuple[float, Interval]:
    """Return the largest cost that all curves reach, and the paired difference from the baseline at that cost.

    There is one curve per repetition: runs of several lengths, or one run over its training. A repetition with no value
    at that cost is left out, so curves of one point each are compared only at equal cost.
    """
    curves = [curve for curve in (*ours, *baseline) if curve]
    if len(ours) != len(baseline) or len(curves) < len(ours) + len(baseline) or not curves:
        raise ValueError(
            f"Got {len(ours)} cost curves and {len(baseline)} of the baseline. Give one nonempty curve of each for "
            "every repetition."
        )
    cost = min(max(float(getattr(point, by)) for point in curve) for curve in curves)
    values, reference = ([at_cost(curve, cost, by) for curve in several] for several in (ours, baseline))
    return cost, paired_t_interval(values, reference, level=level)


@lru_cache(maxsize=1024)
def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution for an integer number of degrees of freedom.

    >>> round(t_quantile(0.975, 1), 3), round(t_quantile(0.975, 4), 3)
    (12.706, 2.776)
    """
    if not 0 < probability < 1 or freedom < 1:
        raise ValueError(
            f"probability = {probability}, freedom = {freedom}: give a probability between 0 and 1, and 1 or more "
            "degrees of freedom."
        )
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, math.pi / 2
    for _ in range(80):  # bisection down to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if _probability_within(middle, freedom) < 2 * probability - 1 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _probability_within(angle: float, freedom: int) -> float:
    """Return the probability of |t| <= tan(angle) sqrt(freedom): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = (cosine if odd else 1.0) if freedom > 1 else 0.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def _t_interval(numbers: Floats, over: str, level: float, simultaneous: int = 1) -> Interval:
    count = len(numbers)
    if count < 2:
        return Interval(_mean(list(numbers)), NAN, NAN, count, over, level)
    error = float(numbers.std(ddof=1)) / math.sqrt(count)
    return _around(float(numbers.mean()), error, count - 1, count, over, level, simultaneous)


def _around(
    number: float, error: float, freedom: int, count: int, over: str, level: float, simultaneous: int = 1
) -> Interval:
    half = t_quantile(1 - (1 - level) / 2 / simultaneous, freedom) * error
    return Interval(number, number - half, number + half, count, over, level, error)


def _finite(numbers: ArrayLike) -> Floats:
    values = np.asarray(numbers, dtype=np.float64).reshape(-1)
    return values[np.isfinite(values)]


def _log_points(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    across, up = (np.asarray(values, dtype=np.float64).reshape(-1) for values in (x, y))
    if len(across) != len(up):
        raise ValueError(f"Got {len(across)} values of x and {len(up)} of y. Give one of each for every point.")
    usable = np.isfinite(across) & np.isfinite(up) & (across > 0) & (up > 0)
    return np.log(across[usable]), np.log(up[usable])


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else NAN
