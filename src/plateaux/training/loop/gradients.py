"""Compute the gradients that updates request: forward passes, backward passes, and reduction over processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.executor import Collectives
from plateaux.core.member import at_params, preserve_buffers
from plateaux.core.method import GradRequest
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.sync_batchnorm import SyncedBatchNorm
from plateaux.training.loop.forward import ForwardPass, ForwardResult, take_rows
from plateaux.training.loop.state import StepStats, TrainState

Requests = Mapping[int, GradRequest]  # by position of the member in the step


class GradientComputer:
    """Answers the gradient requests of the members of one step."""

    def __init__(
        self,
        executor: Collectives,
        forward: ForwardPass,
        states: Sequence[TrainState],
        batches: Sequence[Batch],
        share: float,
    ) -> None:
        self.executor, self.forward, self.states, self.batches = executor, forward, states, batches
        self.share = share  # fraction of the samples of the batch that this process works on

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
        with ExitStack() as replaced:
            for state, i in zip(states, positions, strict=True):
                replaced.enter_context(at_params(state.params, requests[i].at, buffers=state.buffers))
            stats = self._backward(positions, requests, cached_outputs)
        return [self._collect(state, requests[i]) for state, i in zip(states, positions, strict=True)], stats

    def _backward(
        self, positions: list[int], requests: Requests, cached_outputs: Sequence[Tensor] | None
    ) -> list[StepStats]:
        """Set `.grad` of every member to the gradient of its mean loss, and return loss and accuracy."""
        states = [self.states[i] for i in positions]
        batches = [take_rows(self.batches[i], requests[i].rows) for i in positions]
        stats = [StepStats(torch.zeros(()), None) for _ in positions]
        for result in self.forward.run(positions, states, batches, cached_outputs):
            loss = self._total_loss(result, positions, requests, batches)
            loss.backward()  # type: ignore[no-untyped-call]
            for row, member_stats in enumerate(stats):
                part = result.batches[row]
                outputs = result.outputs[row].detach()
                if self.forward.objective.extra_inputs:
                    outputs = outputs[: len(part)]  # without the rows of unlabeled samples
                losses = result.losses[result.rows[row]].detach()
                member_stats.add(losses, outputs, part, len(part) / max(len(batches[row]), 1))
        return stats

    def _total_loss(
        self, result: ForwardResult, positions: list[int], requests: Requests, batches: Sequence[Batch]
    ) -> Tensor:
        """Return the sum over members of their mean losses, weighted by the share of this process.

        The share is applied before the backward pass: synchronized BatchNorm sends gradients between processes, so
        all processes must differentiate the same loss.
        """
        sizes = [requests[i].mean_over or max(len(batch), 1) for i, batch in zip(positions, batches, strict=True)]
        shares = [1.0 if requests[i].local else self.share for i in positions]
        if self.forward.is_joint:  # each row counts once, whichever process holds the member
            first = requests[positions[0]]
            # A share without labeled samples may have unlabeled ones, so a loss on the full batch is divided by all.
            is_full = self.forward.objective.gather == "batch" and result.micro_batch is None and not first.local
            size, share = (result.losses.shape[1], 1.0) if is_full else (sizes[0], shares[0])
            return result.losses.sum() / size * share
        losses = [
            result.losses[row].sum() / sizes[row] * (self.states[i].loss_scale * shares[row])
            for row, i in enumerate(positions)
        ]
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

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
        outputs: list[list[Tensor]] = []
        for i, request in requests.items():
            state = self.states[i]
            batch = take_rows(self.batches[i], request.rows)
            parts = [take_rows(batch, micro_batch) for micro_batch in self.forward.micro_batches(len(batch))]
            output, module = state.method.objective.output, self.forward.member_module
            with (
                self.forward.options.resident(state),
                at_params(state.params, request.at),
                preserve_buffers(state.buffers),
            ):
                outputs.append([self.executor.map_members(output, [module(state, part)], [part]) for part in parts])
        return [torch.cat(rows) for rows in zip(*outputs, strict=True)]


def _reject_synced_batchnorm(module: nn.Module) -> None:
    if any(isinstance(layer, SyncedBatchNorm) for layer in module.modules()):
        raise RecipeError(
            "method.m splits a batch into groups, which is not possible with synchronized BatchNorm and "
            "executor.data_parallel > 1. Set executor.sync_batchnorm = false, set executor.data_parallel = 1, or "
            "leave out method.m"
        )
