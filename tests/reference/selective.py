"""Reference areas under risk-coverage curves, with all samples in memory in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def cumulative_weights(count: int) -> Floats:
    """The sum over ranks 1 to i of H_n - H_(i-1), for i = 0 to n: the weight of an error at rank i."""
    tail = (1 / np.arange(1, count + 1))[::-1].cumsum()[::-1]  # H_n - H_(i-1)
    return np.append(0.0, tail.cumsum())


def areas(neg_log: Floats, incorrect: Floats) -> tuple[float, Floats]:
    """The area under the risk-coverage curve, and that without each sample."""
    count = len(neg_log)
    _, group, size = np.unique(neg_log, return_inverse=True, return_counts=True)
    end, errors = size.cumsum(), np.bincount(group, incorrect)
    start, rate = end - size, errors / size
    full, less = cumulative_weights(count), cumulative_weights(count - 1)
    area = float((rate * (full[end] - full[start])).sum() / count)
    stay = rate * (less[end.clip(max=count - 1)] - less[start])
    move = rate * (less[end - 1] - less[(start - 1).clip(0)])
    others = stay.cumsum() - stay + move.sum() - move.cumsum()
    tied = (errors[group] - incorrect) / (size - 1).clip(1)[group] * (less[end - 1] - less[start])[group]
    return area, (others[group] + tied) / (count - 1)


def best(incorrect: Floats) -> tuple[float, Floats]:
    """The smallest area for this number of errors, and that without each sample."""
    count, errors = len(incorrect), int(incorrect.sum())
    full, less = cumulative_weights(count), cumulative_weights(count - 1)
    left = errors - incorrect.astype(np.int64)
    return float((full[count] - full[count - errors]) / count), (less[-1] - less[count - 1 - left]) / (count - 1)


def jackknife(without: Floats) -> float:
    """The jackknife standard error from the values without each sample."""
    count = len(without)
    return float(np.sqrt(((without - without.mean()) ** 2).sum() * (count - 1) / count))


def calibration(neg_log: Floats, incorrect: Floats, bins: int) -> tuple[float, float]:
    """The adaptive calibration error and its standard error."""
    confidence = np.exp(-neg_log)
    gap = 1 - incorrect - confidence
    bin_index = np.searchsorted(np.sort(confidence), confidence) * bins // len(neg_log)
    inside = [gap[bin_index == i] for i in range(bins)]
    spread = sum(len(gaps) * gaps.var(ddof=1) for gaps in inside if len(gaps) > 1)
    return sum(abs(gaps.sum()) for gaps in inside) / len(neg_log), float(np.sqrt(spread)) / len(neg_log)
