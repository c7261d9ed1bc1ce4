"""The OOD alarm: the threshold of an OOD score above which an input is reported as out of distribution.

The threshold is the k-th smallest score of n held-out samples, k = ceil((n + 1)(1 - rate)). If held-out and new samples
are exchangeable, the alarm is false for a new sample with a probability of at most `rate`, whatever the score. For
one fitted threshold, the probability varies; the Clopper-Pearson interval of the held-out samples above it contains the
probability with 95 % confidence. Importing this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.ranges import Finite, StoredInt

CONFIDENCE = 0.95  # of the interval


@dataclass(frozen=True, slots=True, kw_only=True)
class OodOptions:
    """How the alarm is fitted: its rate of false alarms, and OOD sets by name to choose the score on, if there are any.

    The sets are names or folders, or inputs by name: `["cifar100", "./photos"]`, `{"noise": x}`.
    """

    false_alarms: float = 0.05
    near: Sequence[str] | Mapping[str, Any] = ()

    def __post_init__(self) -> None:
        if not 0 < self.false_alarms < 1:
            raise RecipeError(f"false_alarms = {self.false_alarms}: give a rate between 0 and 1, such as 0.05")


@dataclass(frozen=True, slots=True)
class OodAlarm:
    """The fitted threshold of one score, and the held-out samples that it was fitted on."""

    rate: Finite  # of false alarms, at most
    threshold: Finite | None  # an input with a larger score is out of distribution; None: too few samples
    low: Finite  # of the interval of the probability of a false alarm
    high: Finite
    mean: Finite  # of the score of the held-out samples, to compare that of new inputs with
    std: Finite
    samples: StoredInt

    @property
    def remark(self) -> str:
        """Why there is no alarm; empty: there is one."""
        if self.threshold is not None:
            return ""
        needed = math.ceil((1 - (rate := Fraction(str(self.rate)))) / rate)
        return (
            f"no OOD alarm (is_ood): {self.samples} held-out samples are too few for a rate of {self.rate:g}, which "
            f"needs at least {needed}"
        )

    def describe(self) -> str:
        """Return what is known about false alarms."""
        interval = f"{100 * CONFIDENCE:g} % interval {100 * self.low:.2g} to {100 * self.high:.2g} %"
        return f"at most {100 * self.rate:g} % false alarms ({interval})"


def fit(scores: NDArray[Any], rate: float) -> OodAlarm:
    """Fit the threshold of an alarm that is false for a fraction `rate` of samples like those with these scores `[N]`.

    >>> alarm = fit(np.arange(99), 0.05)
    >>> alarm.threshold, round(alarm.low, 3), round(alarm.high, 3)
    (94.0, 0.011, 0.1)
    """
    from plateaux.ensembles.selective import upper_bound  # imports torch

    count, values = len(scores), np.sort(scores.astype(np.float64))
    if not count:
        raise DataError("No held-out sample is left to fit the OOD alarm on; give more of them, or no OOD sets")
    rank = math.ceil((count + 1) * (1 - Fraction(str(float(rate)))))
    about = float(values.mean()), float(values.std()), count
    if rank > count:
        return OodAlarm(rate, None, 0.0, 1.0, *about)
    threshold, delta = float(values[rank - 1]), (1 - CONFIDENCE) / 2
    above = int((values > threshold).sum())
    low, high = 1 - upper_bound(count - above, count, delta), upper_bound(above, count, delta)
    return OodAlarm(rate, threshold, low, high, *about)
