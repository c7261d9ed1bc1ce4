"""Model soups: one network whose weights are the mean of several networks' weights.

Averaging works if the loss stays low on the straight line between the weights, as after a shared (usually pretrained)
initialization. Networks with independent initializations lie in different minima, with a loss barrier between them.
Select networks on held-out samples, never on the test set.
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
"""Returns a score or loss of weights on held-out samples; with BatchNorm, after `update_bn`."""


def uniform(trees: Sequence[TensorTree], weights: Sequence[float] | Tensor | None = None) -> TensorTree:
    """Return the mean of state dicts, with equal weights or with `weights` that sum to 1.

    Sums are computed in float64 and converted back. Integer buffers are those of the first state dict with weight > 0.

    >>> uniform([{"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}])
    {'w': tensor([2.5000])}
    """
    if not trees:
        raise RecipeError("A soup of no networks was requested. Pass at least one state dict.")
    _check_same_structure(trees)
    values = normalized_weights([1 / len(trees)] * len(trees) if weights is None else weights, len(trees)).tolist()
    used = [(tree, weight) for tree, weight in zip(trees, values, strict=True) if weight > 0]
    return {
        name: _average(name, [tree[name].detach() for tree, _ in used], [weight for _, weight in used])
        for name in trees[0]
    }


@dataclass(frozen=True, slots=True)
class GreedySoup:
    """The networks of a greedy soup and their scores; `uniform(trees, weights)` is the soup itself."""

    order: tuple[int, ...]  # all networks, best first: the order in which they were tried
    chosen: tuple[int, ...]  # the networks in the soup, in that order
    alone: tuple[float, ...]  # [P] the score of each single network
    scores: tuple[float, ...]  # [P] the score of the mean with each network tried, in the order of `order`
    weights: tuple[float, ...]  # [P]

    @property
    def score(self) -> float:
        """Return the held-out score of the soup."""
        return self.scores[self.order.index(self.chosen[-1])]


def greedy(
    trees: Sequence[TensorTree], score: ScoreFn, *, accept: Literal["better", "as good"] = "better"
) -> GreedySoup:
    """Add networks, best first, to the mean of weights as long as its held-out score (higher is better) improves.

    The released code of model soups accepts a network if the score is `better`, the paper if it is `as good`.
    """
    if not trees:
        raise RecipeError("A greedy soup of no networks was requested. Pass at least one state dict.")
    if accept not in ("better", "as good"):
        raise RecipeError(f"Unknown accept = {accept!r}; allowed: 'better', 'as good'.")
    single_scores = tuple(float(score(tree)) for tree in trees)
    if is_nan := [i for i, value in enumerate(single_scores) if value != value]:
        raise RecipeError(f"The held-out score of network {is_nan[0]} is NaN. Remove that network.")
    order = sorted(range(len(trees)), key=lambda i: -single_scores[i])
    chosen, scores = order[:1], [single_scores[order[0]]]
    best = scores[0]
    for i in order[1:]:
        # Recompute the mean with `uniform`, so that the returned weights reproduce exactly the scored state dict.
        scores.append(float(score(uniform(trees, _equal_weights([*chosen, i], len(trees))))))
        if scores[-1] > best or (accept == "as good" and scores[-1] == best):
            chosen, best = [*chosen, i], scores[-1]
    return GreedySoup(tuple(order), tuple(chosen), single_scores, tuple(scores), _equal_weights(chosen, len(trees)))


@dataclass(frozen=True, slots=True)
class Interpolation:
    """Losses along the straight line from one network's weights (0) to another's (1)."""

    at: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def barrier(self) -> float:
        """Return the maximum rise of the loss above the linear interpolation of its ends; NaN if a loss is NaN."""
        ends = self.losses[0], self.losses[-1]
        rises = [loss - ((1 - t) * ends[0] + t * ends[1]) for t, loss in zip(self.at, self.losses, strict=True)]
        return float(torch.tensor(rises, dtype=torch.float64).max())


def interpolate(a: TensorTree, b: TensorTree, loss: ScoreFn, points: int = 11) -> Interpolation:
    """Return the losses at evenly spaced points of the straight line from weights `a` to weights `b`, ends included."""
    if points < 2:
        raise RecipeError(f"points = {points} was given. A line needs at least 2 points.")
    at = tuple(step / (points - 1) for step in range(points))
    return Interpolation(at, tuple(float(loss(uniform([a, b], [1 - t, t]))) for t in at))


def check_barrier(barrier: float, limit: float, same_start: bool) -> None:
    """Raise an error for networks with different initializations, unless the loss barrier is at most the limit."""
    if same_start or barrier <= limit:  # False if the barrier is NaN
        return
    raise RecipeError(
        f"These networks have different initializations, and the loss rises by {barrier:g} on the straight line "
        f"between their weights; {limit:g} is allowed. Their mean would be worse than each network. Combine their "
        "predictions instead, average networks that share an initialization, or allow a higher barrier."
    )


def _equal_weights(chosen: Sequence[int], count: int) -> tuple[float, ...]:
    return tuple(1 / len(chosen) if i in chosen else 0.0 for i in range(count))


def _average(name: str, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    first = tensors[0]
    if first.is_complex():
        averaged = _average(name, [torch.view_as_real(tensor) for tensor in tensors], weights)
        return torch.view_as_complex(averaged)
    if first.dtype == torch.bool and not all(torch.equal(first, tensor) for tensor in tensors[1:]):
        raise RecipeError(
            f"The boolean mask {name!r} differs between the networks, so it has no mean. Average networks with equal "
            "masks."
        )
    if not first.is_floating_point():
        return first.clone()
    total = first.double() * weights[0]
    low = high = first
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor.double(), alpha=weight)
        low, high = torch.minimum(low, tensor), torch.maximum(high, tensor)
    # Clamp, so that rounding does not move the mean outside its inputs and equal networks give exactly themselves.
    return total.to(first.dtype).clamp(low, high)


def _check_same_structure(trees: Sequence[TensorTree]) -> None:
    """Raise an error that names the first difference if state dicts differ in names, shapes, or dtypes."""
    first = trees[0]
    for i, tree in enumerate(trees[1:], 1):
        if different := sorted(first.keys() ^ tree.keys()):
            owner = "0" if different[0] in first else str(i)
            raise RecipeError(
                f"Networks 0 and {i} do not have the same tensors: {different[0]!r} is only in network {owner}"
                f"{f', and {len(different) - 1} more differ' if different[1:] else ''}. "
                "Average networks of one architecture."
            )
        for name, tensor in first.items():
            expected, actual = (tuple(tensor.shape), tensor.dtype), (tuple(tree[name].shape), tree[name].dtype)
            if expected != actual:
                raise RecipeError(
                    f"{name!r} is {expected[0]} of {expected[1]} in network 0, and {actual[0]} of {actual[1]} in "
                    f"network {i}. Average networks of one architecture and precision."
                )
