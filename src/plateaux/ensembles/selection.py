"""Greedy ensemble selection: from a pool of members, those whose mean probability does best on validation samples.

Members are drawn one after another, with replacement: one drawn twice counts twice (Caruana et al. 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError, RunError, suggest

REPEATS = 100  # with `unique`, at most so many draws for each member wanted
NORMALIZED = 1e-2  # how far log-probabilities, kept in float16 perhaps, may be from summing to one


@dataclass(frozen=True, slots=True)
class Selection:
    """Members drawn from a pool, and the validation samples they were chosen on.

    The scores are of the very samples that chose: they flatter. Measure the selection on others.
    """

    chosen: tuple[int, ...]  # in the order drawn; a member may come more than once
    weights: tuple[float, ...]  # [P] each member's share of the draws
    scores: tuple[float, ...]  # the objective after each draw
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
            raise RunError(f"This record is not one of a selection ({problem!r}); select the members again") from None


def select(
    log_p: Tensor,
    y: Tensor,
    size: int,
    *,
    metric: Literal["nll", "accuracy", "brier"] = "nll",
    unique: bool = False,
    ids: Sequence[int] | Tensor = (),
) -> Selection:
    """Draw members of a pool, log-probabilities `[P, N, C]`, while the objective of their mean probability improves.

    `size` counts draws, or with `unique` different members. Of equally good members the first is drawn.
    """
    ids = tuple(int(sample) for sample in ids)
    _check(log_p, y, size, metric, unique, ids)
    y = y.to(log_p.device)
    if metric == "nll":  # asks for nothing but the right class: [P, N, 1]
        log_p, y = log_p.gather(-1, y.expand(len(log_p), -1)[..., None]), torch.zeros_like(y)
    chosen, losses = _drawn(log_p, lambda p: LOSSES[metric](p, y), size, unique)
    weights = tuple(chosen.count(member) / len(chosen) for member in range(len(log_p)))
    scores = tuple(-loss if metric == "accuracy" else loss for loss in losses)
    return Selection(tuple(chosen), weights, scores, metric, unique, ids)


def _drawn(log_p: Tensor, loss_of: Callable[[Tensor], float], size: int, unique: bool) -> tuple[list[int], list[float]]:
    """Return the members drawn and the loss after each draw; one sum of probabilities is all that is held."""
    chosen: list[int] = []
    losses: list[float] = []
    total = torch.zeros_like(log_p[0], dtype=torch.float64)
    for draw in range(1, (REPEATS if unique else 1) * size + 1):
        tried = [loss_of((total + _probabilities(log_p, member)) / draw) for member in range(len(log_p))]
        best = min(range(len(tried)), key=tried.__getitem__)
        if losses and not tried[best] < losses[-1]:
            break
        total += _probabilities(log_p, best)
        chosen.append(best)
        losses.append(tried[best])
        if unique and len(set(chosen)) == size:
            break
    return chosen, losses


def _probabilities(log_p: Tensor, member: int) -> Tensor:
    return log_p[member].double().exp()


def _nll(p: Tensor, y: Tensor) -> float:
    return float(-p.gather(-1, y[:, None]).log().mean())


def _error(p: Tensor, y: Tensor) -> float:
    """Minus the accuracy: it is to be high, and losses are to be low."""
    return -float((p.argmax(-1) == y).double().mean())


def _brier(p: Tensor, y: Tensor) -> float:
    return float(((p * p).sum(-1) - 2 * p.gather(-1, y[:, None])[:, 0] + 1).mean())


LOSSES: Mapping[str, Callable[[Tensor, Tensor], float]] = {"nll": _nll, "accuracy": _error, "brier": _brier}


def _check(log_p: Tensor, y: Tensor, size: int, objective: str, unique: bool, ids: Sequence[int]) -> None:
    if objective not in LOSSES:
        raise RecipeError(f"There is no objective called {objective!r}; {suggest(objective, LOSSES)}")
    if log_p.ndim != 3 or not log_p.numel() or y.shape != log_p.shape[1:2]:
        raise RecipeError(
            f"Log-probabilities [P, N, C] and labels [N] are selected by; given: {list(log_p.shape)}, {list(y.shape)}"
        )
    if size < 1 or (unique and size > len(log_p)):
        allowed = f"1 to {len(log_p)}, the members of the pool" if unique else "1 or more"
        raise RecipeError(f"A selection of {size} members was asked for; allowed: {allowed}")
    if y.is_floating_point() or not bool(((y >= 0) & (y < log_p.shape[-1])).all()):
        raise RecipeError(f"Labels must be class numbers from 0 to {log_p.shape[-1] - 1}; mixed labels cannot choose")
    if ids and len(ids) != len(y):
        raise RecipeError(f"{len(ids)} sample ids were given for {len(y)} samples; give one for each, or none")
    for member, rows in enumerate(log_p):
        if not bool((rows.double().logsumexp(-1).abs() <= NORMALIZED).all()):
            raise RecipeError(f"Member {member}'s rows are not log-probabilities; apply log_softmax to logits first")
