"""Scores of samples: output functions that compute one number for every sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule, find_last_linear, pruning_masks
from plateaux.core.method import LossFn
from plateaux.core.outputs import LoopedOutput, OutputFn
from plateaux.core.types import Batch
from plateaux.optim.grad_norms import squared_norms
from plateaux.optim.losses import logit_gradient, sample_losses


def features(layer: str) -> OutputFn:
    """Return the output function of a named layer, flattened to `[B, D]`."""

    def output(member: MemberModule, batch: Batch) -> Tensor:
        return member.record(batch.x, [layer])[1][layer].output.flatten(1)

    return LoopedOutput(output)


def gradient_norm(loss: LossFn | None = None) -> OutputFn:
    """Score samples by the squared norm of their gradient over all trained parameters, `[B]`.

    The loss is cross entropy unless another is given. The norms are exact; they are computed in evaluation mode, in
    float32 or float64.
    """

    def output(member: MemberModule, batch: Batch) -> Tensor:
        return squared_norms(member, batch, loss)

    return LoopedOutput(output)


def last_layer(loss: LossFn | None = None) -> OutputFn:
    """Score samples by the squared norm of their gradient over the last layer, `[B]`, in one forward pass.

    |delta|^2 |h|^2, or |delta|^2 (|h|^2 + 1) with a bias; delta is the gradient of the loss with respect to the logits,
    and h the inputs of the last layer.
    """

    def output(member: MemberModule, batch: Batch) -> Tensor:
        assert isinstance(member.module, nn.Module)
        with torch.no_grad(), torch.autocast(batch.y.device.type, enabled=False):
            last = find_last_linear(MemberModule(member.module), batch.x)
            if last is None:
                raise RecipeError(
                    'score = "last_layer" needs a network whose output is the output of an nn.Linear, and this '
                    f'{type(member.module).__name__} has none; use "gradient_norm" or "loss"'
                )
            layer = member.module.get_submodule(last.name)
            assert isinstance(layer, nn.Linear)
            h = last.inputs.double()
            bias = None if layer.bias is None else layer.bias.double()
            delta = logit_gradient(F.linear(h, layer.weight.double(), bias), batch, loss)  # [B, C]
            mask = pruning_masks(layer).get("weight")
            lengths = h.square().sum(1, keepdim=True) if mask is None else h.square() @ mask.double().T
            return (delta.square() * (lengths + (bias is not None))).sum(1)

    return LoopedOutput(output)


def sample_loss(loss: LossFn | None = None) -> OutputFn:
    """Score samples by their loss, `[B]`: the cheapest score."""

    def output(member: MemberModule, batch: Batch) -> Tensor:
        with torch.no_grad(), torch.autocast(batch.y.device.type, enabled=False):
            return sample_losses(MemberModule(member.module)(batch.x), batch, loss)

    return LoopedOutput(output)
