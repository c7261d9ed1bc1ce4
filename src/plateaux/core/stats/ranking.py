"""Rank statistics with standard errors: AUROC, AUPR, and FPR at a given TPR for out-of-distribution detection.

A larger score means further out of distribution, and out-of-distribution (`outside`) samples are the positives: a true
positive is a detected outside sample, a false positive is a detected inside sample. `spearman` is the rank correlation
of two scores of the same samples.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plateaux.core.types import Estimate

Scores = NDArray[np.float64]


def auroc(inside: ArrayLike, outside: ArrayLike) -> Estimate:
    """Area under the ROC curve: the probability that an outside sample scores higher than an inside one.

    Ties count half. The standard error is that of DeLong, DeLong and Clarke-Pearson (1988); it needs two samples of
    each kind.
    """
    low, high = _scores(inside, "inside"), _scores(outside, "outside")
    wins, losses = _twice_below(high, low), _twice_below(low, high)
    # Integers until the last division, so that equal sets give exactly one half.
    area = int(wins.sum()) / (2 * len(low) * len(high))
    return Estimate(area, _stderr(wins / (2 * len(low)), losses / (2 * len(high))))


def aupr(inside: ArrayLike, outside: ArrayLike, positive: Literal["outside", "inside"] = "outside") -> Estimate:
    """Area under the precision-recall curve as average precision: the mean of the precision at each positive sample.

    It is the sum over thresholds of precision times the gain in recall, without interpolation; tied samples enter at
    one threshold. With `inside` positive, scores are negated. The standard error follows from the influence of each
    sample on the average (delta method), given the number of samples of each kind.
    """
    low, high = _scores(inside, "inside"), _scores(outside, "outside")
    if positive not in ("outside", "inside"):
        raise ValueError(f"positive = {positive!r}; give 'outside' or 'inside'.")
    positives, negatives = (np.sort(high), np.sort(low)) if positive == "outside" else (np.sort(-low), np.sort(-high))
    # Positives and negatives that score at least as high as each positive.
    true = len(positives) - np.searchsorted(positives, positives, "left")
    false = len(negatives) - np.searchsorted(negatives, positives, "left")
    precision = true / (true + false)
    square = (true + false).astype(np.float64) ** 2
    gains = precision + _up_to(false / square, positives, positives)
    losses = _up_to(true / square, positives, negatives) * (len(negatives) / len(positives))
    return Estimate(float(precision.mean()), _stderr(gains, losses))


def fpr_at_tpr(inside: ArrayLike, outside: ArrayLike, tpr: float = 0.95) -> Estimate:
    """False-positive rate at the largest threshold with a true-positive rate of at least `tpr`.

    A sample is detected if its score reaches the threshold, so tied samples are detected at once. The standard error
    is binomial over the inside samples, for a fixed threshold.
    """
    low, high = _scores(inside, "inside"), _scores(outside, "outside")
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr = {tpr}; give a number above 0 and at most 1.")
    # Exact fractions: 0.95 of 20 samples is 19, without float rounding.
    needed = ceil(Fraction(str(float(tpr))) * len(high))
    threshold = np.sort(high)[len(high) - needed]
    share = float(np.mean(low >= threshold))
    return Estimate(share, (share * (1 - share) / len(low)) ** 0.5)


def spearman(one: ArrayLike, other: ArrayLike) -> Estimate:
    """Spearman's rank correlation of two scores of the same samples; tied samples share their mean rank.

    With F and G the fractions of samples below (ties count half), it is E[(F - 1/2)(G - 1/2)] over its largest value.
    The standard error follows from the influence of each sample (delta method): by its own ranks, and by its effect on
    the ranks of the others. The value is NaN if a score is the same for all samples.
    """
    x, y = _scores(one, "first"), _scores(other, "second")
    if len(x) != len(y):
        raise ValueError(f"There are {len(x)} first and {len(y)} second scores; give both for the same samples.")
    f, g = (_twice_below(s, s) / (2 * len(s)) - 0.5 for s in (x, y))
    largest = float(np.sqrt((f * f).mean() * (g * g).mean()))
    if largest == 0:
        return Estimate(float("nan"))
    rho = float((f * g).mean()) / largest
    product = f * g + _mean_above(x, g) + _mean_above(y, f)
    # The largest value has an influence too: with ties, it depends on the samples.
    own = sum((s * s + 2 * _mean_above(at, s)) / (s * s).mean() for at, s in ((x, f), (y, g)))
    influence = product / largest - rho / 2 * own
    return Estimate(min(max(rho, -1.0), 1.0), float(influence.std(ddof=1)) / len(x) ** 0.5)


def _mean_above(scores: Scores, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each score the mean over all samples of the weights of larger scores; equal scores count half."""
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    sums = np.concatenate([[0.0], np.cumsum(weights[order])])
    below, up_to = (sums[np.searchsorted(ordered, scores, side)] for side in ("left", "right"))
    means: NDArray[np.float64] = (sums[-1] - (below + up_to) / 2) / len(scores)
    return means


def _scores(values: ArrayLike, name: str) -> Scores:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"The {name} scores have shape {list(scores.shape)}; give one number for each sample, [N].")
    if np.isnan(scores).any():
        raise ValueError(
            f"{int(np.isnan(scores).sum())} of {len(scores)} {name} scores are NaN, which has no rank. Leave those "
            "samples out, or fix the score."
        )
    return scores


def _twice_below(scores: Scores, others: Scores) -> NDArray[np.int64]:
    """Return for each score twice the number of the others below it; equal scores count half."""
    order = np.sort(others)
    return np.searchsorted(order, scores, "left") + np.searchsorted(order, scores, "right")


def _up_to(weights: NDArray[np.float64], at: Scores, scores: Scores) -> NDArray[np.float64]:
    """Return for each score the sum of the weights at positions (`at`, sorted) up to that score."""
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    return sums[np.searchsorted(at, scores, "right")]


def _stderr(inside: NDArray[Any], outside: NDArray[Any]) -> float | None:
    """Return the standard error of an estimate from the influences of its samples, for both kinds of samples."""
    if min(len(inside), len(outside)) < 2:
        return None
    return float(np.sqrt(inside.var(ddof=1) / len(inside) + outside.var(ddof=1) / len(outside)))
