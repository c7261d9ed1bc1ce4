"""The losses of the samples of one member, and their gradients with respect to the logits, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plateaux.core.errors import PlateauxError, RecipeError, first_line
from plateaux.core.method import LossFn
from plateaux.core.types import Batch


def normalized_logit_gradient(logits: Tensor, batch: Batch, loss: LossFn | None) -> tuple[Tensor, Tensor]:
    """Return the gradient of each sample with respect to its logits, scaled to norm one, and its squared norm.

    Without the scaling, the gradients of well-fitted samples would underflow in float32.
    """
    gradient = logit_gradient(logits, batch, loss)
    scale = gradient.flatten(1).square().sum(1)
    norm = scale.sqrt().clamp(min=torch.finfo(torch.float64).tiny).view(-1, *[1] * (gradient.ndim - 1))
    return gradient / norm, scale


def logit_gradient(logits: Tensor, batch: Batch, loss: LossFn | None) -> Tensor:
    """Return the gradient of the loss of each sample with respect to its logits, in float64."""
    if loss is None and logits.ndim == 2 and batch.y.ndim == 1 and not batch.y.is_floating_point():
        is_labeled = batch.y >= 0  # cross_entropy ignores labels of -100
        label = batch.y.clamp(min=0)[:, None]
        wide = logits.double()
        gradient = wide.softmax(1)
        # p_y - 1 = -sigmoid(logsumexp of the others - z_y), which does not cancel where p_y is nearly one.
        return gradient.scatter(1, label, -torch.sigmoid(_negative_margin(wide, label))) * is_labeled[:, None]
    with torch.enable_grad():
        wide = logits.detach().double().requires_grad_()
        total = call_loss(loss or _cross_entropy, wide, batch).sum()
        return torch.autograd.grad(total, wide)[0]


def sample_losses(logits: Tensor, batch: Batch, loss: LossFn | None) -> Tensor:
    """Return the loss of every sample in float64."""
    return call_loss(loss or _cross_entropy, logits.double(), batch).double()


def _negative_margin(logits: Tensor, label: Tensor) -> Tensor:
    others = logits.scatter(1, label, -torch.inf)
    return others.logsumexp(1, keepdim=True) - logits.gather(1, label)


def _cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    y = batch.y.to(logits.dtype) if batch.y.is_floating_point() else batch.y
    losses = F.cross_entropy(logits[0], y, reduction="none")
    return losses.reshape(1, len(losses), -1).mean(-1)


def call_loss(loss: LossFn, logits: Tensor, batch: Batch) -> Tensor:
    """Return the losses `[B]` of one member; probes and scores compute them in float64."""
    try:
        return loss(logits[None], batch)[0]
    except PlateauxError:
        raise
    except RuntimeError as error:
        raise RecipeError(
            f"The loss cannot be computed from outputs of {logits.dtype}: {first_line(error)}. Convert its tensors to "
            "the dtype of the outputs, as in weight.to(outputs.dtype)"
        ) from error
