"""Reference areas under risk-coverage curves, with all samples in memory in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def reach(count: int) -> Floats:
    """The sum over places 1 to i of H_n - H_(i-1), for i = 0 to n: a wrong guess at place i counts so often."""
    tail = (1 / np.arange(1, count + 1))[::-1].cumsum()[::-1]  # H_n - H_(i-1)
    return np.append(0.0, tail.cumsum())


def areas(doubt: Floats, wrong: Floats) -> tuple[float, Floats]:
    """The area under the risk-coverage curve, and that without each of the samples in turn."""
    count = len(doubt)
    _, group, size = np.unique(doubt, return_inverse=True, return_counts=True)
    end, errors = size.cumsum(), np.bincount(group, wrong)
    start, rate = end - size, errors / size
    full, less = reach(count), reach(count - 1)
    area = float((rate * (full[end] - full[start])).sum() / count)
    stay = rate * (less[end.clip(max=count - 1)] - less[start])
    move = rate * (less[end - 1] - less[(start - 1).clip(0)])
    others = stay.cumsum() - stay + move.sum() - move.cumsum()
    tied = (errors[group] - wrong) / (size - 1).clip(1)[group] * (less[end - 1] - less[start])[group]
    return area, (others[group] + tied) / (count - 1)


def best(wrong: Floats) -> tuple[float, Floats]:
    """The least area that as many errors can have, and that without each of the samples in turn."""
    count, errors = len(wrong), int(wrong.sum())
    full, less = reach(count), reach(count - 1)
    left = errors - wrong.astype(np.int64)
    return float((full[count] - full[count - errors]) / count), (less[-1] - less[count - 1 - left]) / (count - 1)


def jackknife(without: Floats) -> float:
    """The standard error of a number from what it is without each of the samples."""
    count = len(without)
    return float(np.sqrt(((without - without.mean()) ** 2).sum() * (count - 1) / count))


def calibration(doubt: Floats, wrong: Floats, bins: int) -> tuple[float, float]:
    """The adaptive calibration error and its standard error."""
    confidence = np.exp(-doubt)
    gap = 1 - wrong - confidence
    home = np.searchsorted(np.sort(confidence), confidence) * bins // len(doubt)
    inside = [gap[home == i] for i in range(bins)]
    spread = sum(len(each) * each.var(ddof=1) for each in inside if len(each) > 1)
    return sum(abs(each.sum()) for each in inside) / len(doubt), float(np.sqrt(spread)) / len(doubt)
