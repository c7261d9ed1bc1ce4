"""Per-sample sharpness in a custom training loop: the scores from which SharpBalance partitions the samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from plateaux.core.errors import TrainingLoopError, suggest
from plateaux.core.member import MemberModule
from plateaux.core.method import LossFn
from plateaux.core.outputs import OutputFn
from plateaux.core.types import Batch, Inputs
from plateaux.optim.sample_scores import gradient_norm, last_layer, sample_loss

SCORES: dict[str, Callable[[LossFn | None], OutputFn]] = {
    "gradient_norm": gradient_norm,
    "last_layer": last_layer,
    "loss": sample_loss,
}


class SampleSharpness:
    """Scores the samples of batches by their sharpness: `scores = sharpness(x, y)`, one number per sample.

    `gradient_norm` is the squared norm of the gradient of a sample's loss over all trained parameters (exact);
    `last_layer` restricts it to the last layer; `loss` is the loss itself. The model is scored in evaluation mode, and
    its mode is restored. `loss` maps outputs and labels to the losses of the samples `[B]`; a
    `torch.nn.CrossEntropyLoss` is accepted with any `reduction`.

    >>> net = nn.Linear(3, 2)
    >>> SampleSharpness(net, nn.CrossEntropyLoss())(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])).shape
    torch.Size([4])
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor] | None = None,
        *,
        score: Literal["gradient_norm", "last_layer", "loss"] = "gradient_norm",
    ) -> None:
        if score not in SCORES:
            raise TrainingLoopError(f"Unknown score {score!r}; {suggest(score, SCORES)}")
        module = model.module if isinstance(model, DistributedDataParallel) else model
        module = getattr(module, "_orig_mod", module)  # of torch.compile
        # A shallow copy shares all weights and layers, but is not the module that SharpnessAware observes.
        self._module = copy.copy(module)
        self._original = module
        self._output = SCORES[score](_loss_of_members(loss))

    def __call__(self, x: Inputs, y: Tensor) -> Tensor:
        """Return the scores of a batch, `[B]` in float64."""
        modes = [(layer, layer.training) for layer in (self._module, *self._original.modules())]
        try:
            for layer, _ in modes:
                layer.training = False
            batch = Batch(x, y, torch.arange(len(y), device=y.device))
            scores = self._output(MemberModule(self._module), batch)
            return scores.detach().to(torch.float64)
        finally:
            for layer, mode in modes:
                layer.training = mode


def _loss_of_members(loss: Callable[..., Tensor] | None) -> LossFn | None:
    """Return a loss of outputs `[R, B, ...]`; None for cross entropy, whose gradient has a closed form."""
    if loss is None or loss is F.cross_entropy:
        return None
    if isinstance(loss, nn.CrossEntropyLoss):
        is_plain = loss.weight is None and loss.label_smoothing == 0 and loss.ignore_index == -100
        if is_plain and type(loss) is nn.CrossEntropyLoss:  # a subclass may compute anything
            return None
        loss = copy.copy(loss)
        loss.reduction = "none"
    per_sample = loss

    def losses(outputs: Tensor, batch: Batch) -> Tensor:
        values: Tensor
        if isinstance(per_sample, nn.Module):  # its weights get the precision of the scores, float64
            weights = per_sample.state_dict(keep_vars=True)
            wide = {name: value.to(outputs.dtype) for name, value in weights.items() if value.is_floating_point()}
            values = functional_call(per_sample, wide, (outputs[0], batch.y))
        else:
            values = per_sample(outputs[0], batch.y)
        if values.shape != batch.index.shape:
            raise TrainingLoopError(
                f"The loss returned shape {list(values.shape)} for {len(batch)} samples; it must return one loss per "
                "sample: use reduction='none'"
            )
        return values[None]

    return losses
