"""One process, or a pool of plain ones: members side by side, stacked under vmap, or parked on disk in turn."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plateaux.core.callbacks import Tell
from plateaux.core.errors import RecipeError
from plateaux.core.executor import Failure, JobFn
from plateaux.core.member import MemberModule
from plateaux.core.outputs import OutputFn
from plateaux.core.registry import executor
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.process_pool import run_pool, run_sequentially


class LocalExecutor:
    """All members are held here; gathering and averaging are the identity."""

    device: str | None = None
    is_remote = False

    def __init__(self, mode: str, processes: int, devices: Sequence[str], randomness: str) -> None:
        self.mode = mode
        self.offloads = mode == "offload"
        self._processes = processes
        self._devices = devices
        self._randomness = randomness

    def local_members(self, members: int) -> range:
        return range(members)

    def groups(self, architectures: Sequence[Hashable], *, is_joint: bool) -> list[list[int]]:
        if is_joint:
            return [list(range(len(architectures)))]
        if self.mode != "vmap":
            return [[position] for position in range(len(architectures))]
        alike: dict[Hashable, list[int]] = {}
        for position, kind in enumerate(architectures):
            alike.setdefault(kind, []).append(position)
        return list(alike.values())

    def map_members(self, output: OutputFn, modules: Sequence[MemberModule], batches: Sequence[Batch]) -> Tensor:
        if self.mode != "vmap" or not getattr(output, "batched", True):
            return run_loop(output, modules, batches)
        alike: dict[Hashable, list[int]] = {}
        for position, view in enumerate(modules):
            alike.setdefault((view.kind, _tensor_shapes(view)), []).append(position)
        rows: dict[int, Tensor] = {}
        for positions in alike.values():
            few = [modules[i] for i in positions], [batches[i] for i in positions]
            table = run_vmap(output, *few, self._randomness) if len(positions) > 1 else run_loop(output, *few)
            if len(alike) == 1:
                return table
            rows.update(zip(positions, table, strict=True))
        return torch.stack([rows[i] for i in range(len(modules))])

    def all_gather(self, rows: Tensor, *, batch: bool = False, own_member_only: bool = False) -> Tensor:
        return rows

    def all_reduce(self, tree: TensorTree) -> TensorTree:
        return tree

    def shard(self, batch: int) -> slice:
        return slice(0, batch)

    def all_reduce_max(self, value: int) -> int:
        return value

    def setup_module(self, module: nn.Module) -> None:
        return None

    def is_writer(self) -> bool:
        return True

    def launch(self, jobs: Sequence[Any], run_job: JobFn, log: Tell) -> list[Failure]:
        if self._processes > 1:
            return run_pool(jobs, run_job, log, processes=self._processes, devices=self._devices)
        return run_sequentially(jobs, run_job, log, device=self._devices[0] if self._devices else None)

    def close(self) -> None:
        return None


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


def run_loop(offer: OutputFn, views: Sequence[MemberModule], batches: Sequence[Batch]) -> Tensor:
    """Run the offer for one member after the other."""
    return torch.stack([offer(view, batch) for view, batch in zip(views, batches, strict=True)])


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
