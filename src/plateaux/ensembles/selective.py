"""Selective prediction: the largest error probability at which a prediction is accepted, for a target risk.

Samples are ordered by increasing error probability; ties are accepted or rejected together. Without a bound, the
threshold is the one of largest coverage whose fraction of incorrect held-out predictions is at most the target risk.
It is chosen among many, so the risk on new samples can be somewhat higher. With a bound, the true risk exceeds the
target with probability of at most delta: stages that do not depend on the errors (equal steps of coverage) are tested
in sequence, each at level delta, until one fails. Fixed-sequence testing needs no correction for the number of tests.
Stages too small to pass even without an error are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError, suggest

Bound = Literal["none", "clopper-pearson", "hoeffding"]
BOUNDS: tuple[Bound, ...] = ("none", "clopper-pearson", "hoeffding")


@dataclass(frozen=True, slots=True)
class RejectionThreshold:
    """The largest error probability at which a prediction is accepted, and the result on held-out samples."""

    risk: float  # the target
    at: float | None  # None: reject every prediction
    coverage: float  # fraction of held-out samples that are accepted
    observed: float | None  # fraction of those that are incorrect; None: none were accepted
    upper: float | None  # upper confidence bound of the risk, with a bound
    samples: int
    bound: Bound = "none"
    delta: float = 0.05
    remark: str = ""

    def accepts(self, error_probability: Tensor) -> Tensor:
        """Return a mask `[N]` of the accepted predictions; an error probability of NaN is rejected."""
        if self.at is None:
            return torch.zeros_like(error_probability, dtype=torch.bool)
        return error_probability.double() <= self.at

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values; an infinite threshold becomes the text `inf` or `-inf`."""
        is_finite = self.at is None or math.isfinite(self.at)
        return {**asdict(self), "at": self.at if is_finite else str(self.at)}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> RejectionThreshold:
        """Rebuild this from the result of `to_dict`."""
        return cls(**{**tree, "at": None if tree["at"] is None else float(tree["at"])})


def fit(
    error_probability: Tensor,
    incorrect: Tensor,
    risk: float,
    *,
    bound: Bound = "clopper-pearson",
    delta: float = 0.05,
    stages: int = 50,
) -> RejectionThreshold:
    """Fit the threshold of largest coverage at which the risk on held-out predictions is at most `risk`.

    Error probabilities and the mask of incorrect predictions are `[N]`. If all samples can be accepted, the threshold
    is the largest observed error probability, because there is no evidence beyond it. The remark of the result says if
    the risk is not guaranteed, or if there are too few samples.
    """
    _check(error_probability, incorrect, risk, bound, delta, stages)
    order = error_probability.double().sort(stable=True)
    errors = incorrect.to(error_probability.device)[order.indices].long().cumsum(0)
    ends = _tie_group_ends(order.values)
    sizes = ends if bound == "none" else _stage_sizes(ends, len(error_probability), stages)
    candidates = [(size, int(errors[size - 1])) for size in sizes.tolist()]
    size = _largest(candidates, risk) if bound == "none" else _last_passed(candidates, risk, bound, delta)
    if not size:
        remark = _unattainable(candidates, risk, bound, delta)
        return RejectionThreshold(risk, None, 0.0, None, None, len(error_probability), bound, delta, remark)
    count = dict(candidates)[size]
    upper = None if bound == "none" else upper_bound(count, size, delta, bound)
    at = float(order.values[size - 1])
    remark = _not_guaranteed(count, size, risk, delta, len(error_probability)) if bound == "none" else ""
    return RejectionThreshold(
        risk, at, size / len(error_probability), count / size, upper, len(error_probability), bound, delta, remark
    )


def min_samples(risk: float, delta: float = 0.05, bound: Bound = "clopper-pearson") -> int | None:
    """Return how many held-out samples without an error are needed for a guarantee; None: none are enough.

    >>> min_samples(0.05), min_samples(0.05, bound="hoeffding"), min_samples(0.0)
    (59, 600, None)
    """
    if risk == 0:
        return None
    if risk == 1:
        return 1
    exact = math.log(1 / delta) / (2 * risk**2) if bound == "hoeffding" else math.log(delta) / math.log1p(-risk)
    return math.ceil(exact)


def _not_guaranteed(incorrect: int, count: int, risk: float, delta: float, samples: int) -> str:
    """Return the warning about a threshold without a bound."""
    needed = min_samples(risk, delta)
    few = (
        "" if needed is None or samples >= needed else f" {samples} samples are too few: at least {needed} are needed."
    )
    return (
        f"The risk of {risk:g} is not guaranteed without a bound: {incorrect} errors in {count} accepted held-out "
        f"samples are consistent with a risk of up to {upper_bound(incorrect, count, delta):.3f}.{few} Use "
        "--bound clopper-pearson (bound='clopper-pearson')."
    )


def upper_bound(incorrect: int, count: int, delta: float, bound: Bound = "clopper-pearson") -> float:
    """Return the upper confidence bound of the risk at level `delta`, for `incorrect` errors in `count` samples."""
    if bound == "hoeffding":
        return min(incorrect / count + math.sqrt(math.log(1 / delta) / (2 * count)), 1.0)
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: the lower tail of the binomial decreases with the risk
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_lower_tail(incorrect, count, middle) > delta else (low, middle)
    return high


def binomial_lower_tail(incorrect: int, count: int, risk: float) -> float:
    """Return the binomial probability of at most `incorrect` errors in `count` samples with error rate `risk`."""
    if risk in (0.0, 1.0):
        return float(risk == 0 or incorrect == count)
    k = torch.arange(incorrect + 1, dtype=torch.float64)
    log_binomial = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    return math.exp(float((log_binomial + k * math.log(risk) + (count - k) * math.log1p(-risk)).logsumexp(0)))


def _tie_group_ends(error_probability: Tensor) -> Tensor:
    """Return the number of samples up to the end of each group of equal error probabilities."""
    is_last = torch.ones(len(error_probability), dtype=torch.bool, device=error_probability.device)
    is_last[:-1] = error_probability[1:] != error_probability[:-1]
    return is_last.nonzero()[:, 0] + 1


def _stage_sizes(ends: Tensor, samples: int, stages: int) -> Tensor:
    """Round equal steps of coverage up to ends of tie groups."""
    steps = torch.arange(1, stages + 1, device=ends.device) * samples
    targets = (steps + stages - 1) // stages
    sizes: Tensor = torch.unique_consecutive(ends[torch.searchsorted(ends, targets)])
    return sizes


def _largest(candidates: list[tuple[int, int]], risk: float) -> int:
    return max((size for size, count in candidates if count / size <= risk), default=0)


def _last_passed(candidates: list[tuple[int, int]], risk: float, bound: Bound, delta: float) -> int:
    passed = 0
    for size, count in candidates:
        if not _passes(0, size, risk, bound, delta):
            continue
        if not _passes(count, size, risk, bound, delta):
            break
        passed = size
    return passed


def _passes(incorrect: int, count: int, risk: float, bound: Bound, delta: float) -> bool:
    """Return whether the upper bound is at most `risk`; for Clopper-Pearson without bisection."""
    if bound == "hoeffding":
        return upper_bound(incorrect, count, delta, bound) <= risk
    return risk == 1 or binomial_lower_tail(incorrect, count, risk) <= delta


def _unattainable(candidates: list[tuple[int, int]], risk: float, bound: Bound, delta: float) -> str:
    samples = candidates[-1][0]
    if bound == "none":
        reason = "even the most confident held-out predictions have a higher error rate"
    elif _passes(0, samples, risk, bound, delta):
        reason = "the error rate of the most confident held-out predictions is too high to exclude a higher risk"
    else:
        needed = min_samples(risk, delta, bound)
        atleast = "" if needed is None else f"; at least {needed} are needed"
        reason = f"{samples} held-out samples are too few even without an error{atleast}"
    confidence = "" if bound == "none" else f" with confidence {1 - delta:g}"
    return f"A risk of {risk:g}{confidence} is not attainable: {reason}. Every prediction is rejected."


def _check(error_probability: Tensor, incorrect: Tensor, risk: float, bound: str, delta: float, stages: int) -> None:
    if bound not in BOUNDS:
        raise RecipeError(f"Unknown bound {bound!r}; {suggest(bound, BOUNDS)}")
    if not (0 <= risk <= 1 and 0 < delta < 1 and stages >= 1):
        raise RecipeError(
            f"risk = {risk}, delta = {delta}, stages = {stages} were given. risk must be from 0 to 1, delta between 0 "
            "and 1, and stages at least 1."
        )
    if error_probability.dim() != 1 or not len(error_probability) or incorrect.shape != error_probability.shape:
        raise DataError(
            f"Error probabilities have shape {list(error_probability.shape)} and the mask of incorrect predictions "
            f"{list(incorrect.shape)}. Both must be [N] with at least one held-out sample."
        )
    if error_probability.isnan().any() or not ((incorrect == 0) | (incorrect == 1)).all():
        raise DataError(
            "An error probability is NaN, or an entry of the mask of incorrect predictions is neither 0 nor 1. "
            "Remove those samples."
        )
