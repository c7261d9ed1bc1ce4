"""What one member can offer about a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule, is_same_tensor
from plateaux.core.method import LossFn
from plateaux.core.outputs import OutputFn, logits
from plateaux.core.types import Batch
from plateaux.optim.grad_norms import logit_gradient, sample_losses, squared_norms

__all__ = ["features", "gradient_norm", "last_layer", "logits", "sample_loss"]


def features(layer: str) -> OutputFn:
    """Offer what the named layer puts out, flattened to `[B, D]`."""

    def offer(view: MemberModule, batch: Batch) -> Tensor:
        return view.record(batch.x, [layer])[1][layer].output.flatten(1)

    return _without_vmap(offer)


def gradient_norm(loss: LossFn | None = None) -> OutputFn:
    """Offer the squared norm of every sample's gradient over all trained parameters, `[B]`; exact, and cheap.

    The loss is cross entropy unless another is given. In evaluation mode, in float32 or better.
    """

    def offer(view: MemberModule, batch: Batch) -> Tensor:
        return squared_norms(view, batch, loss)

    return _without_vmap(offer)


def last_layer(loss: LossFn | None = None) -> OutputFn:
    """Offer the squared norm of every sample's gradient over the last layer: |delta|^2 (|h|^2 + 1 with a bias).

    For each sample, delta is the gradient at the logits and h what the last layer sees. One forward pass.
    """

    def offer(view: MemberModule, batch: Batch) -> Tensor:
        assert isinstance(view.module, nn.Module)
        layers = {name: part for name, part in view.module.named_modules() if isinstance(part, nn.Linear)}
        with torch.no_grad(), torch.autocast(batch.y.device.type, enabled=False):
            out, seen = MemberModule(view.module).record(batch.x, list(layers))
            name = next((n for n, s in seen.items() if is_same_tensor(s.output, out) and s.inputs.ndim == 2), None)
            if name is None:
                raise RecipeError(
                    "The score last_layer needs a network whose output is that of an nn.Linear, and this "
                    f"{type(view.module).__name__} has none; take gradient_norm or loss"
                )
            h, layer = seen[name].inputs.double(), layers[name]
            bias = None if layer.bias is None else layer.bias.double()
            delta = logit_gradient(F.linear(h, layer.weight.double(), bias), batch, loss)  # [B, C]
            mask = getattr(layer, "weight_mask", None)
            lengths = h.square().sum(1, keepdim=True) if mask is None else h.square() @ mask.double().T
            return (delta.square() * (lengths + (bias is not None))).sum(1)

    return _without_vmap(offer)


def sample_loss(loss: LossFn | None = None) -> OutputFn:
    """Offer the loss of every sample, `[B]`: the cheapest score."""

    def offer(view: MemberModule, batch: Batch) -> Tensor:
        with torch.no_grad(), torch.autocast(batch.y.device.type, enabled=False):
            return sample_losses(MemberModule(view.module)(batch.x), batch, loss)

    return _without_vmap(offer)


def _without_vmap(offer: OutputFn) -> OutputFn:
    offer.batched = False  # type: ignore[attr-defined]  # hooks do not run inside vmap's functional call
    return offer
