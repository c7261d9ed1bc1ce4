"""Synchronized BatchNorm: statistics of a batch that is divided over processes, with exact gradients, on any device.

`torch.nn.SyncBatchNorm` supports CUDA inputs only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plateaux.core.errors import RecipeError


def convert_sync_batchnorm(module: nn.Module, group: Any) -> None:
    """Convert every BatchNorm of a network, in place, to one that normalizes over the batch of all processes."""
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm):
            child.__class__ = _synced_class(name, child)
            child.group = group


class SyncedBatchNorm(_BatchNorm):
    """BatchNorm over a process group, for inputs `[B, C, ...]`."""

    group: Any = None

    def _check_input_dim(self, x: Tensor) -> None:
        assert x.dim() >= 2

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x if x.dtype == torch.float64 else x.float()
        count = torch.tensor([x.numel() / x.shape[1]], dtype=wide.dtype, device=x.device)
        total = _all_reduce_sum(torch.cat([wide.sum(dims), count]), self.group)
        size = total[-1].detach().clamp(min=1)
        mean = total[:-1] / size
        shape = [1, -1, *[1] * (x.dim() - 2)]
        centered = wide - mean.view(shape)
        variance = _all_reduce_sum((centered * centered).sum(dims), self.group) / size
        if float(total[-1]):  # all processes may have empty batches
            self._update_running_stats(mean.detach(), variance.detach(), float(size))
        out = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(x.dtype)

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor, size: float) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_((variance * (size / max(size - 1, 1))).to(self.running_var.dtype), rate)


def _all_reduce_sum(x: Tensor, group: Any) -> Tensor:
    total: Tensor = _AllReduceSum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _SyncedBatchNormAct(SyncedBatchNorm):
    """BatchNorm with dropout and activation in one layer, as timm's BatchNormAct2d."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        for layer in (self.drop, self.act):
            assert isinstance(layer, nn.Module)
            out = layer(out)
        return out


def _synced_class(name: str, layer: _BatchNorm) -> type[SyncedBatchNorm]:
    if type(layer).forward is _BatchNorm.forward or isinstance(layer, nn.SyncBatchNorm | SyncedBatchNorm):
        return _SyncedBatchNormAct if isinstance(layer, _SyncedBatchNormAct) else SyncedBatchNorm
    if isinstance(getattr(layer, "act", None), nn.Module) and isinstance(getattr(layer, "drop", None), nn.Module):
        return _SyncedBatchNormAct
    raise RecipeError(
        f"Layer {name!r} is a custom BatchNorm ({type(layer).__name__}), which cannot be synchronized over processes; "
        "set executor.sync_batchnorm = false or executor.data_parallel = 1"
    )


class _AllReduceSum(torch.autograd.Function):
    """Sum over processes in the forward and the backward pass: all losses depend on the statistics of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
