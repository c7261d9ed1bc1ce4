"""SAM in the Trainer of Hugging Face transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plateaux.core.errors import TrainingLoopError
from plateaux.optim.sharpness_aware import SharpnessAware

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object  # importing this module does not import transformers


class SharpnessAwareMixin(_Base):  # type: ignore[misc]
    """Adds SAM to a Trainer: `class SamTrainer(SharpnessAwareMixin, Trainer): rho = 0.05`.

    The optimizer that the Trainer builds, or that you pass, is wrapped in `SharpnessAware`, unless it is one already.
    Every training step computes the gradient again at perturbed weights. With `gradient_accumulation_steps`, each
    micro-batch has a perturbation of its own (m-sharpness).
    """

    rho: float = 0.05
    adaptive: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse the other order of the bases, in which the methods of the Trainer come first and SAM has no effect."""
        super().__init_subclass__(**options)
        before = cls.__mro__[: cls.__mro__.index(SharpnessAwareMixin)]
        if any(base.__module__.startswith("transformers.") and base.__name__ == "Trainer" for base in before):
            raise TrainingLoopError(
                f"{cls.__name__} has the Trainer before SharpnessAwareMixin, so that SAM would have no effect: write "
                f"class {cls.__name__}(SharpnessAwareMixin, Trainer)"
            )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Build the optimizer of the Trainer, and wrap it."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*(() if model is None else (model,)))
        if _find_sharpness_aware(optimizer) is None:
            module = self.model if model is None else model
            optimizer = SharpnessAware(optimizer, rho=self.rho, model=module, adaptive=self.adaptive)
            self.optimizer = optimizer
        return optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Compute the gradient at the weights and at the perturbed weights; return the loss at the weights."""
        optimizer = _find_sharpness_aware(self.optimizer)
        if optimizer is None:
            raise TrainingLoopError(
                f"The optimizer of {type(self).__name__} is a {type(self.optimizer).__name__} without SharpnessAware; "
                "let the Trainer create it, or pass optimizers=(SharpnessAware(...), None)"
            )
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        with optimizer.perturbed():
            super().training_step(model, inputs, num_items_in_batch)
        return loss


def _find_sharpness_aware(optimizer: Any) -> SharpnessAware | None:
    """Return the SharpnessAware inside of the wrappers of Accelerate."""
    while optimizer is not None and not isinstance(optimizer, SharpnessAware):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer
