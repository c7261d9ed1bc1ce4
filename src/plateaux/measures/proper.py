"""Proper scores: negative log-likelihood and Brier, each a mean over samples with its standard error."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plateaux.exchange import Measure
from plateaux.registry import measure
from plateaux.tables import log_probabilities, row_names
from plateaux.types import Batch, Tree, Value


@measure
def nll() -> Measure:
    """Negative log-likelihood of the right class, in nats."""

    def score(log_p: Tensor, y: Tensor) -> Tensor:
        return -log_p.gather(-1, y.expand(len(log_p), -1)[..., None])[..., 0]

    return _mean_of(score)


@measure
def brier() -> Measure:
    """Brier score: the squared distance between probabilities and the right class, summed over classes (0 to 2)."""

    def score(log_p: Tensor, y: Tensor) -> Tensor:
        p = log_p.exp()
        right = p.gather(-1, y.expand(len(p), -1)[..., None])[..., 0]
        return (p * p).sum(-1) - 2 * right + 1

    return _mean_of(score)


def _mean_of(score: Callable[[Tensor, Tensor], Tensor]) -> Measure:
    """Return the measure that averages `score`, log-probabilities `[R, B, C]` and labels `[B]` to `[R, B]`."""

    def settle(table: Tensor, batch: Batch) -> Tree:
        scores = score(log_probabilities(table), batch.y).double()
        return {"sum": scores.sum(-1), "squares": (scores * scores).sum(-1), "count": torch.tensor(len(batch))}

    return Measure(settle, _finish, better="lower")


def _finish(sums: Tree) -> Mapping[str, Value]:
    count = float(sums["count"])
    found = {}
    for name, total, squares in zip(row_names(len(sums["sum"])), sums["sum"], sums["squares"], strict=True):
        mean = float(total) / count
        spread = max(float(squares) / count - mean * mean, 0.0) * count / max(count - 1, 1)
        found[name] = Value(mean, (spread / count) ** 0.5)
    return found
