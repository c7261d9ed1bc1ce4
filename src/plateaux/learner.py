"""One member in training: its network, all that moves with it, and what a step saw of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plateaux.exchange import Method, finite
from plateaux.types import Batch, Tree

CPU = torch.device("cpu")


@dataclass(slots=True)
class Scaler:
    """Keeps fp16 gradients from vanishing: the loss is multiplied, gradients divided, an overflow skips the step."""

    factor: float = 65536.0
    calm: int = 0  # steps since the last overflow
    patience: int = 2000

    def heed(self, sound: bool) -> None:
        """Halve the factor after an overflow, double it after a long calm."""
        self.calm = self.calm + 1 if sound else 0
        if not sound:
            self.factor = max(self.factor / 2, 1.0)
        elif self.calm % self.patience == 0:
            self.factor *= 2


@dataclass(slots=True)
class Learner:
    """One member in training: its network and all that moves with it."""

    number: int
    module: nn.Module
    method: Method
    optimizer: torch.optim.Optimizer
    params: dict[str, Tensor]  # its own trained weights: the leaves themselves
    buffers: Tree  # its own buffers, such as BatchNorm's statistics
    peak_lr: float
    kind: str = ""  # equal kinds are equal networks
    schedule: Any = None
    every_step: bool = False  # the schedule moves with every step
    masks: Tree = field(default_factory=dict)  # weights that stay zero
    clip: float | None = None
    call: Callable[..., Any] | None = None  # the compiled network
    scaler: Scaler | None = None
    notes: Callable[[Tensor], Tensor] | None = None  # from the last meeting: sample ids to bits

    @property
    def factor(self) -> float:
        """By what the loss is multiplied before its gradient is taken."""
        return 1.0 if self.scaler is None else self.scaler.factor

    @torch.no_grad()
    def descend(self, direction: Tree) -> None:
        """Take the optimiser's step along `direction`; one with numbers missing is skipped under fp16."""
        for name, param in self.params.items():
            param.grad = direction[name]
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.params.values(), self.clip)
        sound = self.scaler is None or finite(list(direction.values()))
        if sound:
            self.optimizer.step()
        if self.scaler is not None:
            self.scaler.heed(sound)
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # to a schedule a skipped step is a step
        for name, mask in self.masks.items():
            self.params[name].mul_(mask)
        self.optimizer.zero_grad(set_to_none=True)
        if self.schedule is not None and self.every_step:
            self.schedule.step()


@dataclass(frozen=True, slots=True)
class Way:
    """How every step of a job is taken."""

    precision: str = "fp32"
    device: torch.device = CPU
    accumulate: int = 1
    awake: Callable[[Learner], AbstractContextManager[Any]] = lambda _: nullcontext()  # wakes a parked member


@dataclass(slots=True)
class Tally:
    """What a step saw of one member: the mean loss where it stood, and how many labels it got right."""

    loss: Tensor
    right: Tensor | None

    def add(self, losses: Tensor, outputs: Tensor, batch: Batch, share: float) -> None:
        """Add one piece of the batch, `share` of the whole."""
        if not losses.numel():
            return  # the mean of nothing is no number
        self.loss = self.loss + losses.mean() * share
        if outputs.ndim == 2 and batch.y.ndim == 1 and not batch.y.is_floating_point():
            right = (outputs.argmax(-1) == batch.y).sum()
            self.right = right if self.right is None else self.right + right

    def join(self, other: Tally, share: float) -> None:
        """Add what was seen of another part of the batch, `share` of the whole."""
        self.loss = self.loss + other.loss * share
        if other.right is not None:
            self.right = other.right if self.right is None else self.right + other.right
