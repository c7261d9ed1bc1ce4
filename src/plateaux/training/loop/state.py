"""The training state of one member, the options of a step, and the statistics that a step returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plateaux.core.method import Method
from plateaux.core.tensor_tree import is_finite
from plateaux.core.types import Batch, TensorTree
from plateaux.optim.weight_averaging import AveragedWeights

CPU = torch.device("cpu")


@dataclass(slots=True)
class GradScaler:
    """Loss scaling for fp16: the loss is multiplied, gradients are divided, and an overflow skips the step."""

    scale: float = 65536.0
    steps_since_overflow: int = 0
    growth_interval: int = 2000  # steps without an overflow after which the scale is doubled

    def update(self, is_finite: bool) -> None:
        """Halve the scale after an overflow; double it after `growth_interval` steps without one."""
        self.steps_since_overflow = self.steps_since_overflow + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.steps_since_overflow % self.growth_interval == 0:
            self.scale *= 2


@dataclass(slots=True)
class SharedLRScheduler:
    """A learning-rate schedule that several members share, also while they are inactive.

    It schedules a placeholder optimizer that trains nothing; a member copies the learning rate when it becomes active.
    Thus inactive members cost nothing, and a member that becomes active again has the learning rate of the current
    step.
    """

    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    every_step: bool  # it advances with every step, not with every epoch

    def step(self) -> None:
        """Advance the schedule by one step or epoch."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # avoids a warning of PyTorch
        self.lr_scheduler.step()

    def copy_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rates of an optimizer to the current ones."""
        _copy_hyperparameters(self.optimizer, optimizer)

    def restore(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Load the state of the schedule, and the learning rates that an optimizer had at that time."""
        self.lr_scheduler.load_state_dict(state_dict)
        _copy_hyperparameters(optimizer, self.optimizer)


def _copy_hyperparameters(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    for group, other in zip(target.param_groups, source.param_groups, strict=True):
        group.update({name: value for name, value in other.items() if name != "params"})


@dataclass(slots=True)
class TrainState:
    """The training state of one member: module, optimizer, scheduler, and scaler."""

    number: int
    module: nn.Module
    method: Method
    optimizer: torch.optim.Optimizer
    params: dict[str, Tensor]  # trained parameters of this member: the leaf tensors themselves
    buffers: TensorTree  # buffers of this member, such as the running statistics of BatchNorm
    peak_lr: float
    architecture: str = ""  # members with equal hashes can be stacked
    lr_scheduler: Any = None
    every_step: bool = False  # the scheduler advances with every step, not with every epoch
    shared_lr_scheduler: SharedLRScheduler | None = None  # replaces `lr_scheduler` if members can be inactive
    masks: TensorTree = field(default_factory=dict)  # 0 where a weight is pruned
    max_grad_norm: float | None = None
    call: Callable[..., Any] | None = None  # the compiled module
    scaler: GradScaler | None = None
    average: AveragedWeights | None = None  # of the weights, if the member is used at their average
    sam_set: Callable[[Tensor], Tensor] | None = None  # of the last data partition: sample ids to bits

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss is multiplied before the backward pass."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def sync_lr(self) -> None:
        """Copy the learning rate of the shared schedule, which also advances while this member is inactive."""
        if self.shared_lr_scheduler is not None:
            self.shared_lr_scheduler.copy_to(self.optimizer)

    @torch.no_grad()
    def apply_gradient(self, gradient: TensorTree) -> None:
        """Take an optimizer step with a given gradient; under fp16, a gradient with NaN or infinity is skipped."""
        for name, param in self.params.items():
            param.grad = gradient[name]
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.params.values(), self.max_grad_norm)
        is_valid = self.scaler is None or is_finite(list(gradient.values()))
        if is_valid:
            self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update(is_valid)
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a skipped step still advances the schedule
        for name, mask in self.masks.items():
            self.params[name].mul_(mask)
        self.optimizer.zero_grad(set_to_none=True)
        if self.lr_scheduler is not None and self.every_step:
            self.lr_scheduler.step()
        if self.average is not None:
            self.average.add({**self.params, **self.buffers})


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of every step of a job."""

    precision: str = "fp32"
    device: torch.device = CPU
    gradient_accumulation_steps: int = 1
    offloads: bool = False  # members are on disk, and one at a time is loaded by `resident`
    resident: Callable[[TrainState], AbstractContextManager[Any]] = lambda _: nullcontext()
    members: int | None = None  # in all processes; None: only those that are passed to the step
    shared_lr_schedulers: tuple[SharedLRScheduler, ...] = ()
    is_independent: bool = False  # other processes train no other member at the same time
    frozen_outputs: Callable[[Batch], Tensor] | None = None  # outputs [K, B, ...] of finished members


@dataclass(slots=True)
class StepStats:
    """The mean loss of one member in a step, before its weights changed, and the number of correct predictions."""

    loss: Tensor
    correct: Tensor | None

    def add(self, losses: Tensor, outputs: Tensor, batch: Batch, share: float) -> None:
        """Add one micro-batch, which is a fraction `share` of the batch."""
        if not losses.numel():
            return  # the mean of an empty tensor is NaN
        self.loss = self.loss + losses.mean() * share
        if outputs.ndim == 2 and batch.y.ndim == 1 and not batch.y.is_floating_point():
            correct = (outputs.argmax(-1) == batch.y).sum()
            self.correct = correct if self.correct is None else self.correct + correct

    def join(self, other: StepStats, share: float) -> None:
        """Add the statistics of another part, which is a fraction `share` of the batch."""
        self.loss = self.loss + other.loss * share
        if other.correct is not None:
            self.correct = other.correct if self.correct is None else self.correct + other.correct


INACTIVE = StepStats(torch.zeros(()), None)
"""The statistics of a member that was inactive in a step."""
