"""One process, or a pool of plain ones: members side by side, stacked under vmap, or parked on disk in turn."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.core.callbacks import Tell
from plateaux.core.errors import RecipeError
from plateaux.core.executor import Failure, JobFn
from plateaux.core.member import MemberModule
from plateaux.core.outputs import OutputFn, supports_vmap
from plateaux.core.registry import executor
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.identity_collectives import IdentityCollectives, run_loop
from plateaux.distributed.process_pool import run_pool, run_sequentially


class LocalExecutor(IdentityCollectives):
    """One process holds all members; jobs run in it or in a pool of processes."""

    def __init__(
        self, mode: str = "loop", processes: int = 1, devices: Sequence[str] = (), randomness: str = "error"
    ) -> None:
        self.mode = mode
        self.offloads = mode == "offload"
        self._processes = processes
        self._devices = devices
        self._randomness = randomness

    def groups(self, architectures: Sequence[Hashable], *, is_joint: bool) -> list[list[int]]:
        if is_joint or self.mode != "vmap":
            return super().groups(architectures, is_joint=is_joint)
        alike: dict[Hashable, list[int]] = {}
        for position, architecture in enumerate(architectures):
            alike.setdefault(architecture, []).append(position)
        return list(alike.values())

    def map_members(self, output: OutputFn, modules: Sequence[MemberModule], batches: Sequence[Batch]) -> Tensor:
        if self.mode != "vmap" or not supports_vmap(output):
            return run_loop(output, modules, batches)
        alike: dict[Hashable, list[int]] = {}
        for position, module in enumerate(modules):
            alike.setdefault((module.kind, _tensor_shapes(module)), []).append(position)
        rows: dict[int, Tensor] = {}
        for positions in alike.values():
            stack = [modules[i] for i in positions], [batches[i] for i in positions]
            outputs = run_vmap(output, *stack, self._randomness) if len(positions) > 1 else run_loop(output, *stack)
            if len(alike) == 1:
                return outputs
            rows.update(zip(positions, outputs, strict=True))
        return torch.stack([rows[i] for i in range(len(modules))])

    def launch(self, jobs: Sequence[Any], run_job: JobFn, log: Tell) -> list[Failure]:
        if self._processes > 1:
            return run_pool(jobs, run_job, log, processes=self._processes, devices=self._devices)
        return run_sequentially(jobs, run_job, log, device=self._devices[0] if self._devices else None)


SINGLE_PROCESS = LocalExecutor()


@executor
def local(
    *,
    mode: Literal["loop", "vmap", "offload"] = "loop",
    processes: int = 1,
    devices: tuple[str, ...] = (),
    randomness: Literal["error", "different"] = "error",
) -> LocalExecutor:
    """This machine: members in a loop, stacked under vmap, or parked on disk between their turns."""
    return LocalExecutor(mode, processes, devices, randomness)


def run_vmap(offer: OutputFn, views: Sequence[MemberModule], batches: Sequence[Batch], randomness: str) -> Tensor:
    """Run the offer for all members at once, their weights stacked for this call only.

    Leaves stay per member: rows indexed out of one stacked leaf would make backward quadratic in the members.
    """
    first = views[0]
    own = {name: torch.stack([view.own[name] for view in views]) for name in first.own}
    buffers = {name: torch.stack([view.buffers[name] for view in views]) for name in first.buffers}
    shared = all(batch.x is batches[0].x for batch in batches)
    x, y, index = (
        (batches[0].x, batches[0].y, batches[0].index)
        if shared
        else tuple(_stack([getattr(batch, name) for batch in batches]) for name in ("x", "y", "index"))
    )

    def one(own: TensorTree, buffers: TensorTree, x: Any, y: Tensor, index: Tensor) -> Tensor:
        view = MemberModule(first.module, buffers=buffers, replaced={**own, **buffers})
        return offer(view, Batch(x, y, index, batches[0].seed, batches[0].extra))

    dims = None if shared else 0
    try:
        with first.forward():
            rows = torch.vmap(one, in_dims=(0, 0, dims, dims, dims), randomness=randomness)(own, buffers, x, y, index)
    except (RuntimeError, ValueError) as problem:
        raise RecipeError(
            f"vmap cannot run this model: {str(problem).splitlines()[0]}. "
            'Set executor.mode = "loop", or train.randomness = "different" where the reason is dropout'
        ) from problem
    with torch.no_grad():
        for position, view in enumerate(views):
            for name, stack in buffers.items():
                view.buffers[name].copy_(stack[position])
    return rows


def _stack(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack(list(values))
    return {name: torch.stack([value[name] for value in values]) for name in values[0]}


def _tensor_shapes(view: MemberModule) -> tuple[Any, ...]:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in view.own.items())
