"""How well a score tells two sets of samples apart: areas and rates of ranks, each with its standard error.

One convention throughout: a larger score means further out of distribution, and out-of-distribution (`outside`) samples
are the positives. So a true positive is an outside sample that is caught, a false positive an inside one that is.
`spearman` is about one set: how well two scores agree about the order of its samples.
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
    """The chance that an outside sample scores higher than an inside one, ties counting half.

    The standard error is that of DeLong, DeLong and Clarke-Pearson (1988); one sample of a kind gives none.
    """
    low, high = _scores(inside, "inside"), _scores(outside, "outside")
    caught, missed = _twice_below(high, low), _twice_below(low, high)
    # Whole numbers until the last division: equal sets give exactly one half.
    area = int(caught.sum()) / (2 * len(low) * len(high))
    return Estimate(area, _error(caught / (2 * len(low)), missed / (2 * len(high))))


def aupr(inside: ArrayLike, outside: ArrayLike, positive: Literal["outside", "inside"] = "outside") -> Estimate:
    """The average precision of finding the positive samples: precision at each of them, averaged.

    It is the sum over thresholds of precision times the gain in recall, tied samples entering together and nothing
    interpolated. With `inside` positive, scores are negated. The standard error is by the delta method, from the
    influence of every sample on the average, given how many there are of each kind.
    """
    low, high = _scores(inside, "inside"), _scores(outside, "outside")
    if positive not in ("outside", "inside"):
        raise ValueError(f"positive = {positive!r}; give 'outside' or 'inside'.")
    found, other = (np.sort(high), np.sort(low)) if positive == "outside" else (np.sort(-low), np.sort(-high))
    right = len(found) - np.searchsorted(found, found, "left")  # positives that score at least as high as each positive
    wrong = len(other) - np.searchsorted(other, found, "left")
    precision = right / (right + wrong)
    square = (right + wrong).astype(np.float64) ** 2
    lifts = precision + _up_to(wrong / square, found, found)
    spoils = _up_to(right / square, found, other) * (len(other) / len(found))
    return Estimate(float(precision.mean()), _error(lifts, spoils))


def fpr_at_tpr(inside: ArrayLike, outside: ArrayLike, tpr: float = 0.95) -> Estimate:
    """The share of inside samples caught at the largest threshold that catches at least `tpr` of the outside ones.

    A sample is caught when it scores at least the threshold, so ties are caught together. The standard error is
    binomial, over the inside samples: the threshold is taken as given.
    """
    low, high = _scores(inside, "inside"), _scores(outside, "outside")
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr = {tpr} is no share of samples to catch; give a number above 0 and up to 1.")
    # In fractions: 0.95 of 20 samples are 19, whatever the rounding of floats makes of it.
    needed = ceil(Fraction(str(float(tpr))) * len(high))
    threshold = np.sort(high)[len(high) - needed]
    share = float(np.mean(low >= threshold))
    return Estimate(share, (share * (1 - share) / len(low)) ** 0.5)


def spearman(one: ArrayLike, other: ArrayLike) -> Estimate:
    """Spearman's rank correlation of two scores of the same samples, tied samples sharing their mean rank.

    With F and G the shares of samples below (ties counting half), it is E[(F - 1/2)(G - 1/2)] over its largest value.
    The standard error is by the delta method, from the influence of every sample: by its own ranks, and by how it
    shifts those of the others. A score that is the same for all samples has no ranks: the number is nan.
    """
    x, y = _scores(one, "first"), _scores(other, "second")
    if len(x) != len(y):
        raise ValueError(f"There are {len(x)} first scores and {len(y)} second ones; give both for the same samples.")
    f, g = (_twice_below(s, s) / (2 * len(s)) - 0.5 for s in (x, y))
    largest = float(np.sqrt((f * f).mean() * (g * g).mean()))
    if largest == 0:
        return Estimate(float("nan"))
    found = float((f * g).mean()) / largest
    together = f * g + _lifted(x, g) + _lifted(y, f)
    # Of the largest value too: it is the same for all sets of samples only where there are no ties.
    own = sum((s * s + 2 * _lifted(at, s)) / (s * s).mean() for at, s in ((x, f), (y, g)))
    influence = together / largest - found / 2 * own
    return Estimate(min(max(found, -1.0), 1.0), float(influence.std(ddof=1)) / len(x) ** 0.5)


def _lifted(scores: Scores, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for every score, the mean over all samples of their weights where it is below them, half where equal."""
    order = np.argsort(scores, kind="stable")
    at = scores[order]
    sums = np.concatenate([[0.0], np.cumsum(weights[order])])
    below, up_to = (sums[np.searchsorted(at, scores, side)] for side in ("left", "right"))
    lifted: NDArray[np.float64] = (sums[-1] - (below + up_to) / 2) / len(scores)
    return lifted


def _scores(given: ArrayLike, name: str) -> Scores:
    scores = np.asarray(given, dtype=np.float64)
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"The {name} scores have shape {list(scores.shape)}; give one number for each sample, [N].")
    if np.isnan(scores).any():
        raise ValueError(
            f"{int(np.isnan(scores).sum())} of {len(scores)} {name} scores are nan, which has no rank; leave those "
            "samples out, or mend the score."
        )
    return scores


def _twice_below(scores: Scores, others: Scores) -> NDArray[np.int64]:
    """Return, for every score, twice the number of the others below it, equal ones counting half."""
    order = np.sort(others)
    return np.searchsorted(order, scores, "left") + np.searchsorted(order, scores, "right")


def _up_to(weights: NDArray[np.float64], at: Scores, scores: Scores) -> NDArray[np.float64]:
    """Return, for every score, the sum of the weights whose place (`at`, sorted) is at most that score."""
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    return sums[np.searchsorted(at, scores, "right")]


def _error(ones: NDArray[Any], others: NDArray[Any]) -> float | None:
    """Return the standard error of a number from its samples' influences, of the two kinds."""
    if min(len(ones), len(others)) < 2:
        return None
    return float(np.sqrt(ones.var(ddof=1) / len(ones) + others.var(ddof=1) / len(others)))
