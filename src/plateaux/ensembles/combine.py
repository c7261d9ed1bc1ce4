"""Combine the predictions of members: from logits `[M, B, C]` to the log-probabilities `[B, C]` of the ensemble.

The input is always logits; probabilities are not detected. To exclude classes, set their logits to -inf for every
member before combining.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError, suggest
from plateaux.ensembles.log_probs import log_probabilities, log_probs

TIE_BREAK = 1e-6  # added to the winner of a tie of votes, in nats: changes the argmax in float32 and nothing else
SUM_TOLERANCE = 1e-6  # allowed deviation of the sum of weights from 1


def combine(logits: Tensor, rule: str = "mean probability", weights: Sequence[float] | Tensor | None = None) -> Tensor:
    """Combine the members' logits `[M, B, C]` by the named rule and return log-probabilities `[B, C]`.

    >>> combine(torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]]), "mean logit").exp()
    tensor([[0.5000, 0.5000]])
    """
    if logits.ndim < 2 or not len(logits):
        raise RecipeError(
            f"Logits have shape {list(logits.shape)}. Combining needs [M, B, C] with at least one member."
        )
    if rule not in RULES:
        raise RecipeError(f"Unknown combination rule {rule!r}; {suggest(rule, RULES)}")
    if rule == WEIGHTED:
        return _weighted(logits, normalized_weights(() if weights is None else weights, len(logits)))
    if weights is not None:
        raise RecipeError(f"{rule!r} takes no weights. Omit them, or combine by {WEIGHTED!r}.")
    return COMBINE[rule](logits)


def normalized_weights(weights: Sequence[float] | Tensor, members: int) -> Tensor:
    """Check one non-negative weight per member that sum to 1, and return them as float64 `[M]`."""
    values = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    total = float(values.sum())
    if values.shape != (members,) or not bool((values >= 0).all()) or not abs(total - 1) <= SUM_TOLERANCE:
        raise RecipeError(
            f"Weights are {values.tolist()}, with sum {total:g}. One non-negative weight is needed for each of "
            f"{members} members, and they must sum to 1. Divide them by their sum."
        )
    return values / total


def _mean_probability(logits: Tensor) -> Tensor:
    """Average the members' probabilities."""
    return log_probabilities(logits)[-2 if len(logits) > 1 else 0]


def _mean_logit(logits: Tensor) -> Tensor:
    """Average the members' logits: the normalized geometric mean of their probabilities."""
    return log_probabilities(logits)[-1]


def _majority(logits: Tensor) -> Tensor:
    """Return the fraction of members that vote for each class; a tie is broken by the mean probability."""
    log_p = log_probabilities(logits)
    preds = log_p[: len(logits)].argmax(-1).movedim(0, -1)  # [B, M]
    votes = torch.zeros_like(log_p[0]).scatter_add_(-1, preds, torch.ones_like(preds, dtype=log_p.dtype))
    is_leader = votes == votes.amax(-1, keepdim=True)
    is_tied = is_leader.sum(-1, keepdim=True) > 1
    winner = _mean_probability(logits).masked_fill(~is_leader, -math.inf).argmax(-1, keepdim=True)
    return votes.log().scatter_add(-1, winner, TIE_BREAK * is_tied.to(votes.dtype)).log_softmax(-1)


def _weighted(logits: Tensor, weights: Tensor) -> Tensor:
    """Average the members' probabilities with weights `[M]`."""
    used = weights > 0  # members with weight 0 are excluded, so that their NaN logits have no effect
    log_p = log_probs(logits[used.to(logits.device)])
    return (log_p + weights[used].log().to(log_p).view(-1, *[1] * (log_p.ndim - 1))).logsumexp(0)


COMBINE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean probability": _mean_probability,
    "mean logit": _mean_logit,
    "majority": _majority,
}
WEIGHTED = "weighted"
RULES = (*COMBINE, WEIGHTED)
