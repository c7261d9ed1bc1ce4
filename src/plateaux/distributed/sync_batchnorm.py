"""BatchNorm whose batch is spread over processes: statistics of the whole batch, exact gradients, on any device.

torch's own SyncBatchNorm takes CUDA inputs only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plateaux.core.errors import RecipeError


def convert_sync_batchnorm(module: nn.Module, group: Any) -> None:
    """Turn every BatchNorm of a network, in place, into one that normalises over the group's whole batch."""
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm):
            child.__class__ = _synced_kind(name, child)
            child.group = group


class SyncedBatchNorm(_BatchNorm):
    """BatchNorm over a process group, for inputs `[B, C, ...]`."""

    group: Any = None

    def _check_input_dim(self, x: Tensor) -> None:
        assert x.dim() >= 2

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide = x if x.dtype == torch.float64 else x.float()
        count = torch.tensor([x.numel() / x.shape[1]], dtype=wide.dtype, device=x.device)
        total = _add_up(torch.cat([wide.sum(axes), count]), self.group)
        size = total[-1].detach().clamp(min=1)
        mean = total[:-1] / size
        shape = [1, -1, *[1] * (x.dim() - 2)]
        centred = wide - mean.view(shape)
        variance = _add_up((centred * centred).sum(axes), self.group) / size
        if float(total[-1]):  # nobody may have a sample
            self._remember(mean.detach(), variance.detach(), float(size))
        out = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, size: float) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_((variance * (size / max(size - 1, 1))).to(self.running_var.dtype), rate)


def _add_up(x: Tensor, group: Any) -> Tensor:
    total: Tensor = _AddUp.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _SyncedThenActive(SyncedBatchNorm):
    """timm's BatchNorm with dropout and activation in one layer."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        for layer in (self.drop, self.act):
            assert isinstance(layer, nn.Module)
            out = layer(out)
        return out


def _synced_kind(name: str, layer: _BatchNorm) -> type[SyncedBatchNorm]:
    if type(layer).forward is _BatchNorm.forward or isinstance(layer, nn.SyncBatchNorm | SyncedBatchNorm):
        return _SyncedThenActive if isinstance(layer, _SyncedThenActive) else SyncedBatchNorm
    if isinstance(getattr(layer, "act", None), nn.Module) and isinstance(getattr(layer, "drop", None), nn.Module):
        return _SyncedThenActive
    raise RecipeError(
        f"Layer {name!r} is a BatchNorm of its own kind ({type(layer).__name__}), which cannot be made to share its "
        "statistics over a data axis; set executor.sync_batchnorm=false, or executor.data_parallel = 1"
    )


class _AddUp(torch.autograd.Function):
    """Sum over processes, forwards and backwards: everyone's loss depends on everyone's statistics."""

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
