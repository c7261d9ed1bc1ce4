"""One member in training: its network, all that moves with it, and what a step saw of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plateaux.core import tensor_tree
from plateaux.core.method import Method
from plateaux.core.tensor_tree import is_finite
from plateaux.core.types import Batch, TensorTree
from plateaux.optim.weight_averaging import AveragedWeights

CPU = torch.device("cpu")


@dataclass(slots=True)
class GradScaler:
    """Keeps fp16 gradients from vanishing: the loss is multiplied, gradients divided, an overflow skips the step."""

    factor: float = 65536.0
    calm: int = 0  # steps since the last overflow
    patience: int = 2000

    def update(self, sound: bool) -> None:
        """Halve the factor after an overflow, double it after a long calm."""
        self.calm = self.calm + 1 if sound else 0
        if not sound:
            self.factor = max(self.factor / 2, 1.0)
        elif self.calm % self.patience == 0:
            self.factor *= 2


@dataclass(slots=True)
class SharedLRScheduler:
    """A schedule that several members keep, whether or not they take part in a step.

    It moves an optimiser of its own that trains nothing; a member takes over the rates when it is its turn. So a
    thousand idle members cost nothing, and one that comes back has the rate it would have had.
    """

    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    every_step: bool  # it moves with every step rather than every epoch

    def step(self) -> None:
        """Take the schedule one step or epoch further."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # there is nothing to step: no cause to warn
        self.lr_scheduler.step()

    def lead(self, optimizer: torch.optim.Optimizer) -> None:
        """Set an optimiser's rates to what they are now."""
        _take_over(optimizer, self.optimizer)

    def return_to(self, optimizer: torch.optim.Optimizer, schedule: dict[str, Any]) -> None:
        """Go back to where the schedule was when an optimiser had these rates."""
        self.lr_scheduler.load_state_dict(schedule)
        _take_over(self.optimizer, optimizer)


def _take_over(mine: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for group, model in zip(mine.param_groups, other.param_groups, strict=True):
        group.update({name: value for name, value in model.items() if name != "params"})


@dataclass(slots=True)
class TrainState:
    """One member in training: its network and all that moves with it."""

    number: int
    module: nn.Module
    method: Method
    optimizer: torch.optim.Optimizer
    params: dict[str, Tensor]  # its own trained weights: the leaves themselves
    buffers: TensorTree  # its own buffers, such as BatchNorm's statistics
    peak_lr: float
    architecture: str = ""  # equal kinds are equal networks
    lr_scheduler: Any = None
    every_step: bool = False  # the schedule moves with every step
    shared_lr_scheduler: SharedLRScheduler | None = (
        None  # instead of a schedule of its own, where members may be absent
    )
    masks: TensorTree = field(default_factory=dict)  # weights that stay zero
    max_grad_norm: float | None = None
    call: Callable[..., Any] | None = None  # the compiled network
    scaler: GradScaler | None = None
    average: AveragedWeights | None = None  # of its weights, where it is to be used there
    sam_set: Callable[[Tensor], Tensor] | None = None  # from the last meeting: sample ids to bits

    @property
    def factor(self) -> float:
        """By what the loss is multiplied before its gradient is taken."""
        return 1.0 if self.scaler is None else self.scaler.factor

    def sync_lr(self) -> None:
        """Take over the rates of now, however long this member was absent."""
        if self.shared_lr_scheduler is not None:
            self.shared_lr_scheduler.lead(self.optimizer)

    @torch.no_grad()
    def apply_gradient(self, direction: TensorTree) -> None:
        """Take the optimiser's step along `direction`; one with numbers missing is skipped under fp16."""
        for name, param in self.params.items():
            param.grad = direction[name]
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.params.values(), self.max_grad_norm)
        sound = self.scaler is None or is_finite(list(direction.values()))
        if sound:
            self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update(sound)
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # to a schedule a skipped step is a step
        for name, mask in self.masks.items():
            self.params[name].mul_(mask)
        self.optimizer.zero_grad(set_to_none=True)
        if self.lr_scheduler is not None and self.every_step:
            self.lr_scheduler.step()
        if self.average is not None:
            self.average.add({**self.params, **self.buffers})


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How every step of a job is taken."""

    precision: str = "fp32"
    device: torch.device = CPU
    gradient_accumulation_steps: int = 1
    resident: Callable[[TrainState], AbstractContextManager[Any]] = lambda _: nullcontext()  # wakes a parked member
    members: int | None = None  # of all processes together; None: those given to a step are all there are
    shared_lr_schedulers: tuple[SharedLRScheduler, ...] = ()
    is_independent: bool = False  # no other process has a member at work
    frozen_outputs: Callable[[Batch], Tensor] | None = None  # the rows of members that have finished, which come first


@dataclass(slots=True)
class StepStats:
    """What a step saw of one member: the mean loss where it stood, and how many labels it got right."""

    loss: Tensor
    correct: Tensor | None

    def add(self, losses: Tensor, outputs: Tensor, batch: Batch, share: float) -> None:
        """Add one piece of the batch, `share` of the whole."""
        if not losses.numel():
            return  # the mean of nothing is no number
        self.loss = self.loss + losses.mean() * share
        if outputs.ndim == 2 and batch.y.ndim == 1 and not batch.y.is_floating_point():
            right = (outputs.argmax(-1) == batch.y).sum()
            self.correct = right if self.correct is None else self.correct + right

    def join(self, other: StepStats, share: float) -> None:
        """Add what was seen of another part of the batch, `share` of the whole."""
        self.loss = self.loss + other.loss * share
        if other.correct is not None:
            self.correct = other.correct if self.correct is None else self.correct + other.correct


INACTIVE = StepStats(torch.zeros(()), None)
"""What a step saw of a member that took no part in it."""


@contextmanager
def at_params(learner: TrainState, place: TensorTree | None) -> Iterator[None]:
    """Put a member's weights somewhere else for a while; its buffers do not move meanwhile."""
    if place is None:
        yield
        return
    home = tensor_tree.clone(learner.params)
    tensor_tree.write(learner.params, place)
    try:
        with preserve_buffers(learner.buffers):
            yield
    finally:
        tensor_tree.write(learner.params, home)


@contextmanager
def preserve_buffers(buffers: TensorTree) -> Iterator[None]:
    """Put buffers back to what they were."""
    before = tensor_tree.clone(buffers)
    try:
        yield
    finally:
        if before:
            tensor_tree.write(buffers, before)
