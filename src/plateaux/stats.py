"""Estimates, means, confidence intervals, and seeds, as the tables of Plateaux use them."""

from plateaux.core.plain_types import Estimate, derive_seed
from plateaux.core.stats.estimates import mean_of_independent
from plateaux.core.stats.intervals import Interval, interval_from_stderr, paired_t_interval, t_interval

__all__ = [
    "Estimate",
    "Interval",
    "derive_seed",
    "interval_from_stderr",
    "mean_of_independent",
    "paired_t_interval",
    "t_interval",
]
