"""Values for plots of a loss landscape: slices around a member, the path between two, the plane through three.

    direction = random_direction(surface.origin, surface.generator("slice", 0))
    curve = evaluate_line(surface, direction)  # the loss at origin + t * direction, for t from -1 to 1

Directions are filter-normalized (Li et al. 2018): the part of every filter is scaled to the norm of that filter, so
that plots of networks with weights of different scales can be compared. Weights and buffers are restored at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.types import TensorTree
from plateaux.ensembles.soup_weights import Interpolation, uniform
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.perturbations import normalize_filters, sample_direction
from plateaux.models.modes import update_bn as reestimate_bn
from plateaux.models.surgery import batchnorm_layers

Statistics = Literal["none", "batch", "own", "recomputed"]
"""BatchNorm statistics at each point: no BatchNorm layers, those of each batch, the running statistics of the member,
or recomputed from the sample."""


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The mean loss and the accuracy at points on a straight line in weight space."""

    at: tuple[float, ...]
    losses: tuple[float, ...]
    stderrs: tuple[float, ...]  # standard errors of the losses over the samples
    accuracies: tuple[float, ...]
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Barrier:
    """The height of the barrier between two members, by the two definitions in use."""

    above_line: float  # the largest excess over the linear interpolation of the endpoints (Entezari et al. 2022)
    above_mean: float  # the largest value minus the mean of the endpoints (Frankle et al. 2020)


@dataclass(frozen=True, slots=True)
class Mark:
    """The position of a member on a grid, with its own loss and accuracy."""

    x: float
    y: float
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class LossGrid:
    """The mean loss and the accuracy on a grid in weight space: row i is at y[i], column j at x[j]."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    accuracies: tuple[tuple[float, ...], ...]
    statistics: Statistics
    marks: Mapping[str, Mark] = field(default_factory=dict)

    @property
    def lowest(self) -> tuple[float, float, float]:
        """The grid point with the lowest loss: x, y, loss. NaN is ignored."""
        loss, x, y = min(
            (loss, self.x[j], self.y[i]) for i, row in enumerate(self.losses) for j, loss in enumerate(row)
            if loss == loss
        )  # fmt: skip
        return x, y, loss


def random_direction(origin: TensorTree, generator: torch.Generator) -> TensorTree:
    """Return a Gaussian direction, filter-normalized to the weights at the origin.

    A filter is a slice of a weight along its first axis: one output channel or unit. Parameters with one axis (biases
    and the weights of normalization layers) stay fixed, as in the published code.
    """
    noise = sample_direction(origin, generator)
    return {name: normalize_filters(noise[name], weight) for name, weight in origin.items()}


def evaluate_line(surface: LossSurface, direction: TensorTree, *, extent: float = 1.0, points: int = 51) -> LossCurve:
    """Return the loss at origin + t * direction for t from -extent to extent. An odd number of points includes 0."""
    at = _linspace(-extent, extent, points)
    with restore_state(surface) as set_state:

        def evaluate(t: float) -> PointStats:
            set_state(tensor_tree.add(surface.origin, direction, times=t) if t else surface.origin)
            return _evaluate_point(surface)

        return _make_curve(at, [evaluate(t) for t in at], _statistics_label(surface, "own"))


def evaluate_path(surface: LossSurface, start: TensorTree, end: TensorTree, *, points: int = 21) -> LossCurve:
    """Return the loss on the straight line from one state dict (0) to another (1).

    BatchNorm statistics are recomputed from the sample at every point.
    """
    at = _linspace(0.0, 1.0, points)
    with restore_state(surface) as set_state:

        def evaluate(t: float) -> PointStats:
            set_state(uniform([start, end], [1 - t, t]))
            return _evaluate_point(surface, update_bn=True)

        return _make_curve(at, [evaluate(t) for t in at], _statistics_label(surface, "recomputed"))


def compute_barrier(at: Sequence[float], values: Sequence[float]) -> Barrier:
    """Return the height of the barrier along a path, by both definitions.

    >>> compute_barrier([0.0, 0.5, 1.0], [0.0, 3.0, 2.0])
    Barrier(above_line=2.0, above_mean=2.0)
    """
    tensor = torch.tensor(list(values), dtype=torch.float64)
    above_line = Interpolation(tuple(at), tuple(values)).barrier
    return Barrier(above_line, float(tensor.max() - (tensor[0] + tensor[-1]) / 2))


def evaluate_grid(
    surface: LossSurface, x: TensorTree, y: TensorTree, *, extent: float = 1.0, points: int = 21
) -> LossGrid:
    """Return the loss at origin + s * x + t * y, for s and t from -extent to extent."""
    at = _linspace(-extent, extent, points)
    with restore_state(surface) as set_state:

        def evaluate(s: float, t: float) -> PointStats:
            moved = tensor_tree.add(tensor_tree.add(surface.origin, x, times=s), y, times=t) if s or t else None
            set_state(surface.origin if moved is None else moved)
            return _evaluate_point(surface)

        rows = [[evaluate(s, t) for s in at] for t in at]
        member = evaluate(0.0, 0.0)
    marks = {"member": Mark(0.0, 0.0, member.loss, member.accuracy)}
    return _make_grid(at, at, rows, _statistics_label(surface, "own"), marks)


def evaluate_plane(
    surface: LossSurface, members: Mapping[str, TensorTree], *, points: int = 21, margin: float = 0.25
) -> LossGrid:
    """Return the loss in the plane through the weights of three members, with the members marked.

    The first member is at (0, 0) and the second on the x axis; both axes are Euclidean distances in weight space
    (Garipov et al. 2018). The grid extends beyond the members by `margin` times their extent. BatchNorm statistics are
    recomputed at every point, because those of the members cannot be interpolated outside their triangle.
    """
    if len(members) != 3:
        raise RecipeError(f"A plane is defined by three members, and {len(members)} were given; select three")
    first, second, third = (
        {name: tree[name].to(surface.device) for name in surface.origin} for tree in members.values()
    )
    x_axis, y_axis, positions = _plane_axes(first, second, third)
    origin = _to_double(first)
    xs, ys = (_axis_range([position[axis] for position in positions], margin, points) for axis in (0, 1))
    with restore_state(surface) as set_state:

        def evaluate(params: TensorTree) -> PointStats:
            set_state(params)
            return _evaluate_point(surface, update_bn=True)

        def params_at(s: float, t: float) -> TensorTree:
            params = tensor_tree.add(tensor_tree.add(origin, x_axis, times=s), y_axis, times=t)
            return {name: params[name].to(first[name].dtype) for name in params}

        rows = [[evaluate(params_at(s, t)) for s in xs] for t in ys]
        at_members = [evaluate(tree) for tree in (first, second, third)]
    marks = {
        name: Mark(*position, stats.loss, stats.accuracy)
        for name, position, stats in zip(members, positions, at_members, strict=True)
    }
    return _make_grid(xs, ys, rows, _statistics_label(surface, "recomputed"), marks)


@contextmanager
def restore_state(surface: LossSurface) -> Iterator[Callable[[TensorTree], None]]:
    """Yield a function that writes weights and buffers into the member, and restore the state at the end."""
    state = {name: tensor for name, tensor in surface.module.state_dict().items() if isinstance(tensor, Tensor)}
    before = tensor_tree.clone(state)
    try:
        yield lambda values: tensor_tree.write({name: state[name] for name in values}, values)
    finally:
        tensor_tree.write(state, before)


@dataclass(frozen=True, slots=True)
class PointStats:
    """The mean loss, its standard error over samples, and the accuracy at one point in weight space."""

    loss: float
    stderr: float
    accuracy: float


@torch.no_grad()
def _evaluate_point(surface: LossSurface, *, update_bn: bool = False) -> PointStats:
    if update_bn and not surface.module.training:
        reestimate_bn(surface.module, (batch.x for batch in surface.batches))
    batch_losses, correct = [], 0
    for batch in surface.batches:
        logits = surface.member(batch.x).double()
        batch_losses.append(surface.losses_from_logits(logits, batch))
        labels = batch.y if batch.y.ndim == 1 else batch.y.argmax(-1)
        correct += int((logits.argmax(-1) == labels).sum())
    losses = torch.cat(batch_losses)
    stderr = float(losses.std() / len(losses) ** 0.5) if len(losses) > 1 else 0.0
    return PointStats(float(losses.mean()), stderr, correct / len(losses))


def _statistics_label(surface: LossSurface, in_eval_mode: Statistics) -> Statistics:
    if not batchnorm_layers(surface.module):
        return "none"
    return "batch" if surface.module.training else in_eval_mode


def _linspace(low: float, high: float, points: int) -> tuple[float, ...]:
    if points < 2:
        raise RecipeError(f"points = {points}: a line needs at least 2 points")
    values = [low + (high - low) * step / (points - 1) for step in range(points)]
    # The middle point is the member itself, so it must be exactly zero in spite of rounding.
    return tuple(0.0 if abs(t) < 1e-12 * (high - low) else t for t in values)


def _axis_range(positions: Sequence[float], margin: float, points: int) -> tuple[float, ...]:
    extra = margin * (max(positions) - min(positions))
    return _linspace(min(positions) - extra, max(positions) + extra, points)


def _plane_axes(
    first: TensorTree, second: TensorTree, third: TensorTree
) -> tuple[TensorTree, TensorTree, list[tuple[float, float]]]:
    """Return two orthonormal directions in float64, and the coordinates of the three members."""
    to_second, to_third = (tensor_tree.add(_to_double(tree), _to_double(first), times=-1.0) for tree in (second, third))
    width = float(tensor_tree.norm(to_second))
    if width == 0:
        raise RecipeError(
            "Two of the three members have the same weights, so they do not define a plane; select other members"
        )
    x_axis = tensor_tree.scale(to_second, 1 / width)
    x = float(tensor_tree.dot(to_third, x_axis))
    residual = tensor_tree.add(to_third, x_axis, times=-x)
    height = float(tensor_tree.norm(residual))
    if height <= 1e-6 * width:  # float32 rounding error
        raise RecipeError("The three members lie on one line, so they do not define a plane; select other members")
    return x_axis, tensor_tree.scale(residual, 1 / height), [(0.0, 0.0), (width, 0.0), (x, height)]


def _to_double(tree: TensorTree) -> TensorTree:
    return {name: tensor.double() for name, tensor in tree.items()}


def _make_curve(at: tuple[float, ...], stats: Sequence[PointStats], statistics: Statistics) -> LossCurve:
    losses, stderrs, accuracies = zip(*((point.loss, point.stderr, point.accuracy) for point in stats), strict=True)
    return LossCurve(at, losses, stderrs, accuracies, statistics)


def _make_grid(
    x: tuple[float, ...],
    y: tuple[float, ...],
    rows: Sequence[Sequence[PointStats]],
    statistics: Statistics,
    marks: Mapping[str, Mark],
) -> LossGrid:
    losses = tuple(tuple(point.loss for point in row) for row in rows)
    accuracies = tuple(tuple(point.accuracy for point in row) for row in rows)
    return LossGrid(x, y, losses, accuracies, statistics, marks)
