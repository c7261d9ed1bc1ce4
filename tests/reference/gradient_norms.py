"""Reference squared gradient norms per sample, with one backward pass each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core.member import MemberModule
from plateaux.core.method import LossFn
from plateaux.core.types import Batch, map_tensors


def gradient_norms(module: nn.Module, batch: Batch, loss: LossFn | None = None) -> Tensor:
    """Return `[B]` in float64; a pruned weight's gradient is zero."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    masks = dict(module.named_buffers())
    norms = []
    for row in range(len(batch)):
        one = Batch(map_tensors(batch.x, lambda t, r=row: t[r : r + 1]), batch.y[row : row + 1], batch.index[:1])
        logits = MemberModule(module)(one.x)
        value = F.cross_entropy(logits, one.y) if loss is None else loss(logits[None], one).sum()
        found = torch.autograd.grad(value, [p for _, p in trained], allow_unused=True)
        total = 0.0
        for (name, _), gradient in zip(trained, found, strict=True):
            if gradient is not None:
                mask = masks.get(f"{name}_mask")
                total += float((gradient if mask is None else gradient * mask).double().square().sum())
        norms.append(total)
    return torch.tensor(norms, dtype=torch.float64)
