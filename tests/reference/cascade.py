"""Reference cascade: one sample after another, one member after another, with NumPy and scipy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

Floats = NDArray[np.float64]


def probabilities(logits: Floats) -> Floats:
    """The softmax of one member's logits [C]."""
    p = np.exp(logits - logits.max())
    return np.asarray(p / p.sum())


def ask(logits: Floats, stages: Sequence[int], threshold: float | None) -> tuple[int, Floats]:
    """The number of members that one sample needs, and their mean probability; logits are [M, C]."""
    said: list[Floats] = []
    for member in logits:
        said.append(probabilities(member))
        mean = np.mean(said, axis=0)
        agree = all(p.argmax() == said[0].argmax() for p in said)
        if threshold is not None and len(said) in stages and agree and mean.max() >= threshold:
            return len(said), mean
    return len(said), mean


def harmed(logits: Floats, stages: Sequence[int], threshold: float, y: Sequence[int] | None) -> int:
    """How many samples of logits [M, N, C] the cascade alone gets wrong; without labels, predicts differently."""
    count = 0
    for i in range(logits.shape[1]):
        _, mean = ask(logits[:, i], stages, threshold)
        _, full = ask(logits[:, i], stages, None)
        differs = mean.argmax() != full.argmax()
        count += bool(differs and (y is None or full.argmax() == y[i]))
    return count


def fit(
    logits: Floats, stages: Sequence[int], y: Sequence[int] | None, max_harm: float, confidence: float
) -> tuple[float | None, int]:
    """The last threshold of the sequence that passes, and its count."""
    passed: tuple[float | None, int] = None, 0
    for step in range(50):
        threshold = 1 - (step / 49) ** 2
        count = harmed(logits, stages, threshold, y)
        if binom.cdf(count, logits.shape[1], max_harm) > 1 - confidence:
            return passed
        passed = threshold, count
    return passed
