"""Calibration by temperature: logits divided by the T that makes held-out labels most likely.

The negative log-likelihood of held-out labels is convex in 1/T, so one number is found, and found exactly. Of an
ensemble there are two orders: pool the members' probabilities and calibrate the pool (one T), or calibrate each member
and pool what comes out (one T each). Averaging makes an ensemble less sure than its members, so that members
calibrated one by one make an ensemble that is too unsure (Rahaman and Thiery 2021).
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

LEAST, MOST = 0.01, 100.0
Order = Literal["pool then calibrate", "calibrate then pool"]
ORDERS: tuple[Order, ...] = ("pool then calibrate", "calibrate then pool")


@dataclass(frozen=True, slots=True)
class Temperatures:
    """How an ensemble of so many members is calibrated: one temperature for all, or one for each."""

    order: Order
    members: int
    values: tuple[float, ...]
    remarks: tuple[str, ...] = ()  # which of them lie at a bound

    def to_dict(self) -> dict[str, Any]:
        """Return this as plain values for JSON."""
        return {
            "order": self.order,
            "members": self.members,
            "values": list(self.values),
            "remarks": list(self.remarks),
        }

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Temperatures:
        """Return what `to_dict` wrote."""
        if tree["order"] not in ORDERS:
            raise RecipeError(f"Temperatures of the order {tree['order']!r}; allowed: {', '.join(ORDERS)}")
        values = tuple(float(value) for value in tree["values"])
        return cls(tree["order"], int(tree["members"]), values, tuple(tree.get("remarks", ())))


def fit(logits: Tensor, y: Tensor) -> float:
    """Return the temperature by which logits `[N, C]` make the labels `[N]` most likely; warn where it is at a bound.

    Logits that no temperature changes (one class, or all equal) keep T = 1. Labels that are all the most likely class
    would have T fall to 0: it stops at the bound.
    """
    value = _fit(logits, y)
    if words := _at_bound(value):
        warnings.warn(f"The temperature {words}", stacklevel=2)
    return value


def pool_then_calibrate(logits: Tensor, y: Tensor) -> Temperatures:
    """Return the one temperature for the log of the mean probability of a table of logits `[M, N, C]`."""
    value = _fit(_pooled(_members(logits)), y)
    words = _at_bound(value)
    remarks = (f"The pool's temperature {words}",) if words else ()
    return Temperatures("pool then calibrate", len(logits), (value,), remarks)


def calibrate_then_pool(logits: Tensor, y: Tensor) -> Temperatures:
    """Return a temperature for each member of a table of logits `[M, N, C]`, to be used before they are pooled."""
    values = tuple(_fit(row, y) for row in _members(logits))
    found = ((number, _at_bound(value)) for number, value in enumerate(values))
    remarks = tuple(f"The temperature of member {number} {words}" for number, words in found if words)
    return Temperatures("calibrate then pool", len(logits), values, remarks)


def apply(logits: Tensor, temperatures: Temperatures) -> Tensor:
    """Return the ensemble's calibrated log-probabilities `[N, C]` (float64) of a table of logits `[M, N, C]`."""
    if len(logits) != temperatures.members:
        raise RecipeError(
            f"The temperatures were fitted to {temperatures.members} members and the table has {len(logits)}; fit them "
            "anew to these members."
        )
    log_p = _members(logits)
    if temperatures.order == "pool then calibrate":
        return (_pooled(log_p) / temperatures.values[0]).log_softmax(-1)
    values = torch.tensor(temperatures.values, dtype=torch.float64, device=logits.device)
    return _pooled((log_p / values[:, None, None]).log_softmax(-1))


def _members(table: Tensor) -> Tensor:
    """Return the members' log-probabilities in float64: as good as logits to a temperature."""
    if table.dim() != 3 or not len(table):
        raise DataError(f"The table has shape {list(table.shape)}; logits [members, samples, classes] are needed.")
    return log_probs(table.double())


def _pooled(log_p: Tensor) -> Tensor:
    return log_p.logsumexp(0) - math.log(len(log_p))


def _at_bound(value: float) -> str:
    if value == LEAST:
        return f"is at its lower bound {LEAST:g}: the held-out labels ask for no doubt at all. More samples would tell."
    if value == MOST:
        return f"is at its upper bound {MOST:g}: the held-out labels follow these logits no more than chance would."
    return ""


def _fit(logits: Tensor, y: Tensor) -> float:
    above = _above_label(logits, y)
    low, high = math.log(1 / MOST), math.log(1 / LEAST)  # of log(1/T)
    rises_from, falls_to = _slope(above, low)[0] >= 0, _slope(above, high)[0] <= 0
    if rises_from or falls_to:  # both: nothing changes with the temperature
        return 1.0 if rises_from and falls_to else MOST if rises_from else LEAST
    return 1 / math.exp(_root(above, low, high))


def _root(above: Tensor, low: float, high: float) -> float:
    """Return where the slope is zero: Newton's steps, or half the bracket where they leave it or hardly shrink."""
    at, last = 0.0, high - low
    while abs(last) > 1e-12:
        slope, bend = _slope(above, at)
        low, high = (at, high) if slope < 0 else (low, at)
        step = -slope / bend if bend > 0 else math.inf
        if not (low <= at + step <= high and abs(step) <= abs(last) / 2):
            step = (low + high) / 2 - at
        at, last = at + step, step
    return at


def _slope(above: Tensor, at: float) -> tuple[float, float]:
    """Return the first derivative of the loss by 1/T, and that derivative's own by log(1/T), at log(1/T) = `at`."""
    scale = math.exp(at)
    p = (above * scale).softmax(-1)
    finite = above.masked_fill(p == 0, 0.0)  # a class left out has a logit of -inf, and 0 times that is no number
    mean = (p * finite).sum(-1)
    return float(mean.mean()), scale * float(((p * finite * finite).sum(-1) - mean * mean).mean())


def _above_label(logits: Tensor, y: Tensor) -> Tensor:
    """Return by how much each logit exceeds its label's, in float64; what cannot be calibrated is refused."""
    if logits.dim() != 2 or not logits.numel() or y.shape != logits.shape[:1]:
        raise DataError(
            f"Logits of shape {list(logits.shape)} with labels of shape {list(y.shape)} cannot be calibrated; give "
            "[N, C] and [N] of at least one held-out sample."
        )
    if y.is_floating_point() or not (int(y.min()) >= 0 and int(y.max()) < logits.shape[1]):
        raise DataError(f"The labels must be class numbers from 0 to {logits.shape[1] - 1}.")
    wide = logits.double()
    own = wide.gather(1, y.long()[:, None])
    if not (own.isfinite().all() and (wide < math.inf).all()):
        raise DataError(
            "Some held-out logits are nan, or infinite where no temperature can help (a right class of probability 0, "
            "or a class of infinite logit); leave those samples out."
        )
    return wide - own
