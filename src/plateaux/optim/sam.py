"""Updates: how gradients become a step. Plain gradients, SAM, ASAM, GSAM, and SAM on a subset of the samples.

An update is a generator for ONE member: it yields requests for gradients one by one and returns the direction of the
step. The caller can serve the requests of many members in lockstep, in turn, stacked with vmap, or on several devices.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from plateaux.core import tensor_tree
from plateaux.core.errors import PlateauxError, RecipeError, first_line
from plateaux.core.method import Average, GradRequest, StepContext, Update, plain_gradient
from plateaux.core.types import TensorTree

__all__ = [
    "AscentDirection",
    "asam_direction",
    "asam_elementwise",
    "count_gradients",
    "get_update",
    "groups",
    "gsam",
    "min_fraction",
    "plain_gradient",
    "sam",
    "sam_direction",
    "sam_on_subset",
    "trace_requests",
]

EPSILON = 1e-12  # prevents division by zero for a zero gradient

AscentDirection = Callable[[TensorTree, TensorTree], tuple[TensorTree, Tensor]]
"""Maps (parameters, gradient) to an ascent direction and the norm to divide it by; rho is the length of the step."""


def sam_direction(params: TensorTree, gradient: TensorTree) -> tuple[TensorTree, Tensor]:
    """g / |g|: the steepest ascent in a Euclidean ball (SAM)."""
    return gradient, tensor_tree.norm(gradient)


def asam_elementwise(params: TensorTree, gradient: TensorTree) -> tuple[TensorTree, Tensor]:
    """w^2 g / | |w| g | for all parameters: ASAM as in most implementations."""
    return _ellipsoid(tensor_tree.magnitude(params), gradient)


def asam_direction(eta: float) -> AscentDirection:
    """T^2 g / |T g| with T = |w| + eta for weights and 1 for all other parameters: ASAM as published."""

    def direction(params: TensorTree, gradient: TensorTree) -> tuple[TensorTree, Tensor]:
        scale = {
            name: tensor.abs() + eta if "weight" in name else torch.ones_like(tensor) for name, tensor in params.items()
        }
        return _ellipsoid(scale, gradient)

    return direction


def _ellipsoid(scale: TensorTree, gradient: TensorTree) -> tuple[TensorTree, Tensor]:
    scaled = tensor_tree.multiply(scale, gradient)
    return tensor_tree.multiply(scale, scaled), tensor_tree.norm(scaled)


def perturbed_params(params: TensorTree, gradient: TensorTree, rho: float, direction: AscentDirection) -> TensorTree:
    """Return the weights after a step of length rho in the ascent direction, in one pass over the weights."""
    ascent, norm = direction(params, gradient)
    return tensor_tree.add(params, ascent, times=rho / (norm + EPSILON))


def sam(
    rho: float,
    *,
    direction: AscentDirection = sam_direction,
    m: int | None = None,
    perturbation: Literal["global", "per_worker"] = "global",
) -> Update:
    """Return the update of SAM: the gradient at weights that are perturbed by rho in the ascent direction.

    With `m` the batch is divided into groups of m samples with perturbations of their own (m-sharpness). With
    `perturbation = "per_worker"` every process of the data axis computes a perturbation from its own samples; the
    gradient at the perturbed weights is averaged over all processes in any case.
    """
    if rho == 0:
        return plain_gradient
    local = perturbation == "per_worker"

    def sam_gradient(
        params: TensorTree, rows: slice | None, local: bool, shared: bool
    ) -> Generator[GradRequest, TensorTree, TensorTree]:
        gradient = yield GradRequest(rows=rows, local=local)
        descent = yield GradRequest(at=perturbed_params(params, gradient, rho, direction), rows=rows, local=not shared)
        return descent

    def update(params: TensorTree, context: StepContext) -> Generator[GradRequest, TensorTree, TensorTree]:
        return (yield from sam_gradient(params, None, local, True))

    def in_groups(params: TensorTree, context: StepContext) -> Generator[GradRequest | Average, TensorTree, TensorTree]:
        total: TensorTree = {}
        # Processes may have different numbers of groups, so they communicate only once, at the end.
        for rows, weight in groups(context.size, m or context.size):
            descent = yield from sam_gradient(params, rows, True, False)
            total = tensor_tree.add(total, descent, times=weight) if total else tensor_tree.scale(descent, weight)
        return (yield Average(total))

    return update if m is None else in_groups


def gsam(
    rho: float, *, alpha: float, rho_min: float, lr_min: float = 0.0, direction: AscentDirection = sam_direction
) -> Update:
    """Return the update of GSAM: SAM minus the part of the plain gradient that is orthogonal to it.

    With g at w and p at the perturbed weights, the direction is p - alpha g_perp, g_perp = g - <g, p> p / |p|^2. The
    radius follows the learning rate: (rho_t - rho_min) / (rho - rho_min) = (lr_t - lr_min) / (lr - lr_min).
    """
    if rho == 0 and rho_min == 0:
        return plain_gradient

    def update(params: TensorTree, context: StepContext) -> Generator[GradRequest, TensorTree, TensorTree]:
        lr_range = context.peak_lr - lr_min
        radius = rho_min + (rho - rho_min) * ((context.lr - lr_min) / lr_range if lr_range > 0 else 1.0)
        gradient = yield GradRequest()
        descent = yield GradRequest(at=perturbed_params(params, gradient, radius, direction))
        projection: Tensor = tensor_tree.dot(gradient, descent) / (tensor_tree.dot(descent, descent) + EPSILON)
        orthogonal = tensor_tree.add(gradient, descent, times=-projection)
        return tensor_tree.add(descent, orthogonal, times=-alpha)

    return update


def sam_on_subset(sam_update: Update, *, warmup: Update) -> Update:
    """Return the update of SharpBalance: SAM on the sharpness-aware set and plain gradients on all other samples.

    The direction is (1/B) [ sum of plain gradients of the other samples + sum of gradients of the sharpness-aware
    samples at weights perturbed by their gradient alone ]. Each part has a forward pass of its own, so that BatchNorm
    sees the parts separately: 1 + f passes for a fraction f of sharpness-aware samples. A part that is too small to
    be trained on joins the other part. `warmup` is the update before the first data partition.
    """

    def update(params: TensorTree, context: StepContext) -> Generator[GradRequest | Average, TensorTree, TensorTree]:
        sam_set = context.sam_set
        if sam_set is None:
            return (yield from warmup(params, context))
        size = max(context.size, 1)
        # Processes that share a batch hold different samples of it, and must yield the same requests.
        fraction = float((yield Average({"fraction": sam_set.sum().double() / size}))["fraction"])
        if fraction < context.min_fraction:
            return (yield from plain_gradient(params, context))
        if fraction > 1 - context.min_fraction:
            return (yield from sam_update(params, context))
        sam_rows, plain_rows = sam_set.nonzero().flatten(), (~sam_set).nonzero().flatten()
        plain = yield GradRequest(rows=plain_rows, mean_over=size)
        subset_update = sam_update(params, replace(context, size=len(sam_rows), sam_set=None))
        perturbed = yield from _on_rows(sam_rows, size, subset_update)
        return tensor_tree.add(plain, perturbed)

    return update


def _on_rows(
    rows: Tensor, size: int, update: Generator[GradRequest | Average, TensorTree, TensorTree]
) -> Generator[GradRequest | Average, TensorTree, TensorTree]:
    """Restrict the gradients that an update requests to some samples."""
    request = next(update)
    while True:
        result = yield request if isinstance(request, Average) else replace(request, rows=rows, mean_over=size)
        try:
            request = update.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


SamVariant = Literal["plain", "sam", "asam", "gsam"]


def get_update(name: SamVariant, rho: float | None = None) -> Update:
    """Return the update called `name`, with its default radius unless `rho` is given."""
    if name == "plain":
        if rho:
            raise RecipeError(
                f"method.rho = {rho} has no effect with method.update = 'plain': set method.update = 'sam', 'asam', or "
                "'gsam', or leave out method.rho"
            )
        return plain_gradient
    radius = {"sam": 0.05, "asam": 0.5, "gsam": 0.05}[name] if rho is None else rho
    if name == "gsam":
        return gsam(radius, alpha=0.4, rho_min=radius)
    return sam(radius, direction=asam_direction(0.01) if name == "asam" else sam_direction)


def min_fraction(module: nn.Module, size: int, *, share: float) -> float:
    """Return below which fraction of a batch of `size / share` samples a part joins the other part.

    BatchNorm1d cannot normalize one sample, and torch raises an error for it.
    """
    return 1.5 * share / max(size, 1) if any(isinstance(layer, nn.BatchNorm1d) for layer in module.modules()) else 1e-9


def count_gradients(update: Update, size: int) -> int:
    """Return the number of gradients that an update requests for a batch of `size`; constant for joint methods."""
    return len(trace_requests(update, size))


def trace_requests(update: Update, size: int, sam_set: Tensor | None = None) -> list[GradRequest]:
    """Return the gradients that an update requests for a batch of `size`, in a dry run with one weight.

    The weight and all gradients are one, since an update may divide by their norm.
    """
    ones: TensorTree = {"weight": torch.ones(1)}
    requests: list[GradRequest] = []
    try:
        dry_run = update(ones, StepContext(size, lr=1.0, peak_lr=1.0, sam_set=sam_set))
        request = next(dry_run)
        while True:
            if isinstance(request, Average):
                request = dry_run.send(request.tree)
                continue
            if not isinstance(request, GradRequest):
                raise TypeError(f"it yielded {request!r}, but an update yields GradRequest")
            requests.append(request)
            request = dry_run.send(ones)
    except StopIteration:
        return requests
    except PlateauxError:
        raise
    except Exception as problem:  # code of the user
        raise RecipeError(
            "The update of this method failed in a dry run with one parameter, 'weight' of shape [1], whose value and "
            f"gradient are 1 ({type(problem).__name__}: {first_line(problem)}). An update must work for any parameters"
        ) from problem


def groups(size: int, m: int) -> list[tuple[slice, float]]:
    """Divide `size` samples into groups of m, the last one smaller; return groups and their fractions."""
    slices = [slice(start, min(start + m, size)) for start in range(0, size, m)] or [slice(0, 0)]
    return [(rows, (rows.stop - rows.start) / max(size, 1)) for rows in slices]
