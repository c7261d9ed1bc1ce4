"""When to abstain: the doubt up to which predictions may be used if they are to be wrong no more often than wanted.

Samples are taken from the most certain down, those of equal doubt together. Without a bound, the threshold is the one
of largest coverage whose share of wrong held-out predictions is at most the wanted risk: a choice among many, so new
samples may fare somewhat worse. With a bound, the true risk exceeds the wanted one with probability of at most delta:
stages that are fixed before anybody looks at what is wrong (equal steps of coverage) are tested one after the other,
each at level delta, until one fails. Such a fixed sequence needs no correction for the number of tests. Stages too
small to pass even without a mistake are not part of it.
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
    """The largest doubt at which a prediction is used, and what it gave on held-out samples."""

    risk: float  # the one wanted
    at: float | None  # None: abstain always
    coverage: float  # share of held-out samples accepted
    observed: float | None  # share of them that are wrong; None: none were accepted
    upper: float | None  # upper confidence bound of the risk, where one was asked for
    samples: int
    bound: Bound = "none"
    delta: float = 0.05
    remark: str = ""

    def accepts(self, doubt: Tensor) -> Tensor:
        """Say of each sample `[N]` whether its prediction may be used; a doubt of nan never may."""
        if self.at is None:
            return torch.zeros_like(doubt, dtype=torch.bool)
        return doubt.double() <= self.at

    def to_dict(self) -> dict[str, Any]:
        """Return this as plain values for JSON, which has no infinity: that is the text `inf` or `-inf`."""
        finite = self.at is None or math.isfinite(self.at)
        return {**asdict(self), "at": self.at if finite else str(self.at)}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> RejectionThreshold:
        """Return what `to_dict` wrote."""
        return cls(**{**tree, "at": None if tree["at"] is None else float(tree["at"])})


def fit(
    error_probability: Tensor,
    incorrect: Tensor,
    risk: float,
    *,
    bound: Bound = "none",
    delta: float = 0.05,
    stages: int = 50,
) -> RejectionThreshold:
    """Return the threshold of largest coverage at which held-out predictions are wrong at most as often as `risk`.

    Doubts and whether predictions are wrong are `[N]`. Where all samples may be used, the threshold is the largest
    doubt seen: nothing is known of samples beyond it.
    """
    _check(error_probability, incorrect, risk, bound, delta, stages)
    order = error_probability.double().sort(stable=True)
    mistakes = incorrect.to(error_probability.device)[order.indices].long().cumsum(0)
    ends = _ends(order.values)
    sizes = ends if bound == "none" else _staged(ends, len(error_probability), stages)
    seen = [(size, int(mistakes[size - 1])) for size in sizes.tolist()]
    size = _largest(seen, risk) if bound == "none" else _last_passed(seen, risk, bound, delta)
    if not size:
        words = _unattainable(seen, risk, bound, delta)
        return RejectionThreshold(risk, None, 0.0, None, None, len(error_probability), bound, delta, words)
    count = dict(seen)[size]
    upper = None if bound == "none" else upper_bound(count, size, delta, bound)
    at = float(order.values[size - 1])
    return RejectionThreshold(
        risk, at, size / len(error_probability), count / size, upper, len(error_probability), bound, delta
    )


def upper_bound(incorrect: int, count: int, delta: float, bound: Bound = "clopper-pearson") -> float:
    """Return what a risk exceeds with probability of at most `delta`, when `wrong` of `count` samples are wrong."""
    if bound == "hoeffding":
        return min(incorrect / count + math.sqrt(math.log(1 / delta) / (2 * count)), 1.0)
    low, high = 0.0, 1.0
    for _ in range(60):  # the binomial's lower tail falls as the risk rises
        middle = (low + high) / 2
        low, high = (middle, high) if _lower_tail(incorrect, count, middle) > delta else (low, middle)
    return high


def _lower_tail(wrong: int, count: int, risk: float) -> float:
    """Return the probability of at most `wrong` of `count`, each by itself with probability `risk`."""
    if risk in (0.0, 1.0):
        return float(risk == 0 or wrong == count)
    k = torch.arange(wrong + 1, dtype=torch.float64)
    ways = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    return math.exp(float((ways + k * math.log(risk) + (count - k) * math.log1p(-risk)).logsumexp(0)))


def _ends(doubt: Tensor) -> Tensor:
    """Return how many samples there are up to the end of every group of equal doubts."""
    last = torch.ones(len(doubt), dtype=torch.bool, device=doubt.device)
    last[:-1] = doubt[1:] != doubt[:-1]
    return last.nonzero()[:, 0] + 1


def _staged(ends: Tensor, samples: int, stages: int) -> Tensor:
    """Return the ends nearest above equal steps of coverage."""
    steps = torch.arange(1, stages + 1, device=ends.device) * samples
    wanted = (steps + stages - 1) // stages
    found: Tensor = torch.unique_consecutive(ends[torch.searchsorted(ends, wanted)])
    return found


def _largest(seen: list[tuple[int, int]], risk: float) -> int:
    return max((size for size, count in seen if count / size <= risk), default=0)


def _last_passed(seen: list[tuple[int, int]], risk: float, bound: Bound, delta: float) -> int:
    passed = 0
    for size, count in seen:
        if not _passes(0, size, risk, bound, delta):
            continue
        if not _passes(count, size, risk, bound, delta):
            break
        passed = size
    return passed


def _passes(wrong: int, count: int, risk: float, bound: Bound, delta: float) -> bool:
    """Say whether the upper bound is at most `risk`; Clopper and Pearson's without searching for it."""
    if bound == "hoeffding":
        return upper_bound(wrong, count, delta, bound) <= risk
    return risk == 1 or _lower_tail(wrong, count, risk) <= delta


def _unattainable(seen: list[tuple[int, int]], risk: float, bound: Bound, delta: float) -> str:
    samples = seen[-1][0]
    if bound == "none":
        why = "even the most certain held-out predictions are wrong more often"
    elif _passes(0, samples, risk, bound, delta):
        why = "the most certain held-out predictions are wrong too often to exclude a higher one"
    else:
        why = f"{samples} held-out samples would be too few if none were wrong"
    sure = "" if bound == "none" else f" with confidence {1 - delta:g}"
    return f"A risk of {risk:g}{sure} cannot be had: {why}. Every prediction is withheld."


def _check(doubt: Tensor, wrong: Tensor, risk: float, bound: str, delta: float, stages: int) -> None:
    if bound not in BOUNDS:
        raise RecipeError(f"There is no bound called {bound!r}; {suggest(bound, BOUNDS)}")
    if not (0 <= risk <= 1 and 0 < delta < 1 and stages >= 1):
        raise RecipeError(
            f"risk = {risk}, delta = {delta}, stages = {stages}; give a risk from 0 to 1, a delta between 0 and 1, and "
            "at least one stage."
        )
    if doubt.dim() != 1 or not len(doubt) or wrong.shape != doubt.shape:
        raise DataError(
            f"Doubts of shape {list(doubt.shape)} and mistakes of shape {list(wrong.shape)}; both must be [N] of at "
            "least one held-out sample."
        )
    if doubt.isnan().any() or not ((wrong == 0) | (wrong == 1)).all():
        raise DataError("A doubt is nan, or a mistake is neither 0 nor 1; leave those samples out.")
