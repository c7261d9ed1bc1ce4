"""Temperature scaling: divide logits by the temperature T that maximizes the likelihood of held-out labels.

The negative log-likelihood of held-out labels is convex in 1/T, so the optimum is unique. For an ensemble there are
two orders: average the members' probabilities and calibrate the average (one T), or calibrate each member and average
the results (one T per member). Averaging makes an ensemble less confident than its members, so an ensemble of
calibrated members is underconfident (Rahaman and Thiery 2021).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.ensembles.log_probs import log_probs

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
Order = Literal["pool then calibrate", "calibrate then pool"]
ORDERS: tuple[Order, ...] = ("pool then calibrate", "calibrate then pool")


@dataclass(frozen=True, slots=True)
class Temperatures:
    """The fitted temperatures of an ensemble: one for all members, or one per member."""

    order: Order
    members: int
    values: tuple[float, ...]
    remarks: tuple[str, ...] = ()  # which values are at a bound

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        return {
            "order": self.order,
            "members": self.members,
            "values": list(self.values),
            "remarks": list(self.remarks),
        }

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Temperatures:
        """Rebuild this from the result of `to_dict`."""
        if tree["order"] not in ORDERS:
            raise RecipeError(f"Unknown order of calibration {tree['order']!r}; allowed: {', '.join(ORDERS)}")
        values = tuple(float(value) for value in tree["values"])
        return cls(tree["order"], int(tree["members"]), values, tuple(tree.get("remarks", ())))


def fit(logits: Tensor, y: Tensor) -> float:
    """Fit the temperature of logits `[N, C]` that maximizes the likelihood of labels `[N]`; warn if it is at a bound.

    If the temperature has no effect (one class, or all logits equal), T = 1. If every label is the most likely class,
    the optimum is T = 0, and the lower bound is returned.
    """
    value = _fit(logits, y)
    if remark := _at_bound(value):
        warnings.warn(f"The temperature {remark}", stacklevel=2)
    return value


def pool_then_calibrate(logits: Tensor, y: Tensor) -> Temperatures:
    """Fit one temperature to the log of the mean probability of logits `[M, N, C]`."""
    value = _fit(_mean_log_prob(_member_log_probs(logits)), y)
    remark = _at_bound(value)
    remarks = (f"The temperature of the ensemble {remark}",) if remark else ()
    return Temperatures("pool then calibrate", len(logits), (value,), remarks)


def calibrate_then_pool(logits: Tensor, y: Tensor) -> Temperatures:
    """Fit one temperature per member of logits `[M, N, C]`, applied before averaging."""
    values = tuple(_fit(row, y) for row in _member_log_probs(logits))
    bound_remarks = ((member, _at_bound(value)) for member, value in enumerate(values))
    remarks = tuple(f"The temperature of member {member} {remark}" for member, remark in bound_remarks if remark)
    return Temperatures("calibrate then pool", len(logits), values, remarks)


def apply(logits: Tensor, temperatures: Temperatures) -> Tensor:
    """Return the calibrated log-probabilities of the ensemble `[N, C]` (float64) from logits `[M, N, C]`."""
    if len(logits) != temperatures.members:
        raise RecipeError(
            f"The temperatures were fitted to {temperatures.members} members, but the logits have {len(logits)}. Fit "
            "them again to these members."
        )
    log_p = _member_log_probs(logits)
    if temperatures.order == "pool then calibrate":
        return (_mean_log_prob(log_p) / temperatures.values[0]).log_softmax(-1)
    values = torch.tensor(temperatures.values, dtype=torch.float64, device=logits.device)
    return _mean_log_prob((log_p / values[:, None, None]).log_softmax(-1))


def _member_log_probs(logits: Tensor) -> Tensor:
    """Return the members' log-probabilities in float64; for a temperature they are equivalent to logits."""
    if logits.dim() != 3 or not len(logits):
        raise DataError(f"Logits have shape {list(logits.shape)}. [members, samples, classes] is needed.")
    return log_probs(logits.double())


def _mean_log_prob(log_p: Tensor) -> Tensor:
    return log_p.logsumexp(0) - math.log(len(log_p))


def _at_bound(value: float) -> str:
    if value == MIN_TEMPERATURE:
        return f"is at its lower bound {MIN_TEMPERATURE:g}: every held-out prediction is correct. Use more samples."
    if value == MAX_TEMPERATURE:
        return (
            f"is at its upper bound {MAX_TEMPERATURE:g}: the logits predict the held-out labels no better than chance."
        )
    return ""


def _fit(logits: Tensor, y: Tensor) -> float:
    margins = _label_margins(logits, y)
    low, high = math.log(1 / MAX_TEMPERATURE), math.log(1 / MIN_TEMPERATURE)  # of log(1/T)
    is_increasing, is_decreasing = _derivatives(margins, low)[0] >= 0, _derivatives(margins, high)[0] <= 0
    if is_increasing or is_decreasing:  # both: the loss does not depend on the temperature
        return 1.0 if is_increasing and is_decreasing else MAX_TEMPERATURE if is_increasing else MIN_TEMPERATURE
    return 1 / math.exp(_find_root(margins, low, high))


def _find_root(margins: Tensor, low: float, high: float) -> float:
    """Find the root of the derivative by Newton steps, with bisection if they leave the bracket or converge slowly."""
    x, last_step = 0.0, high - low
    while abs(last_step) > 1e-12:
        slope, curvature = _derivatives(margins, x)
        low, high = (x, high) if slope < 0 else (low, x)
        step = -slope / curvature if curvature > 0 else math.inf
        if not (low <= x + step <= high and abs(step) <= abs(last_step) / 2):
            step = (low + high) / 2 - x
        x, last_step = x + step, step
    return x


def _derivatives(margins: Tensor, x: float) -> tuple[float, float]:
    """Return the derivative of the loss by 1/T, and the derivative of that by log(1/T), at log(1/T) = x."""
    scale = math.exp(x)
    p = (margins * scale).softmax(-1)
    finite = margins.masked_fill(p == 0, 0.0)  # an excluded class has a logit of -inf, and 0 * -inf is NaN
    mean = (p * finite).sum(-1)
    return float(mean.mean()), scale * float(((p * finite * finite).sum(-1) - mean * mean).mean())


def _label_margins(logits: Tensor, y: Tensor) -> Tensor:
    """Check the inputs and return each logit minus the logit of the label, in float64."""
    if logits.dim() != 2 or not logits.numel() or y.shape != logits.shape[:1]:
        raise DataError(
            f"Logits have shape {list(logits.shape)} and labels {list(y.shape)}. Calibration needs [N, C] and [N] with "
            "at least one held-out sample."
        )
    if y.is_floating_point() or not (int(y.min()) >= 0 and int(y.max()) < logits.shape[1]):
        raise DataError(f"Labels must be integers from 0 to {logits.shape[1] - 1}.")
    logits = logits.double()
    label_logits = logits.gather(1, y.long()[:, None])
    if not (label_logits.isfinite().all() and (logits < math.inf).all()):
        raise DataError(
            "Some held-out logits are NaN or infinite (a true class of probability 0, or a class with an infinite "
            "logit). Remove those samples."
        )
    return logits - label_logits
