"""Greedy ensemble selection: choose members of a pool whose mean probability is best on validation samples.

Members are added one at a time, with replacement: a member added twice counts twice (Caruana et al. 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError, RunError, suggest

MAX_DRAWS_PER_MEMBER = 100  # limit of additions per requested member with `unique`
SUM_TOLERANCE = 1e-2  # allowed deviation of the sum of probabilities from 1; they may be stored in float16


@dataclass(frozen=True, slots=True)
class Selection:
    """Members selected from a pool, and the validation samples used for the selection.

    The scores are on those same samples and are optimistically biased. Evaluate the selection on other samples.
    """

    chosen: tuple[int, ...]  # in the order of selection; a member may occur more than once
    weights: tuple[float, ...]  # [P] the fraction of additions of each member
    scores: tuple[float, ...]  # the metric after each addition
    metric: str
    unique: bool
    samples: tuple[int, ...]  # ids of the validation samples

    def to_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Selection:
        try:
            return cls(
                chosen=tuple(int(member) for member in record["chosen"]),
                weights=tuple(float(weight) for weight in record["weights"]),
                scores=tuple(float(score) for score in record["scores"]),
                metric=str(record["metric"]),
                unique=bool(record["unique"]),
                samples=tuple(int(sample) for sample in record["samples"]),
            )
        except (KeyError, TypeError, ValueError) as problem:
            raise RunError(f"This is not a record of a selection ({problem!r}). Select the members again.") from None


def select(
    log_p: Tensor,
    y: Tensor,
    size: int,
    *,
    metric: Literal["nll", "accuracy", "brier"] = "nll",
    unique: bool = False,
    ids: Sequence[int] | Tensor = (),
) -> Selection:
    """Add members of a pool, log-probabilities `[P, N, C]`, while the metric of their mean probability improves.

    `size` is the number of additions, or with `unique` of distinct members. Among equally good members, the first wins.
    """
    ids = tuple(int(sample) for sample in ids)
    _check(log_p, y, size, metric, unique, ids)
    y = y.to(log_p.device)
    if metric == "nll":  # needs only the true class: [P, N, 1]
        log_p, y = log_p.gather(-1, y.expand(len(log_p), -1)[..., None]), torch.zeros_like(y)
    chosen, losses = _select_greedily(log_p, lambda p: LOSSES[metric](p, y), size, unique)
    weights = tuple(chosen.count(member) / len(chosen) for member in range(len(log_p)))
    scores = tuple(-loss if metric == "accuracy" else loss for loss in losses)
    return Selection(tuple(chosen), weights, scores, metric, unique, ids)


def _select_greedily(
    log_p: Tensor, loss: Callable[[Tensor], float], size: int, unique: bool
) -> tuple[list[int], list[float]]:
    """Return the added members and the loss after each addition; holds one sum of probabilities in memory."""
    chosen: list[int] = []
    losses: list[float] = []
    total = torch.zeros_like(log_p[0], dtype=torch.float64)
    for draw in range(1, (MAX_DRAWS_PER_MEMBER if unique else 1) * size + 1):
        candidates = [loss((total + _probabilities(log_p, member)) / draw) for member in range(len(log_p))]
        best = min(range(len(candidates)), key=candidates.__getitem__)
        if losses and not candidates[best] < losses[-1]:
            break
        total += _probabilities(log_p, best)
        chosen.append(best)
        losses.append(candidates[best])
        if unique and len(set(chosen)) == size:
            break
    return chosen, losses


def _probabilities(log_p: Tensor, member: int) -> Tensor:
    return log_p[member].double().exp()


def _nll(p: Tensor, y: Tensor) -> float:
    return float(-p.gather(-1, y[:, None]).log().mean())


def _negative_accuracy(p: Tensor, y: Tensor) -> float:
    return -float((p.argmax(-1) == y).double().mean())


def _brier(p: Tensor, y: Tensor) -> float:
    return float(((p * p).sum(-1) - 2 * p.gather(-1, y[:, None])[:, 0] + 1).mean())


LOSSES: Mapping[str, Callable[[Tensor, Tensor], float]] = {"nll": _nll, "accuracy": _negative_accuracy, "brier": _brier}


def _check(log_p: Tensor, y: Tensor, size: int, metric: str, unique: bool, ids: Sequence[int]) -> None:
    if metric not in LOSSES:
        raise RecipeError(f"Unknown selection metric {metric!r}; {suggest(metric, LOSSES)}")
    if log_p.ndim != 3 or not log_p.numel() or y.shape != log_p.shape[1:2]:
        raise RecipeError(
            f"Log-probabilities are {list(log_p.shape)} and labels {list(y.shape)}. [P, N, C] and [N] are needed."
        )
    if size < 1 or (unique and size > len(log_p)):
        allowed = f"1 to {len(log_p)}, the members of the pool" if unique else "1 or more"
        raise RecipeError(f"A selection of {size} members was requested; allowed: {allowed}.")
    if y.is_floating_point() or not bool(((y >= 0) & (y < log_p.shape[-1])).all()):
        raise RecipeError(f"Labels must be integers from 0 to {log_p.shape[-1] - 1}; soft labels are not supported.")
    if ids and len(ids) != len(y):
        raise RecipeError(f"{len(ids)} sample ids were given for {len(y)} samples. Pass one per sample, or none.")
    for member, rows in enumerate(log_p):
        if not bool((rows.double().logsumexp(-1).abs() <= SUM_TOLERANCE).all()):
            raise RecipeError(
                f"The rows of member {member} are not log-probabilities. Apply log_softmax to logits first."
            )
