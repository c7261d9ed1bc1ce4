"""Pictures of a landscape as numbers: slices around a member, the path between two, the plane through three.

    along = direction(ground.home, ground.generator("slice", 0))
    found = line(ground, along)                      # the loss at home + t * along, t from -1 to 1

Directions are scaled as Li et al. 2018 do: every filter's part to the norm of that filter, so that pictures of
networks with weights of different sizes can be compared. The ground's weights and buffers are put back at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.types import TensorTree
from plateaux.ensembles.soup import Interpolation, uniform
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.perturbations import as_filters, as_long, sample_direction
from plateaux.models.modes import update_bn as take_anew
from plateaux.models.surgery import batchnorm_layers

Scale = Literal["filter", "layer", "none"]
Statistics = Literal["none", "batch", "own", "mixed", "anew"]
"""BatchNorm's along the way: there is no BatchNorm, each batch's own, the member's, mixed as weights are, taken anew
from the sample at every point."""


@dataclass(frozen=True, slots=True)
class Line:
    """The mean loss and the accuracy at points of a straight line through weights."""

    at: tuple[float, ...]
    losses: tuple[float, ...]
    errors: tuple[float, ...]  # standard errors of the losses over the samples
    accuracies: tuple[float, ...]
    statistics: Statistics

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Barrier:
    """How high a quantity rises between two members, by the two definitions in use."""

    above_line: float  # the largest excess over the straight line between the ends (Entezari et al. 2022)
    above_mean: float  # the largest value less the mean of the ends (Frankle et al. 2020)


@dataclass(frozen=True, slots=True)
class Mark:
    """A member in a surface, with its own loss and accuracy."""

    x: float
    y: float
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Surface:
    """The mean loss and the accuracy on a grid of weights: row i is at y[i], column j at x[j]."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    accuracies: tuple[tuple[float, ...], ...]
    statistics: Statistics
    marks: Mapping[str, Mark] = field(default_factory=dict)

    @property
    def lowest(self) -> tuple[float, float, float]:
        """Where on the grid the loss is lowest, and how low: x, y, loss."""
        found = min(
            (loss, self.x[j], self.y[i]) for i, row in enumerate(self.losses) for j, loss in enumerate(row)
            if loss == loss
        )  # fmt: skip
        return found[1], found[2], found[0]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def direction(
    home: TensorTree, chance: torch.Generator, *, scale: Scale = "filter", vectors: Literal["still", "move"] = "still"
) -> TensorTree:
    """Return a Gaussian direction, scaled to the weights it starts from.

    A filter is a slice of a weight along its first axis: what makes one channel or unit. Biases and the weights of
    normalisation layers, all that has one axis, stay `still` as in the original; where they `move`, every entry is a
    filter of its own.
    """
    ways = sample_direction(home, chance)
    return {name: _scaled(ways[name], weight, scale, vectors == "still") for name, weight in home.items()}


def _scaled(way: Tensor, weight: Tensor, scale: Scale, still: bool) -> Tensor:
    """Return what was drawn, each filter's part (or all) as long as the filter (or the weight)."""
    if weight.ndim < 2 and still:
        return torch.zeros_like(way)
    if scale == "filter":
        return as_filters(way, weight)
    return way if scale == "none" else as_long(way, weight, tuple(range(weight.ndim)))


def line(
    ground: LossSurface, along: TensorTree, *, span: float = 1.0, points: int = 51, update_bn: bool = False
) -> Line:
    """Return the loss at home + t * along, for t from -span to span; an odd number of points holds the member."""
    at = _spread(-span, span, points)
    with at_any_params(ground) as go:

        def look(t: float) -> PointStats:
            go(tensor_tree.add(ground.origin, along, times=t) if t else ground.origin)
            return _look(ground, update_bn)

        return _line(at, [look(t) for t in at], _statistics(ground, "anew" if update_bn else "own"))


def path(ground: LossSurface, start: TensorTree, end: TensorTree, *, points: int = 21, update_bn: bool = True) -> Line:
    """Return the loss along the straight line from one network's state (0) to another's (1).

    BatchNorm's statistics are taken anew from the sample at every point, or mixed as the weights are.
    """
    at = _spread(0.0, 1.0, points)
    with at_any_params(ground) as go:

        def look(t: float) -> PointStats:
            go(uniform([start, end], [1 - t, t]))
            return _look(ground, update_bn)

        return _line(at, [look(t) for t in at], _statistics(ground, "anew" if update_bn else "mixed"))


def barrier(at: Sequence[float], heights: Sequence[float]) -> Barrier:
    """Return how high the heights rise along a path, by both definitions.

    >>> barrier([0.0, 0.5, 1.0], [0.0, 3.0, 2.0])
    Barrier(above_line=2.0, above_mean=2.0)
    """
    tops = torch.tensor(list(heights), dtype=torch.float64)
    above_line = Interpolation(tuple(at), tuple(heights)).barrier
    return Barrier(above_line, float(tops.max() - (tops[0] + tops[-1]) / 2))


def surface(
    ground: LossSurface, x: TensorTree, y: TensorTree, *, span: float = 1.0, points: int = 21, update_bn: bool = False
) -> Surface:
    """Return the loss at home + s * x + t * y, for s and t from -span to span."""
    at = _spread(-span, span, points)
    with at_any_params(ground) as go:

        def look(s: float, t: float) -> PointStats:
            go(tensor_tree.add(tensor_tree.add(ground.origin, x, times=s), y, times=t) if s or t else ground.origin)
            return _look(ground, update_bn)

        seen = [[look(s, t) for s in at] for t in at]
        home = look(0.0, 0.0)
    marks = {"member": Mark(0.0, 0.0, home.loss, home.accuracy)}
    return _surface(at, at, seen, _statistics(ground, "anew" if update_bn else "own"), marks)


def plane(ground: LossSurface, members: Mapping[str, TensorTree], *, points: int = 21, margin: float = 0.25) -> Surface:
    """Return the loss in the plane through three members' weights, the members marked.

    The first member lies at the origin and the second on the first axis; axes are Euclidean distances in weights
    (Garipov et al. 2018). The grid reaches over the members by `margin` of their extent. BatchNorm's statistics are
    taken anew at every point: those of the members have no mean outside their triangle.
    """
    if len(members) != 3:
        raise RecipeError(f"A plane goes through three members, and {len(members)} were given; give three")
    first, second, third = ({name: tree[name].to(ground.device) for name in ground.origin} for tree in members.values())
    across, up, places = _axes(first, second, third)
    origin = _wide(first)
    xs, ys = _reach([p[0] for p in places], margin, points), _reach([p[1] for p in places], margin, points)
    with at_any_params(ground) as go:

        def look(at: TensorTree) -> PointStats:
            go(at)
            return _look(ground, True)

        def there(s: float, t: float) -> TensorTree:
            moved = tensor_tree.add(tensor_tree.add(origin, across, times=s), up, times=t)
            return {name: moved[name].to(first[name].dtype) for name in moved}

        seen = [[look(there(s, t)) for s in xs] for t in ys]
        own = [look(tree) for tree in (first, second, third)]
    marks = {
        name: Mark(*place, each.loss, each.accuracy) for name, place, each in zip(members, places, own, strict=True)
    }
    return _surface(xs, ys, seen, _statistics(ground, "anew"), marks)


@contextmanager
def at_any_params(ground: LossSurface) -> Iterator[Callable[[TensorTree], None]]:
    """Lend the function that writes weights and buffers into the member; at the end all are as they were."""
    state = {name: tensor for name, tensor in ground.module.state_dict().items() if isinstance(tensor, Tensor)}
    before = tensor_tree.clone(state)
    try:
        yield lambda at: tensor_tree.write({name: state[name] for name in at}, at)
    finally:
        tensor_tree.write(state, before)


@dataclass(frozen=True, slots=True)
class PointStats:
    """What was seen at one point."""

    loss: float
    error: float
    accuracy: float


@torch.no_grad()
def _look(ground: LossSurface, reestimate: bool) -> PointStats:
    if reestimate and not ground.module.training:
        take_anew(ground.module, (batch.x for batch in ground.batches))
    losses, right = [], 0
    for batch in ground.batches:
        logits = ground.view(batch.x).double()
        losses.append(ground.losses_from_logits(logits, batch))
        label = batch.y if batch.y.ndim == 1 else batch.y.argmax(-1)
        right += int((logits.argmax(-1) == label).sum())
    every = torch.cat(losses)
    error = float(every.std() / len(every) ** 0.5) if len(every) > 1 else 0.0
    return PointStats(float(every.mean()), error, right / len(every))


def _statistics(ground: LossSurface, otherwise: Statistics) -> Statistics:
    if not batchnorm_layers(ground.module):
        return "none"
    return "batch" if ground.module.training else otherwise


def _spread(low: float, high: float, points: int) -> tuple[float, ...]:
    if points < 2:
        raise RecipeError(f"{points} points were asked for, and a line has 2 ends; give 2 or more")
    found = [low + (high - low) * step / (points - 1) for step in range(points)]
    # The middle is the member itself, whatever rounding says.
    return tuple(0.0 if abs(t) < 1e-12 * (high - low) else t for t in found)


def _reach(places: Sequence[float], margin: float, points: int) -> tuple[float, ...]:
    more = margin * (max(places) - min(places))
    return _spread(min(places) - more, max(places) + more, points)


def _axes(
    first: TensorTree, second: TensorTree, third: TensorTree
) -> tuple[TensorTree, TensorTree, list[tuple[float, float]]]:
    """Return two orthogonal directions of length one in float64, and where the three members lie."""
    one, other = (tensor_tree.add(_wide(tree), _wide(first), times=-1.0) for tree in (second, third))
    width = float(tensor_tree.norm(one))
    if width == 0:
        raise RecipeError("Two of the three members have the same weights, so no plane is theirs; give other members")
    across = tensor_tree.scale(one, 1 / width)
    along = float(tensor_tree.dot(other, across))
    rest = tensor_tree.add(other, across, times=-along)
    height = float(tensor_tree.norm(rest))
    if height <= 1e-6 * width:  # what rounding in float32 leaves
        raise RecipeError("The three members lie on one line, so no plane is theirs; give other members")
    return across, tensor_tree.scale(rest, 1 / height), [(0.0, 0.0), (width, 0.0), (along, height)]


def _wide(tree: TensorTree) -> TensorTree:
    return {name: tensor.double() for name, tensor in tree.items()}


def _line(at: tuple[float, ...], seen: Sequence[PointStats], statistics: Statistics) -> Line:
    losses, errors, accuracies = zip(*((each.loss, each.error, each.accuracy) for each in seen), strict=True)
    return Line(at, losses, errors, accuracies, statistics)


def _surface(
    x: tuple[float, ...],
    y: tuple[float, ...],
    seen: Sequence[Sequence[PointStats]],
    statistics: Statistics,
    marks: Mapping[str, Mark],
) -> Surface:
    losses = tuple(tuple(each.loss for each in row) for row in seen)
    accuracies = tuple(tuple(each.accuracy for each in row) for row in seen)
    return Surface(x, y, losses, accuracies, statistics, marks)
