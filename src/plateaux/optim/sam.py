"""How gradients become a step: plain descent, and the ways to climb before descending.

An update is written for ONE member as a generator: it asks for gradients one by one and returns the direction. Whoever
drives it may run the asks of many members in lockstep, in turn, stacked under vmap or spread over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.method import GradRequest, StepContext, Update, plain_gradient
from plateaux.core.types import TensorTree

__all__ = [
    "AscentDirection",
    "asam_direction",
    "asam_elementwise",
    "count_gradients",
    "get_update",
    "groups",
    "gsam",
    "plain_gradient",
    "sam",
    "sam_direction",
    "sam_on_subset",
    "trace_requests",
]

TINY = 1e-12  # keeps a zero gradient from dividing by zero
NO_ROWS = 1e-9  # a share of the batch below any sample's: what rounding leaves of none

AscentDirection = Callable[[TensorTree, TensorTree], tuple[TensorTree, Tensor]]
"""The way up from (weights, gradient), and the number to divide it by: the radius then sets how far to go."""


def sam_direction(params: TensorTree, gradient: TensorTree) -> tuple[TensorTree, Tensor]:
    """g / |g|: the steepest way up inside a ball (SAM)."""
    return gradient, tensor_tree.norm(gradient)


def asam_elementwise(params: TensorTree, gradient: TensorTree) -> tuple[TensorTree, Tensor]:
    """w^2 g / | |w| g |, every parameter alike: ASAM as most copies have it."""
    return _ellipsoid(tensor_tree.magnitude(params), gradient)


def asam_direction(eta: float) -> AscentDirection:
    """T^2 g / |T g| with T = |w| + eta for weights and 1 for the rest: ASAM as first published."""

    def reach(params: TensorTree, gradient: TensorTree) -> tuple[TensorTree, Tensor]:
        shape = {
            name: tensor.abs() + eta if "weight" in name else torch.ones_like(tensor) for name, tensor in params.items()
        }
        return _ellipsoid(shape, gradient)

    return reach


def _ellipsoid(shape: TensorTree, gradient: TensorTree) -> tuple[TensorTree, Tensor]:
    scaled = tensor_tree.multiply(shape, gradient)
    return tensor_tree.multiply(shape, scaled), tensor_tree.norm(scaled)


def perturbed_params(params: TensorTree, gradient: TensorTree, rho: float, direction: AscentDirection) -> TensorTree:
    """Return the weights rho up the slope; one pass over them, for large networks feel every one."""
    way, length = direction(params, gradient)
    return tensor_tree.add(params, way, times=rho / (length + TINY))


def sam(
    rho: float,
    *,
    direction: AscentDirection = sam_direction,
    m: int | None = None,
    perturbation: Literal["global", "per_worker"] = "global",
) -> Update:
    """Climb by rho, take the gradient up there, and go where it says.

    With `m` the batch is worked through in groups of m samples that each climb on their own (m-sharpness). On a data
    axis `perturbation = "per_worker"` lets every worker climb on its own samples; the second gradient is shared always.
    """
    if rho == 0:
        return plain_gradient
    local = perturbation == "per_worker"

    def once(
        params: TensorTree, part: slice | None, local: bool, shared: bool
    ) -> Generator[GradRequest, TensorTree, TensorTree]:
        gradient = yield GradRequest(rows=part, local=local)
        descent = yield GradRequest(at=perturbed_params(params, gradient, rho, direction), rows=part, local=not shared)
        return descent

    def update(params: TensorTree, moment: StepContext) -> Generator[GradRequest, TensorTree, TensorTree]:
        return (yield from once(params, None, local, True))

    def in_groups(params: TensorTree, moment: StepContext) -> Generator[GradRequest, TensorTree, TensorTree]:
        total: TensorTree | None = None
        # Workers may hold different numbers of groups, so they meet only once, at the end.
        for part, share in groups(moment.size, m or moment.size):
            descent = yield from once(params, part, True, False)
            total = tensor_tree.scale(descent, share) if total is None else tensor_tree.add(total, descent, times=share)
        return (yield GradRequest(average=total))

    return update if m is None else in_groups


def gsam(
    rho: float, *, alpha: float, rho_min: float, lr_min: float = 0.0, direction: AscentDirection = sam_direction
) -> Update:
    """Climb, then leave out what of the first gradient the second does not say (GSAM).

    With g at w and p at the peak, the direction is p - alpha g_perp, g_perp = g - <g, p> p / |p|^2. The radius follows
    the learning rate: (rho_t - rho_min) / (rho - rho_min) = (lr_t - lr_min) / (lr - lr_min).
    """
    if rho == 0 and rho_min == 0:
        return plain_gradient

    def update(params: TensorTree, moment: StepContext) -> Generator[GradRequest, TensorTree, TensorTree]:
        span = moment.peak_lr - lr_min
        radius = rho_min + (rho - rho_min) * ((moment.lr - lr_min) / span if span > 0 else 1.0)
        gradient = yield GradRequest()
        descent = yield GradRequest(at=perturbed_params(params, gradient, radius, direction))
        along: Tensor = tensor_tree.dot(gradient, descent) / (tensor_tree.dot(descent, descent) + TINY)
        across = tensor_tree.add(gradient, descent, times=-along)
        return tensor_tree.add(descent, across, times=-alpha)

    return update


def sam_on_subset(sam_update: Update, *, warmup: Update, step: Literal["split", "shared"] = "split") -> Update:
    """Climb on the samples I am careful about and descend plainly on the rest, in one step (SharpBalance).

    The direction is (1/B) [ sum of plain samples' gradients where I stand + sum of careful samples' gradients up there
    ], the way up found from the careful samples alone. `split` forwards the two parts one after the other, so that
    BatchNorm sees the parts: 1 + f passes for a careful share f. `shared` forwards the batch once for both first
    gradients. `before` is the update until the first meeting.
    """

    def update(params: TensorTree, moment: StepContext) -> Generator[GradRequest, TensorTree, TensorTree]:
        chosen = moment.sam_set
        if chosen is None:
            return (yield from warmup(params, moment))
        size = max(moment.size, 1)
        # Copies that share a batch hold other samples of it, and must ask for the same.
        share = float((yield GradRequest(average={"share": chosen.sum().double() / size}))["share"])
        if share < NO_ROWS:
            return (yield from plain_gradient(params, moment))
        if share > 1 - NO_ROWS:
            return (yield from sam_update(params, moment))
        mine, rest = chosen.nonzero().flatten(), (~chosen).nonzero().flatten()
        known: TensorTree | None = None
        if step == "split":
            flat = yield GradRequest(rows=rest, mean_over=size)
        else:
            flat = yield GradRequest(weight=~chosen, keep_graph=True)
            known = yield GradRequest(weight=chosen, reuse_graph=True)
        steep = yield from _among(mine, size, known, sam_update(params, replace(moment, size=len(mine), sam_set=None)))
        return tensor_tree.add(flat, steep)

    return update


def _among(
    rows: Tensor, size: int, known: TensorTree | None, walk: Generator[GradRequest, TensorTree, TensorTree]
) -> Generator[GradRequest, TensorTree, TensorTree]:
    """Drive an update over some samples of the batch; `known` answers its first ask where it stands already."""
    ask = next(walk)
    while True:
        if known is not None and ask.at is None:
            answer, known = known, None
        else:
            answer = yield replace(ask, rows=rows, mean_over=size)
        try:
            ask = walk.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


SamVariant = Literal["plain", "sam", "asam", "gsam"]


def get_update(name: SamVariant, rho: float | None = None) -> Update:
    """Return the update of that name, at its usual radius unless `rho` says another."""
    if name == "plain":
        if rho:
            raise RecipeError(
                f"method.rho = {rho} is how far to climb: name what climbs, such as method.update = 'sam'"
            )
        return plain_gradient
    radius = {"sam": 0.05, "asam": 0.5, "gsam": 0.05}[name] if rho is None else rho
    if name == "gsam":
        return gsam(radius, alpha=0.4, rho_min=radius)
    return sam(radius, direction=asam_direction(0.01) if name == "asam" else sam_direction)


def count_gradients(update: Update, size: int) -> int:
    """Return how often an update asks for a gradient on a batch of `size`: for members that see each other, a law."""
    return len(trace_requests(update, size))


def trace_requests(update: Update, size: int) -> list[GradRequest]:
    """Return what an update asks for on a batch of `size` when every answer is zero."""
    nothing: TensorTree = {"weight": torch.zeros(1)}
    walk = update(nothing, StepContext(size, lr=1.0, peak_lr=1.0))
    asks: list[GradRequest] = []
    try:
        asks.append(next(walk))
        while True:
            asks.append(walk.send(nothing))
    except StopIteration:
        return asks


def groups(size: int, m: int) -> list[tuple[slice, float]]:
    """Cut `size` samples into groups of m, the last one smaller, each with its share of the whole."""
    cuts = [slice(start, min(start + m, size)) for start in range(0, size, m)] or [slice(0, 0)]
    return [(cut, (cut.stop - cut.start) / max(size, 1)) for cut in cuts]
