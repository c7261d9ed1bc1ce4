"""The largest loss within a ball around a member, by projected gradient ascent with adaptive steps (APGD).

APGD: Croce and Hein 2020. Weights are home + scale * u, and the ascent runs in u, where an ellipsoid around the weights
is a ball: the steepest way up is scale * g, and rescaling neighbouring layers changes nothing. One gradient is taken a
step; the largest loss seen is kept with its place and its gradient, so that going back to it costs no pass.
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

STEP_WEIGHT = 0.75  # the share of the new step; the rest goes on as before
MIN_INCREASING = 0.75  # a step is halved where fewer than this share of steps since the last checkpoint went up


@dataclass(frozen=True, slots=True)
class Ball:
    """Where weights may go: home + scale * u with |u| at most the radius; without a scale all weights count alike."""

    radius: float
    norm: Norm = "l2"
    scale: TensorTree | None = None

    def project_(self, u: TensorTree) -> None:
        """Bring u to the nearest point of the ball, in place."""
        if self.norm == "linf":
            tensor_tree.clamp_(u, self.radius)
        elif (length := float(tensor_tree.norm(u))) > self.radius:
            tensor_tree.scale_(u, self.radius / length)


@dataclass(frozen=True, slots=True)
class ApgdResult:
    """Where an ascent came from and how far it got, in mean losses of its group."""

    initial_loss: float
    halfway_loss: float  # the largest seen after half of the steps
    best_loss: float  # the largest seen
    best_u: TensorTree  # u of the best


@dataclass(frozen=True, slots=True)
class Iterate:
    u: TensorTree
    loss: float
    direction: TensorTree  # up, of length one in the ball's sense

    @property
    def is_finite(self) -> bool:
        return isfinite(self.loss)


def run_apgd(
    ground: LossSurface, group: Group, ball: Ball, *, steps: int, generator: torch.Generator, restarts: int = 1
) -> list[ApgdResult]:
    """Climb from home, and from random points of the ball where there is more than one start.

    Takes `steps` gradients and one forward pass a start. Whoever calls is inside `ground.standing`.
    """
    if ball.radius == 0:
        nowhere = _zeros_like(ground.origin)
        perturb(ground, nowhere)
        home = float(group_losses(ground, group).mean())
        return [ApgdResult(home, home, home, nowhere)] * restarts
    first = _ascend(ground, group, ball, _zeros_like(ground.origin), steps, generator, None)
    starts = (_random_point(ground.origin, ball, generator) for _ in range(restarts - 1))
    return [first, *(_ascend(ground, group, ball, start, steps, generator, first.initial_loss) for start in starts)]


def _ascend(
    ground: LossSurface,
    group: Group,
    ball: Ball,
    u: TensorTree,
    steps: int,
    generator: torch.Generator,
    home: float | None,
) -> ApgdResult:
    pace = _StepSize(2 * ball.radius, steps)
    best: Iterate | None = None
    older: TensorTree | None = None
    half = last = -inf if home is None else home
    for number in range(steps):
        here = _evaluate(ground, group, ball, u, generator)
        home = here.loss if home is None else home
        if not isfinite(home):
            return ApgdResult(nan, nan, nan, u)
        best = here if here.is_finite and (best is None or here.loss > best.loss) else best
        if number == steps // 2 and best is not None:
            half = best.loss
        stalled = pace.stalled(number, rose=number > 0 and here.loss > last, best=best.loss if best else -inf)
        if best is None:  # a random start beyond what numbers can hold
            u, older = _zeros_like(u), None
            continue
        if stalled or not here.is_finite:
            pace.step /= 2
            here, older = best, None
        last = here.loss
        u, older = _momentum_step(here, older, pace.step, ball), here.u
    assert home is not None
    return _finish(ground, group, ball, u, best, home, half)


def _finish(
    ground: LossSurface, group: Group, ball: Ball, u: TensorTree, best: Iterate | None, home: float, half: float
) -> ApgdResult:
    """Return what was found, after a look at the last point."""
    perturb(ground, u, scale=ball.scale)
    last = float(group_losses(ground, group).mean())
    found = [(home, _zeros_like(u)), *([(best.loss, best.u)] if best else []), *([(last, u)] if isfinite(last) else [])]
    largest, at = max(found, key=lambda pair: pair[0])
    return ApgdResult(home, max(half, home), largest, at)


def _evaluate(ground: LossSurface, group: Group, ball: Ball, u: TensorTree, generator: torch.Generator) -> Iterate:
    """Return the loss at u and the steepest way up from there; where all is level, any way."""
    perturb(ground, u, scale=ball.scale)
    loss, way = group_gradient(ground, group)
    if ball.scale is not None:
        tensor_tree.multiply_(way, ball.scale)
    length = float(tensor_tree.norm(way))
    if length == 0:
        way = sample_direction(way, generator)
        length = float(tensor_tree.norm(way))
    if ball.norm == "linf":
        torch._foreach_sign_(list(way.values()))
    else:
        tensor_tree.scale_(way, 1 / length)
    return Iterate(u, loss if isfinite(length) else nan, way)


def _momentum_step(here: Iterate, older: TensorTree | None, step: float, ball: Ball) -> TensorTree:
    """Return P(u + a (z - u) + (1 - a) (u - older)) with z = P(u + step * way); without an older point z."""
    z = tensor_tree.add(here.u, here.direction, times=step)
    ball.project_(z)
    if older is not None:
        tensor_tree.scale_(z, STEP_WEIGHT)
        tensor_tree.add_(z, here.u, times=2 * (1 - STEP_WEIGHT))
        tensor_tree.add_(z, older, times=STEP_WEIGHT - 1)
        ball.project_(z)
    return z


class _StepSize:
    """The length of a step, and whether the climb has stalled."""

    def __init__(self, step: float, steps: int) -> None:
        self.step, self.marks = step, checkpoints(steps)
        self.rises, self.since = 0, 0
        self.before = (0.0, -inf)  # step and largest loss at the last checkpoint

    def stalled(self, number: int, *, rose: bool, best: float) -> bool:
        """Say, at a checkpoint, whether too few steps went up, or nothing has changed since the last one."""
        self.rises += rose
        if number not in self.marks:
            return False
        few = self.rises < MIN_INCREASING * (number - self.since)
        same = self.before == (self.step, best)
        self.rises, self.since, self.before = 0, number, (self.step, best)
        return few or same


def checkpoints(steps: int) -> set[int]:
    """Return after how many steps the pace is looked at: p = 0, .22, then each gap .03 shorter, but .06 at least.

    >>> sorted(checkpoints(20))
    [5, 9, 12, 14, 16, 18, 19, 20]
    """
    found, share, gap = set(), 22, 22  # per cent: whole numbers round nothing
    while share <= 100:
        found.add(ceil(share * steps / 100))
        gap = max(gap - 3, 6)
        share += gap
    return found


def _zeros_like(like: TensorTree) -> TensorTree:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def _random_point(home: TensorTree, ball: Ball, generator: torch.Generator) -> TensorTree:
    """Return a random point of the ball, spread evenly; weights that cannot move take no part."""
    u = sample_direction(home, generator, "uniform" if ball.norm == "linf" else "normal")
    if ball.scale is not None:
        tensor_tree.multiply_(u, {name: (tensor != 0).to(tensor.dtype) for name, tensor in ball.scale.items()})
    if ball.norm == "linf":
        tensor_tree.scale_(u, ball.radius)
        return u
    free = sum(int(tensor.count_nonzero()) for tensor in u.values())
    if free:
        depth = float(torch.rand((), generator=generator, device=generator.device)) ** (1 / free)
        tensor_tree.scale_(u, ball.radius * depth / float(tensor_tree.norm(u)))
    return u
