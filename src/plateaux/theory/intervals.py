"""Intervals by Student's t, for means over few matrices."""

from __future__ import annotations

from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.stats.intervals import t_quantile
from plateaux.core.types import Estimate
from plateaux.theory.phi import Floats


def interval(values: Floats, *, among: int = 1) -> tuple[float, float]:
    """Return the 95 % interval of a mean; with `among`, so wide that all of so many intervals hold at once."""
    return around(mean_of_independent(values.tolist()), len(values), among=among)


def around(mean: Estimate, count: int, *, among: int = 1) -> tuple[float, float]:
    """Return the 95 % interval of a mean of so many numbers, from its standard error."""
    half = t_quantile(1 - 0.025 / among, count - 1) * (mean.stderr or 0.0)
    return mean.value - half, mean.value + half
