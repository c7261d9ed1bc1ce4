"""One training step: updates request gradients, the step computes them, and the optimizers apply the result.

An update is a generator, one per member, that yields gradient requests. All members of a group run in lockstep: every
pending request is answered before any update continues, so a joint loss evaluates all members at the weights that
they requested. Members that are inactive in a step do not change; a process that holds only inactive members still
takes part in the collectives.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from plateaux.core import tensor_tree
from plateaux.core.errors import RecipeError
from plateaux.core.executor import Collectives
from plateaux.core.method import Average, GradRequest, Objective, Rows, StepContext
from plateaux.core.types import Batch, TensorTree
from plateaux.optim.sam import min_fraction, trace_requests
from plateaux.training.loop.gradients import GradientComputer, take_rows
from plateaux.training.loop.state import INACTIVE, StepOptions, StepStats, TrainState


def step(
    executor: Collectives,
    states: Sequence[TrainState],
    batches: Sequence[Batch],
    options: StepOptions,
    *,
    share: float = 1.0,
) -> list[StepStats]:
    """Train every active member for one step on its batch, and return the loss and accuracy of each.

    `share` is the fraction of the samples of the batch that this process works on.
    """
    objective = states[0].method.objective
    is_joint = objective.gather != "none"
    members = options.members or len(states)
    active, first_row = _active_members(executor, objective, members, batches[0].seed, len(states))
    stats = [INACTIVE] * len(states)
    for group in executor.groups([states[i].architecture for i in active], is_joint=is_joint) if active else []:
        positions = [active[i] for i in group]
        for i in positions:
            states[i].sync_lr()
        group_states, group_batches = [states[i] for i in positions], [batches[i] for i in positions]
        runner = StepRunner(executor, group_states, group_batches, options, share=share, first_row=first_row)
        for i, member_stats in zip(positions, runner.run(), strict=True):
            stats[i] = member_stats
    if is_joint and not active and first_row is not None:
        StepRunner(executor, states[:1], batches[:1], options, share=share).join_collectives()
    for scheduler in options.shared_lr_schedulers:
        if scheduler.every_step:
            scheduler.step()
    return stats


def _active_members(
    executor: Collectives, objective: Objective, members: int, seed: int, local_count: int
) -> tuple[Sequence[int], int | None]:
    """Return the positions of the local members that are active, and how many active members precede them.

    The second value is None if all members are active, or none.
    """
    if objective.active is None:
        return range(local_count), None
    active = sorted(set(objective.active(members, seed)))
    if active and not 0 <= active[0] <= active[-1] < members:
        raise RecipeError(f"The objective returned active members {active}; valid members are 0 to {members - 1}")
    local = executor.local_members(members)
    preceding = sum(number < local.start for number in active)
    return [number - local.start for number in active if number in local], preceding if active else None


class StepRunner(GradientComputer):
    """Runs the updates of one group of members, round by round, until all have taken their step."""

    def run(self) -> list[StepStats]:
        """Run the update of every member to its end, and apply the gradients that they return."""
        one_by_one = self.options.offloads and len(self.states) > 1
        updates = [state.method.update(state.params, self._context(i)) for i, state in enumerate(self.states)]
        requests: dict[int, GradRequest] = {}
        stats: dict[int, StepStats] = {}
        for i, state in enumerate(self.states):
            with self.options.resident(state), torch.no_grad():
                requests[i] = self._resume(updates[i], None)
        while requests:
            cached_outputs = self.outputs_without_grad(requests) if one_by_one else None
            next_requests: dict[int, GradRequest] = {}
            for group in [[i] for i in requests] if one_by_one else self._group_alike(requests):
                with ExitStack() as resident:
                    for i in group:
                        resident.enter_context(self.options.resident(self.states[i]))
                    gradients, group_stats = self.compute(group, requests, cached_outputs)
                    for i, gradient, member_stats in zip(group, gradients, group_stats, strict=True):
                        self._record(stats, i, requests[i], member_stats)
                        try:
                            with torch.no_grad():
                                next_requests[i] = self._resume(updates[i], gradient)
                        except StopIteration as end:
                            self.states[i].apply_gradient(end.value)
            if self.is_joint and next_requests and len(next_requests) < len(requests):
                raise RecipeError(_UNEQUAL_REQUESTS)
            requests = next_requests
        return [stats[i] for i in range(len(self.states))]

    def _resume(
        self, update: Generator[GradRequest | Average, TensorTree, TensorTree], gradient: TensorTree | None
    ) -> GradRequest:
        """Return the next gradient that an update requests; its averages need no other member, so answer them now."""
        request = next(update) if gradient is None else update.send(gradient)
        while isinstance(request, Average):
            share = tensor_tree.scale(request.tree, self.share)
            request = update.send(self.executor.all_reduce(share))
        return request

    def join_collectives(self) -> None:
        """Take part in the collectives of a step in which no member of this process is active."""
        for request in trace_requests(self.states[0].method.update, len(self.batches[0])):
            batch = take_rows(self.batches[0], request.rows)
            for micro_batch in self.micro_batches(len(batch)):
                self.gather(None, take_rows(batch, micro_batch))

    def _group_alike(self, requests: dict[int, GradRequest]) -> list[list[int]]:
        """Group requests that one forward pass can answer: all of a joint loss, else those that are alike."""
        if self.is_joint:
            return [list(requests)]
        groups: dict[Any, list[int]] = {}
        for i, request in requests.items():
            rows: Any = request.rows
            if isinstance(rows, Tensor):
                rows = i  # sample positions differ in number between members, so each member needs its own forward pass
            elif rows is not None:
                rows = rows.start, rows.stop
            groups.setdefault(rows, []).append(i)
        return list(groups.values())

    def _record(self, stats: dict[int, StepStats], i: int, request: GradRequest, new: StepStats) -> None:
        """Add statistics that were computed at the member's own weights: the whole batch once, or its parts."""
        if request.at is not None or (i in stats and request.rows is None):
            return
        size = len(self.batches[i])
        share = 1.0 if request.rows is None else _count_rows(request.rows, size) / max(size, 1)
        stats.setdefault(i, StepStats(torch.zeros(()), None)).join(new, share)

    def _context(self, i: int) -> StepContext:
        state = self.states[i]
        sam_set = None if state.sam_set is None else state.sam_set(self.batches[i].index)
        lr = float(state.optimizer.param_groups[0]["lr"])
        if sam_set is None:
            return StepContext(len(self.batches[i]), lr, state.peak_lr)
        smallest = min_fraction(state.module, len(self.batches[i]), share=self.share)
        return StepContext(len(self.batches[i]), lr, state.peak_lr, sam_set, smallest)


_UNEQUAL_REQUESTS = (
    "Members that share one loss must request the same number of gradients per step, but some updates have ended and "
    "others have not. Set rho > 0 for all members, or rho = 0 for all"
)


def _count_rows(rows: Rows, size: int) -> int:
    return len(range(size)[rows]) if isinstance(rows, slice) else len(rows)
