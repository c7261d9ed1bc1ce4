"""One prediction of many: from the logits of members `[M, B, C]` to the log-probabilities `[B, C]` they make together.

A table always holds logits: whether it looks like probabilities is never guessed. Nobody abstains: to leave classes
out, set their logits to -inf for every member alike before combining.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError, suggest
from plateaux.ensembles.log_probs import log_probabilities, log_probs

TIE = 1e-6  # what breaks a tie of votes, in nats: seen by argmax in float32, and by nothing else
SLACK = 1e-6  # how far from one the sum of weights may lie


def combine(logits: Tensor, rule: str = "mean probability", weights: Sequence[float] | Tensor | None = None) -> Tensor:
    """Return the log-probabilities `[B, C]` of members' logits `[M, B, C]`, combined by name.

    >>> combine(torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]]), "mean logit").exp()
    tensor([[0.5000, 0.5000]])
    """
    if logits.ndim < 2 or not len(logits):
        raise RecipeError(f"A table of logits [M, B, C] with a member or more is combined; given: {list(logits.shape)}")
    if rule not in RULES:
        raise RecipeError(f"There is no way to combine called {rule!r}; {suggest(rule, RULES)}")
    if rule == WEIGHTED:
        return _weighted(logits, normalized_weights(() if weights is None else weights, len(logits)))
    if weights is not None:
        raise RecipeError(f"{rule!r} weighs every member alike; leave the weights out, or combine by {WEIGHTED!r}")
    return COMBINE[rule](logits)


def normalized_weights(weights: Sequence[float] | Tensor, members: int) -> Tensor:
    """Return one weight for each member as float64 `[M]` that sum to one; any below zero are refused."""
    given = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    total = float(given.sum())
    if given.shape != (members,) or not bool((given >= 0).all()) or not abs(total - 1) <= SLACK:
        raise RecipeError(
            f"Weights are one number of at least 0 for each of {members} members, and sum to 1; "
            f"given: {given.tolist()}, with sum {total:g}. Divide them by their sum"
        )
    return given / total


def _mean_probability(table: Tensor) -> Tensor:
    """The mean of the members' probabilities."""
    return log_probabilities(table)[-2 if len(table) > 1 else 0]


def _mean_logit(table: Tensor) -> Tensor:
    """The mean of the members' logits: the geometric mean of their probabilities, made to sum to one."""
    return log_probabilities(table)[-1]


def _majority(table: Tensor) -> Tensor:
    """The share of members that vote for each class; of classes tied for the lead the more probable one wins."""
    rows = log_probabilities(table)
    guesses = rows[: len(table)].argmax(-1).movedim(0, -1)  # [B, M]
    votes = torch.zeros_like(rows[0]).scatter_add_(-1, guesses, torch.ones_like(guesses, dtype=rows.dtype))
    leads = votes == votes.amax(-1, keepdim=True)
    tied = leads.sum(-1, keepdim=True) > 1
    winner = _mean_probability(table).masked_fill(~leads, -math.inf).argmax(-1, keepdim=True)
    return votes.log().scatter_add(-1, winner, TIE * tied.to(votes.dtype)).log_softmax(-1)


def _weighted(table: Tensor, weights: Tensor) -> Tensor:
    """The mean of the members' probabilities by weights `[M]`."""
    used = weights > 0  # a member without weight has no say, not even with logits that are no numbers
    rows = log_probs(table[used.to(table.device)])
    return (rows + weights[used].log().to(rows).view(-1, *[1] * (rows.ndim - 1))).logsumexp(0)


COMBINE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean probability": _mean_probability,
    "mean logit": _mean_logit,
    "majority": _majority,
}
WEIGHTED = "weighted"
RULES = (*COMBINE, WEIGHTED)
