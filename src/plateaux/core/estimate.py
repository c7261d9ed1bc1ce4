"""An estimate: a value with its standard errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its standard errors, if there are any.

    `stderr` is due to the finite number of samples, `mc_stderr` to the random numbers of a Monte-Carlo estimate.
    """

    value: float
    stderr: float | None = None
    mc_stderr: float | None = None
