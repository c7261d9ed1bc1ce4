"""The forward pass of a step: outputs of the members, gathered over processes, and their losses.

Shapes: m members held here, R rows (all members that the loss depends on), B samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plateaux.core.executor import Collectives
from plateaux.core.member import MemberModule
from plateaux.core.method import Objective, Rows
from plateaux.core.runtime import autocast, fork_rng
from plateaux.core.types import Batch, derive_seed
from plateaux.training.loop.state import StepOptions, TrainState


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Losses and outputs of one micro-batch."""

    micro_batch: slice | None  # None: the whole batch
    batches: list[Batch]  # one per member held here
    losses: Tensor  # [R, B]
    outputs: Tensor  # [m, B, ...] of the members held here
    rows: list[int]  # the rows of `losses` that belong to these members


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Computes outputs and losses of members on this process's share of a batch."""

    executor: Collectives
    objective: Objective
    options: StepOptions
    first_row: int | None = None  # row of the first member held here, if not all members are active

    @property
    def is_joint(self) -> bool:
        """Whether the loss of a member depends on the outputs of other members."""
        return self.objective.gather != "none"

    def run(
        self,
        positions: Sequence[int],
        states: Sequence[TrainState],
        batches: Sequence[Batch],
        cached_outputs: Sequence[Tensor] | None,
    ) -> Iterator[ForwardResult]:
        """Yield the result of every micro-batch; request the next one only after the backward pass of this one."""
        for number, micro_batch in enumerate(self.micro_batches(len(batches[0]))):
            parts = [take_rows(batch, micro_batch) for batch in batches]
            cached = None if cached_outputs is None else cached_outputs[number]
            yield ForwardResult(micro_batch, parts, *self.losses(positions, states, parts, cached))

    def losses(
        self, positions: Sequence[int], states: Sequence[TrainState], batches: Sequence[Batch], cached: Tensor | None
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Return losses `[R, B]`, outputs `[m, B, ...]`, and the rows of the losses that belong to these members.

        `cached` are outputs of all members without gradients; the rows of `positions` are replaced by live ones.
        """
        modules = [self.member_module(state, batch) for state, batch in zip(states, batches, strict=True)]
        own = self.executor.map_members(self.objective.output, modules, batches)
        if own.dtype in (torch.bfloat16, torch.float16):
            own = own.float()  # half precision is enough for a layer, but not for the sum in a loss
        if not self.is_joint:
            losses = [state.method.objective.loss(own[i : i + 1], batches[i]) for i, state in enumerate(states)]
            return torch.cat(losses), own, list(range(len(states)))
        if cached is not None:
            first = positions[0]
            outputs, batch = torch.cat([cached[:first], own, cached[first + 1 :]]), batches[0]
        elif self.options.frozen_outputs is not None:
            frozen = self.options.frozen_outputs(batches[0]).to(own.dtype)
            outputs, batch = self.gather(torch.cat([frozen, own]), batches[0])
            first = len(frozen)
        else:
            outputs, batch = self.gather(own, batches[0])
            first = self.executor.local_members(len(outputs)).start if self.first_row is None else self.first_row
        return self.objective.loss(outputs, batch), own, list(range(first, first + len(states)))

    def gather(self, own: Tensor | None, batch: Batch) -> tuple[Tensor, Batch]:
        """Return the outputs of all members, labeled samples first, and the batch that they belong to.

        A process without active members passes None, because the collective needs all processes.
        """
        full_batch = self.objective.gather == "batch"
        parts = [torch.empty(0, device=self.options.device) if own is None else own]
        if full_batch and self.objective.extra_inputs and self.executor.data_size > 1:
            size = len(batch)
            parts = parts * 2 if own is None else [own[:, :size], own[:, size:]]
        gathered = [self._all_gather(part, batch=full_batch) for part in parts]
        outputs = torch.cat(gathered, 1) if len(gathered) > 1 else gathered[0]
        if not full_batch:
            return outputs, batch
        y, index = (self._all_gather(values[None], batch=True)[0] for values in (batch.y, batch.index))
        return outputs, replace(batch, y=y, index=index)  # the inputs stay those of this process

    def _all_gather(self, rows: Tensor, *, batch: bool) -> Tensor:
        return self.executor.all_gather(rows, batch=batch, own_member_only=self.options.is_independent)

    def micro_batches(self, size: int) -> list[slice | None]:
        """Split a batch for gradient accumulation.

        Processes that share a batch must split it equally often, because a forward pass may contain collectives.
        """
        count, is_sharded = self.options.gradient_accumulation_steps, self.executor.data_size > 1
        if count == 1 or (size <= 1 and not is_sharded):
            return [None]
        length = -(-size // count)
        parts: list[slice | None] = [slice(min(i * length, size), min((i + 1) * length, size)) for i in range(count)]
        return parts if is_sharded else [part for part in parts if part and part.start < part.stop]

    def member_module(self, state: TrainState, batch: Batch) -> MemberModule:
        """Return a member whose forward pass has its own random state and the precision of the step."""
        # Processes that share a batch must not all drop the same units. The offset is part of a seed: do not change it.
        offset = (self.executor.data_rank << 20) // self.executor.data_size
        seed = derive_seed(batch.seed, "forward", state.number, *([offset] if offset else []))

        def forward() -> AbstractContextManager[Any]:
            return _forward_context(seed, self.options)

        return MemberModule(
            state.call or state.module,
            forward=forward,
            own=state.params,
            buffers=state.buffers,
            kind=state.architecture,
        )


@contextmanager
def _forward_context(seed: int, options: StepOptions) -> Iterator[None]:
    with fork_rng(seed, options.device), autocast(options.precision, options.device):
        yield


def take_rows(batch: Batch, rows: Rows | None) -> Batch:
    """Return some samples of a batch with a seed of their own, so that parts do not all drop the same units."""
    if rows is None:
        return batch
    start = rows.start if isinstance(rows, slice) else int(rows[0]) if len(rows) else 0
    return replace(batch.take(rows), seed=derive_seed(batch.seed, "from", start) if start else batch.seed)
