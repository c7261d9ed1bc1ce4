"""Soups: one network whose weights are the mean of several, and when that makes sense.

Weights can be averaged where a straight line between them stays low: after a shared, usually pretrained, start.
Members trained from starts of their own lie in different valleys, and their mean on the ridge between.
Held-out samples choose what goes in, never the test set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.types import TensorTree
from plateaux.ensembles.combine import normalized_weights

ScoreFn = Callable[[TensorTree], float]
"""Says of weights how good or how bad they are on held-out samples; where there is BatchNorm, after `reestimate`."""


def uniform(trees: Sequence[TensorTree], weights: Sequence[float] | Tensor | None = None) -> TensorTree:
    """Return the mean of state dicts, equal shares or by weights that sum to one.

    Sums are taken in float64 and cast back. Integer buffers are those of the first tree that has any weight.

    >>> uniform([{"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}])
    {'w': tensor([2.5000])}
    """
    if not trees:
        raise RecipeError("A soup of no networks was asked for; give the state dict of one or more")
    _check_alike(trees)
    parts = normalized_weights([1 / len(trees)] * len(trees) if weights is None else weights, len(trees)).tolist()
    used = [(tree, part) for tree, part in zip(trees, parts, strict=True) if part > 0]
    return {
        name: _mixed(name, [tree[name].detach() for tree, _ in used], [part for _, part in used]) for name in trees[0]
    }


@dataclass(frozen=True, slots=True)
class GreedySoup:
    """What went into a greedy soup, and why: `uniform(trees, weights)` is the soup itself."""

    order: tuple[int, ...]  # every tree, best first: the order they were tried in
    chosen: tuple[int, ...]  # those that went in, in that order
    alone: tuple[float, ...]  # [P] the score of each tree by itself
    scores: tuple[float, ...]  # [P] the score of the mean with each tree tried, in the order they were tried
    weights: tuple[float, ...]  # [P]

    @property
    def score(self) -> float:
        """The held-out score of the soup."""
        return self.scores[self.order.index(self.chosen[-1])]


def greedy(
    trees: Sequence[TensorTree], score: ScoreFn, *, accept: Literal["better", "as good"] = "better"
) -> GreedySoup:
    """Add networks, best first, to the running mean of weights while its held-out score (higher is better) allows it.

    The released code of model soups takes a network when the score is `better`, the paper when it is `as good`.
    """
    if not trees:
        raise RecipeError("A greedy soup of no networks was asked for; give the state dict of one or more")
    if accept not in ("better", "as good"):
        raise RecipeError(f"accept = {accept!r} is not known; allowed: 'better', 'as good'")
    alone = tuple(float(score(tree)) for tree in trees)
    if broken := [number for number, found in enumerate(alone) if found != found]:
        raise RecipeError(f"The held-out score of network {broken[0]} is not a number; leave that network out")
    order = sorted(range(len(trees)), key=lambda number: -alone[number])
    chosen, scores = order[:1], [alone[order[0]]]
    best = scores[0]
    for number in order[1:]:
        # The mean is taken anew by `uniform`, so that the weights given back make the very tree that was judged.
        scores.append(float(score(uniform(trees, _equal([*chosen, number], len(trees))))))
        if scores[-1] > best or (accept == "as good" and scores[-1] == best):
            chosen, best = [*chosen, number], scores[-1]
    return GreedySoup(tuple(order), tuple(chosen), alone, tuple(scores), _equal(chosen, len(trees)))


@dataclass(frozen=True, slots=True)
class Interpolation:
    """Losses along the straight line from one network's weights (0) to another's (1)."""

    at: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def barrier(self) -> float:
        """How far the loss rises above the straight line between its ends: 0 if nowhere, nan if a loss is none."""
        ends = self.losses[0], self.losses[-1]
        rises = [loss - ((1 - t) * ends[0] + t * ends[1]) for t, loss in zip(self.at, self.losses, strict=True)]
        return float(torch.tensor(rises, dtype=torch.float64).max())


def interpolate(a: TensorTree, b: TensorTree, loss: ScoreFn, points: int = 11) -> Interpolation:
    """Return the losses at evenly spaced points of the straight line from weights `a` to weights `b`, ends included."""
    if points < 2:
        raise RecipeError(f"A path of {points} points was asked for; it has 2 ends at least. Give points = 2 or more")
    at = tuple(step / (points - 1) for step in range(points))
    return Interpolation(at, tuple(float(loss(uniform([a, b], [1 - t, t]))) for t in at))


def check_barrier(barrier: float, limit: float, same_start: bool) -> None:
    """Refuse a soup of networks that share no start, unless the barrier between them is at most the limit."""
    if same_start or barrier <= limit:  # never true of a barrier that is not a number
        return
    raise RecipeError(
        f"These networks share no initialisation, and the loss rises by {barrier:g} on the straight line between their "
        f"weights, where {limit:g} is allowed: their mean would be worse than each of them. Combine their predictions "
        "instead, mix networks that started from the same weights, or allow a higher barrier"
    )


def _equal(chosen: Sequence[int], count: int) -> tuple[float, ...]:
    return tuple(1 / len(chosen) if number in chosen else 0.0 for number in range(count))


def _mixed(name: str, tensors: Sequence[Tensor], parts: Sequence[float]) -> Tensor:
    first = tensors[0]
    if first.is_complex():
        mixed = _mixed(name, [torch.view_as_real(tensor) for tensor in tensors], parts)
        return torch.view_as_complex(mixed)
    if first.dtype == torch.bool and not all(torch.equal(first, tensor) for tensor in tensors[1:]):
        raise RecipeError(f"{name!r} differs between the networks: a mask has no mean. Mix networks of the same mask")
    if not first.is_floating_point():
        return first.clone()
    total = first.double() * parts[0]
    low = high = first
    for tensor, part in zip(tensors[1:], parts[1:], strict=True):
        total.add_(tensor.double(), alpha=part)
        low, high = torch.minimum(low, tensor), torch.maximum(high, tensor)
    # A mean lies between its parts; rounding must not carry it out, so that equal networks give themselves.
    return total.to(first.dtype).clamp(low, high)


def _check_alike(trees: Sequence[TensorTree]) -> None:
    """Refuse trees that differ in names, shapes or types, and say where."""
    first = trees[0]
    for number, tree in enumerate(trees[1:], 1):
        if apart := sorted(first.keys() ^ tree.keys()):
            where = "0" if apart[0] in first else str(number)
            raise RecipeError(
                f"Networks 0 and {number} do not have the same tensors: {apart[0]!r} is only in network {where}"
                f"{f', and {len(apart) - 1} more differ' if apart[1:] else ''}. Mix networks of one architecture"
            )
        for name, tensor in first.items():
            here, there = (tuple(tensor.shape), tensor.dtype), (tuple(tree[name].shape), tree[name].dtype)
            if here != there:
                raise RecipeError(
                    f"{name!r} is {here[0]} of {here[1]} in network 0, and {there[0]} of {there[1]} in network "
                    f"{number}. Mix networks of one architecture and precision"
                )
