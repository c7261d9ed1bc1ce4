"""Which of several conditions differ: paired differences over repetitions, and Holm's correction for many of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from plateaux.core.formatting import format_with_error
from plateaux.core.stats.intervals import LEVEL, Interval, p_value, paired_t_interval, t_interval

Correction = Literal["none", "holm"]
CORRECTIONS: tuple[Correction, ...] = ("none", "holm")
Repetitions = Mapping[int, float]  # the number of each repetition


@dataclass(frozen=True, slots=True)
class Inference:
    """What ± means in a report or a table, and the correction for several comparisons.

    Corrected together are the comparisons of one metric: all pairs of conditions, or all differences from a baseline.
    """

    standard_errors: bool = False
    correction: Correction = "none"

    @property
    def meaning(self) -> str:
        """What ± is."""
        return "one standard error" if self.standard_errors else "half of a 95 % interval"

    @property
    def criterion(self) -> str:
        """When a difference is distinguished."""
        holm = ", corrected by Holm for all comparisons of the metric" if self.correction == "holm" else ""
        return f"its paired 95 % interval excludes zero{holm}"

    def error(self, interval: Interval) -> float:
        """Return the number after ±; NaN if there is none."""
        return interval.stderr if self.standard_errors else interval.half

    def format(self, interval: Interval, percent: bool = False) -> str:
        """Return the value with its error as text."""
        return format_with_error(interval.value, self.error(interval), percent)

    def distinguished(self, differences: Sequence[Interval]) -> list[bool]:
        """Return for each difference whether it is distinguished from zero; one without an interval is not."""
        p_values = [p_value(difference) for difference in differences]
        return [p < 1 - LEVEL for p in (holm(p_values) if self.correction == "holm" else p_values)]

    def find_best(self, groups: Sequence[Repetitions], *, higher_is_better: bool) -> int | None:
        """Return the position of the best group if its difference from the runner-up is distinguished."""
        means = [t_interval(list(group.values())).value for group in groups]
        finite = [position for position, mean in enumerate(means) if math.isfinite(mean)]
        ranked = sorted(finite, key=lambda position: means[position], reverse=higher_is_better)
        pairs = list(combinations(ranked if self.correction == "holm" else ranked[:2], 2))
        distinguished = self.distinguished([paired_difference(groups[i], groups[j]) for i, j in pairs])
        return ranked[0] if distinguished and distinguished[0] else None


DEFAULT = Inference()


def paired_difference(ours: Repetitions, theirs: Repetitions) -> Interval:
    """Return the mean difference over the repetitions that both have, with its interval."""
    both = sorted(ours.keys() & theirs.keys())
    return paired_t_interval([ours[r] for r in both], [theirs[r] for r in both])


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number by Holm (1979), in the same order.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
