"""Executor for one machine: one process, or a pool of independent processes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError, first_line
from plateaux.core.executor import Executor, Failure, JobFn, Launcher
from plateaux.core.member import MemberModule
from plateaux.core.outputs import OutputFn, supports_vmap
from plateaux.core.progress import Progress
from plateaux.core.registry import executor
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.identity_collectives import IdentityCollectives
from plateaux.distributed.process_pool import run_pool, run_sequentially


class LocalExecutor(IdentityCollectives, Launcher):
    """One process holds all members; jobs run in it or in a pool of processes."""

    def __init__(self, processes: int = 1, devices: Sequence[str] = (), *, offloads: bool = False) -> None:
        self._processes, self._devices, self.offloads = processes, devices, offloads

    def launch(self, jobs: Sequence[Any], run_job: JobFn, progress: Progress) -> list[Failure]:
        if self._processes > 1:
            return run_pool(jobs, run_job, progress, processes=self._processes, devices=self._devices)
        return run_sequentially(jobs, run_job, progress, device=self._devices[0] if self._devices else None)


class VmapExecutor(LocalExecutor):
    """Members of one architecture are stacked and computed in one call of vmap."""

    def __init__(self, processes: int = 1, devices: Sequence[str] = (), randomness: str = "error") -> None:
        super().__init__(processes, devices)
        self._randomness = randomness

    def groups(self, architectures: Sequence[Hashable], *, is_joint: bool) -> list[list[int]]:
        if is_joint:
            return super().groups(architectures, is_joint=is_joint)
        alike: dict[Hashable, list[int]] = {}
        for position, architecture in enumerate(architectures):
            alike.setdefault(architecture, []).append(position)
        return list(alike.values())

    def map_members(self, output: OutputFn, modules: Sequence[MemberModule], batches: Sequence[Batch]) -> Tensor:
        if not supports_vmap(output):
            return super().map_members(output, modules, batches)
        alike: dict[Hashable, list[int]] = {}
        for position, module in enumerate(modules):
            alike.setdefault((module.kind, _tensor_shapes(module)), []).append(position)
        rows: dict[int, Tensor] = {}
        for positions in alike.values():
            stack = [modules[i] for i in positions], [batches[i] for i in positions]
            is_alone = len(positions) == 1
            outputs = super().map_members(output, *stack) if is_alone else run_vmap(output, *stack, self._randomness)
            if len(alike) == 1:
                return outputs
            rows.update(zip(positions, outputs, strict=True))
        return torch.stack([rows[i] for i in range(len(modules))])


SINGLE_PROCESS = LocalExecutor()


@executor
def local(
    *,
    mode: Literal["loop", "vmap", "offload"] = "loop",
    processes: int = 1,
    devices: tuple[str, ...] = (),
    randomness: Literal["error", "different"] = "error",
) -> Executor:
    """This machine: members run in a loop, stacked with vmap, or offloaded to disk in turn."""
    if mode == "vmap":
        return VmapExecutor(processes, devices, randomness)
    return LocalExecutor(processes, devices, offloads=mode == "offload")


def run_vmap(output: OutputFn, modules: Sequence[MemberModule], batches: Sequence[Batch], randomness: str) -> Tensor:
    """Compute the outputs of all members in one call of vmap: `[M, B, ...]`. Weights are stacked for this call only.

    Weights stay separate leaves per member: with one stacked leaf, the backward pass would be quadratic in the members.
    """
    first = modules[0]
    own = {name: torch.stack([module.own[name] for module in modules]) for name in first.own}
    buffers = {name: torch.stack([module.buffers[name] for module in modules]) for name in first.buffers}
    is_shared = all(batch.x is batches[0].x for batch in batches)
    if is_shared:
        x, y, index = batches[0].x, batches[0].y, batches[0].index
    else:
        x = _stack([batch.x for batch in batches])
        y, index = (torch.stack(list(values)) for values in zip(*((b.y, b.index) for b in batches), strict=True))

    def run_member(own: TensorTree, buffers: TensorTree, x: Any, y: Tensor, index: Tensor) -> Tensor:
        member = MemberModule(first.module, buffers=buffers, replaced={**own, **buffers})
        return output(member, Batch(x, y, index, batches[0].seed, batches[0].extra))

    dim = None if is_shared else 0
    in_dims = (0, 0, dim, dim, dim)
    try:
        with first.forward():
            outputs = torch.vmap(run_member, in_dims=in_dims, randomness=randomness)(own, buffers, x, y, index)
    except (RuntimeError, ValueError) as error:
        raise RecipeError(
            f"vmap does not support this model: {first_line(error)}. "
            'Set executor.mode = "loop", or train.randomness = "different" if the reason is dropout'
        ) from error
    with torch.no_grad():
        for position, module in enumerate(modules):
            for name, stack in buffers.items():
                module.buffers[name].copy_(stack[position])
    return outputs


def _stack(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack(list(values))
    return {name: torch.stack([value[name] for value in values]) for name in values[0]}


def _tensor_shapes(module: MemberModule) -> tuple[Any, ...]:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in module.own.items())
