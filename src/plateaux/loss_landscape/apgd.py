"""The largest loss within a ball around the weights of a member, by projected gradient ascent with adaptive steps.

APGD: Croce and Hein 2020. The weights are origin + scale * u, and the ascent is in u, where an ellipsoid around the
weights is a ball: the gradient with respect to u is scale * g, so the result does not change if adjacent layers are
rescaled. Each step takes one gradient. The point with the largest loss is stored together with its gradient, so a
return to it costs no pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, isfinite, nan
from typing import Literal

import torch

from plateaux.core import tensor_tree
from plateaux.core.types import TensorTree
from plateaux.loss_landscape.groups import Group, group_gradient, group_losses
from plateaux.loss_landscape.loss_surface import LossSurface
from plateaux.loss_landscape.perturbations import perturb, sample_direction

Norm = Literal["l2", "linf"]

STEP_WEIGHT = 0.75  # weight of the new step; the rest is momentum
MIN_INCREASING = 0.75  # the step size is halved if a smaller fraction of steps since the last checkpoint increased


@dataclass(frozen=True, slots=True)
class Ball:
    """The feasible set: origin + scale * u with |u| <= radius; without a scale, u is the change of the weights."""

    radius: float
    norm: Norm = "l2"
    scale: TensorTree | None = None

    def project_(self, u: TensorTree) -> None:
        """Project u onto the ball, in place."""
        if self.norm == "linf":
            tensor_tree.clamp_(u, self.radius)
        elif (length := float(tensor_tree.norm(u))) > self.radius:
            tensor_tree.scale_(u, self.radius / length)


@dataclass(frozen=True, slots=True)
class ApgdResult:
    """Mean losses of a group during one ascent."""

    initial_loss: float  # at the trained weights
    halfway_loss: float  # the largest after half of the steps
    best_loss: float  # the largest
    best_u: TensorTree  # u of the largest


@dataclass(frozen=True, slots=True)
class Iterate:
    u: TensorTree
    loss: float
    direction: TensorTree  # of steepest ascent, of length one in the norm of the ball

    @property
    def is_finite(self) -> bool:
        return isfinite(self.loss)


def run_apgd(
    surface: LossSurface, group: Group, ball: Ball, *, steps: int, generator: torch.Generator, restarts: int = 1
) -> list[ApgdResult]:
    """Run APGD from the trained weights, and from random points of the ball if `restarts` is above 1.

    Each start takes `steps` gradients and one forward pass. Call it inside `surface.at_params`.
    """
    if ball.radius == 0:
        zeros = _zeros_like(surface.origin)
        perturb(surface, zeros)
        loss = float(group_losses(surface, group).mean())
        return [ApgdResult(loss, loss, loss, zeros)] * restarts
    first = _ascend(surface, group, ball, _zeros_like(surface.origin), steps, generator, None)
    starts = (_random_point(surface.origin, ball, generator) for _ in range(restarts - 1))
    return [first, *(_ascend(surface, group, ball, u, steps, generator, first.initial_loss) for u in starts)]


def _ascend(
    surface: LossSurface,
    group: Group,
    ball: Ball,
    u: TensorTree,
    steps: int,
    generator: torch.Generator,
    initial: float | None,
) -> ApgdResult:
    step_size = _StepSize(2 * ball.radius, steps)
    best: Iterate | None = None
    previous_u: TensorTree | None = None
    halfway = last_loss = -inf if initial is None else initial
    for step in range(steps):
        current = _evaluate(surface, group, ball, u, generator)
        initial = current.loss if initial is None else initial
        if not isfinite(initial):
            return ApgdResult(nan, nan, nan, u)
        best = current if current.is_finite and (best is None or current.loss > best.loss) else best
        if step == steps // 2 and best is not None:
            halfway = best.loss
        increased = step > 0 and current.loss > last_loss
        stalled = step_size.has_stalled(step, increased=increased, best=best.loss if best else -inf)
        if best is None:  # the loss at a random start is NaN or infinite
            u, previous_u = _zeros_like(u), None
            continue
        if stalled or not current.is_finite:
            step_size.value /= 2
            current, previous_u = best, None
        last_loss = current.loss
        u, previous_u = _momentum_step(current, previous_u, step_size.value, ball), current.u
    assert initial is not None
    return _finish(surface, group, ball, u, best, initial, halfway)


def _finish(
    surface: LossSurface,
    group: Group,
    ball: Ball,
    u: TensorTree,
    best: Iterate | None,
    initial: float,
    halfway: float,
) -> ApgdResult:
    """Evaluate the last point and return the result."""
    perturb(surface, u, scale=ball.scale)
    last = float(group_losses(surface, group).mean())
    candidates = [(initial, _zeros_like(u))]
    candidates += [(best.loss, best.u)] if best else []
    candidates += [(last, u)] if isfinite(last) else []
    best_loss, best_u = max(candidates, key=lambda candidate: candidate[0])
    return ApgdResult(initial, max(halfway, initial), best_loss, best_u)


def _evaluate(surface: LossSurface, group: Group, ball: Ball, u: TensorTree, generator: torch.Generator) -> Iterate:
    """Return the loss at u and the direction of steepest ascent; if the gradient is zero, a random direction."""
    perturb(surface, u, scale=ball.scale)
    loss, direction = group_gradient(surface, group)
    if ball.scale is not None:
        tensor_tree.multiply_(direction, ball.scale)
    length = float(tensor_tree.norm(direction))
    if length == 0:
        direction = sample_direction(direction, generator)
        length = float(tensor_tree.norm(direction))
    if ball.norm == "linf":
        torch._foreach_sign_(list(direction.values()))
    else:
        tensor_tree.scale_(direction, 1 / length)
    return Iterate(u, loss if isfinite(length) else nan, direction)


def _momentum_step(current: Iterate, previous_u: TensorTree | None, step: float, ball: Ball) -> TensorTree:
    """Return P(u + a (z - u) + (1 - a) (u - previous_u)) with z = P(u + step * direction); z without a previous u."""
    z = tensor_tree.add(current.u, current.direction, times=step)
    ball.project_(z)
    if previous_u is not None:
        tensor_tree.scale_(z, STEP_WEIGHT)
        tensor_tree.add_(z, current.u, times=2 * (1 - STEP_WEIGHT))
        tensor_tree.add_(z, previous_u, times=STEP_WEIGHT - 1)
        ball.project_(z)
    return z


class _StepSize:
    """The step size, and the test at checkpoints whether the ascent has stalled."""

    def __init__(self, value: float, steps: int) -> None:
        self.value, self.checkpoints = value, checkpoints(steps)
        self.increases, self.last_checkpoint = 0, 0
        self.before = (0.0, -inf)  # step size and largest loss at the last checkpoint

    def has_stalled(self, step: int, *, increased: bool, best: float) -> bool:
        """Return, at a checkpoint, whether too few steps increased the loss, or nothing changed since the last one."""
        self.increases += increased
        if step not in self.checkpoints:
            return False
        too_few = self.increases < MIN_INCREASING * (step - self.last_checkpoint)
        unchanged = self.before == (self.value, best)
        self.increases, self.last_checkpoint, self.before = 0, step, (self.value, best)
        return too_few or unchanged


def checkpoints(steps: int) -> set[int]:
    """Return the steps at which the step size may be halved: p = 0, .22, then gaps that shrink by .03 down to .06.

    >>> sorted(checkpoints(20))
    [5, 9, 12, 14, 16, 18, 19, 20]
    """
    result, percent, gap = set(), 22, 22  # integers avoid rounding errors
    while percent <= 100:
        result.add(ceil(percent * steps / 100))
        gap = max(gap - 3, 6)
        percent += gap
    return result


def _zeros_like(like: TensorTree) -> TensorTree:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def _random_point(origin: TensorTree, ball: Ball, generator: torch.Generator) -> TensorTree:
    """Return a uniformly distributed point of the ball; u is zero for weights whose scale is zero."""
    u = sample_direction(origin, generator, "uniform" if ball.norm == "linf" else "normal")
    if ball.scale is not None:
        tensor_tree.multiply_(u, {name: (tensor != 0).to(tensor.dtype) for name, tensor in ball.scale.items()})
    if ball.norm == "linf":
        tensor_tree.scale_(u, ball.radius)
        return u
    dimension = sum(int(tensor.count_nonzero()) for tensor in u.values())
    if dimension:
        fraction = float(torch.rand((), generator=generator, device=generator.device)) ** (1 / dimension)
        tensor_tree.scale_(u, ball.radius * fraction / float(tensor_tree.norm(u)))
    return u
