"""Reference curvature: the full Hessian and Gauss-Newton matrix of a small network, entry by entry."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from plateaux.core.types import Batch


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def outputs(module: nn.Module, vector: Tensor, batch: Batch) -> Tensor:
    """The logits at the weights laid out in one vector, in the order of the module's parameters."""
    names, shapes = zip(*[(name, p.shape) for name, p in module.named_parameters()], strict=True)
    parts = vector.split([shape.numel() for shape in shapes])
    weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
    args = (batch.x,) if isinstance(batch.x, Tensor) else ()
    given = {} if isinstance(batch.x, Tensor) else dict(batch.x)
    copies = {name: b.clone() for name, b in module.named_buffers()}
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivatives
        return functional_call(module, {**weights, **copies}, args, given)  # type: ignore[no-any-return]


def hessian(module: nn.Module, batches: list[Batch]) -> Tensor:
    """Second derivatives of the mean cross entropy over all samples, `[P, P]`."""
    count = sum(len(batch) for batch in batches)

    def loss(vector: Tensor) -> Tensor:
        return sum(F.cross_entropy(outputs(module, vector, b), b.y, reduction="sum") for b in batches) / count  # type: ignore[return-value]

    return torch.autograd.functional.hessian(loss, flat(module))  # type: ignore[no-any-return]


def gauss_newton(module: nn.Module, batches: list[Batch]) -> Tensor:
    """The mean over samples of J' H_out J, with the Hessian of every sample's loss over its logits, `[P, P]`."""
    total = torch.zeros(len(flat(module)), len(flat(module)), dtype=torch.float64)
    for batch in batches:
        jacobian = torch.autograd.functional.jacobian(lambda v, b=batch: outputs(module, v, b), flat(module))
        logits = outputs(module, flat(module), batch)
        for j, z, y in zip(jacobian, logits, batch.y, strict=True):
            out = torch.autograd.functional.hessian(lambda at, y=y: F.cross_entropy(at[None], y[None]), z)
            total += j.T @ out @ j
    return total / sum(len(batch) for batch in batches)
