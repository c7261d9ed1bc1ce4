"""Compute the gradients that updates request: forward passes, backward passes, and reduction over processes.

Shapes: m members held here, R rows (all members that the loss depends on), B samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.executor import Collectives
from plateaux.core.member import MemberModule, at_params, preserve_buffers
from plateaux.core.method import GradRequest, Rows
from plateaux.core.runtime import autocast, fork_rng
from plateaux.core.types import Batch, TensorTree, derive_seed
from plateaux.distributed.sync_batchnorm import SyncedBatchNorm
from plateaux.training.loop.state import StepOptions, StepStats, TrainState

Requests = Mapping[int, GradRequest]  # by position of the member in the step


class GradientComputer:
    """Answers the gradient requests of the members of one step, on this process's share of their batches."""

    def __init__(
        self,
        executor: Collectives,
        states: Sequence[TrainState],
        batches: Sequence[Batch],
        options: StepOptions,
        *,
        share: float,
        first_row: int | None = None,
    ) -> None:
        self.executor, self.states, self.batches, self.options = executor, states, batches, options
        self.share = share  # fraction of the samples of the batch that this process works on
        self.first_row = first_row  # row of the first member held here, if not all members are active
        self.objective = states[0].method.objective

    @property
    def is_joint(self) -> bool:
        """Whether the loss of a member depends on the outputs of other members."""
        return self.objective.gather != "none"

    def compute(
        self, positions: list[int], requests: Requests, cached_outputs: Sequence[Tensor] | None
    ) -> tuple[list[TensorTree], list[StepStats]]:
        """Return the gradients that members at these positions request, and the loss and accuracy of each.

        All requests must be alike (see `StepRunner`). `cached_outputs` are outputs `[R, B, ...]` of all members
        without gradients, one for each micro-batch, if members are computed one by one.
        """
        states = [self.states[i] for i in positions]
        if isinstance(requests[positions[0]].rows, slice) and self.executor.data_size > 1:
            _reject_synced_batchnorm(states[0].module)
        batches = [take_rows(self.batches[i], requests[i].rows) for i in positions]
        stats = [StepStats(torch.zeros(()), None) for _ in positions]
        with ExitStack() as replaced:
            for state, i in zip(states, positions, strict=True):
                replaced.enter_context(at_params(state.params, requests[i].at, buffers=state.buffers))
            for number, micro_batch in enumerate(self.micro_batches(len(batches[0]))):
                parts = [take_rows(batch, micro_batch) for batch in batches]
                cached = None if cached_outputs is None else cached_outputs[number]
                losses, outputs, rows = self.losses(positions, parts, cached)
                whole = micro_batch is None
                self._total_loss(losses, positions, requests, batches, whole=whole).backward()  # type: ignore[no-untyped-call]
                for row, member_stats in enumerate(stats):
                    part, own = parts[row], outputs[row].detach()
                    if self.objective.extra_inputs:
                        own = own[: len(part)]  # without the rows of unlabeled samples
                    member_stats.add(losses[rows[row]].detach(), own, part, len(part) / max(len(batches[row]), 1))
        return [self._collect(state, requests[i]) for state, i in zip(states, positions, strict=True)], stats

    def losses(
        self, positions: Sequence[int], batches: Sequence[Batch], cached: Tensor | None
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Return losses `[R, B]`, outputs `[m, B, ...]`, and the rows of the losses that belong to these members.

        `cached` are outputs of all members without gradients; the rows of `positions` are replaced by live ones.
        """
        states = [self.states[i] for i in positions]
        own = self.executor.map_members(self.objective.output, self._members(states, batches), batches)
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

    def _members(self, states: Sequence[TrainState], batches: Sequence[Batch]) -> list[MemberModule]:
        """Return members whose forward passes have their own random states and the precision of the step."""
        members = []
        for state, batch in zip(states, batches, strict=True):
            # Processes that share a batch must not all drop the same units. Do not change the offset: it is in a seed.
            offset = (self.executor.data_rank << 20) // self.executor.data_size
            seed = derive_seed(batch.seed, "forward", state.number, *([offset] if offset else []))
            forward = partial(_forward_context, seed, self.options)
            network, kind = state.call or state.module, state.architecture
            members.append(MemberModule(network, forward=forward, own=state.params, buffers=state.buffers, kind=kind))
        return members

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

    def _total_loss(
        self, losses: Tensor, positions: list[int], requests: Requests, batches: Sequence[Batch], *, whole: bool
    ) -> Tensor:
        """Return the sum over members of their mean losses, weighted by the share of this process.

        The share is applied before the backward pass: synchronized BatchNorm sends gradients between processes, so
        all processes must differentiate the same loss.
        """
        sizes = [requests[i].mean_over or max(len(batch), 1) for i, batch in zip(positions, batches, strict=True)]
        shares = [1.0 if requests[i].local else self.share for i in positions]
        if self.is_joint:  # each row counts once, whichever process holds the member
            # A share without labeled samples may have unlabeled ones, so a loss on the full batch is divided by all.
            is_full = self.objective.gather == "batch" and whole and not requests[positions[0]].local
            size, share = (losses.shape[1], 1.0) if is_full else (sizes[0], shares[0])
            return losses.sum() / size * share
        own = [
            losses[row].sum() / sizes[row] * (self.states[i].loss_scale * shares[row])
            for row, i in enumerate(positions)
        ]
        return torch.stack(own).sum() if len(own) > 1 else own[0]

    def _collect(self, state: TrainState, request: GradRequest) -> TensorTree:
        """Take the gradient from `.grad`: masked, unscaled, and summed over processes."""
        gradient: TensorTree = {}
        for name, param in state.params.items():
            gradient[name] = param.grad if param.grad is not None else torch.zeros_like(param)
            param.grad = None
        for name, mask in state.masks.items():
            gradient[name].mul_(mask)
        if state.scaler is not None:
            gradient = tensor_tree.scale(gradient, 1.0 / state.scaler.scale)
        return gradient if request.local else self.executor.all_reduce(gradient)

    @torch.no_grad()
    def outputs_without_grad(self, requests: Requests) -> list[Tensor]:
        """Return the outputs of all members, one tensor `[R, B, ...]` per micro-batch; buffers do not change.

        Members that are offloaded to disk are in memory one at a time, so a joint loss needs the outputs of the others.
        """
        outputs, output = list[list[Tensor]](), self.objective.output
        for i, request in requests.items():
            state = self.states[i]
            batch = take_rows(self.batches[i], request.rows)
            parts = [take_rows(batch, micro_batch) for micro_batch in self.micro_batches(len(batch))]
            with (
                self.options.resident(state),
                at_params(state.params, request.at),
                preserve_buffers(state.buffers),
            ):
                outputs.append(
                    [self.executor.map_members(output, self._members([state], [part]), [part]) for part in parts]
                )
        return [torch.cat(rows) for rows in zip(*outputs, strict=True)]


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


def _reject_synced_batchnorm(module: nn.Module) -> None:
    if any(isinstance(layer, SyncedBatchNorm) for layer in module.modules()):
        raise RecipeError(
            "method.m splits a batch into groups, which is not possible with synchronized BatchNorm and "
            "executor.data_parallel > 1. Set executor.sync_batchnorm = false, set executor.data_parallel = 1, or "
            "leave out method.m"
        )
