"""A mesh of processes: torch.distributed with axes `member` and `data`, started by torchrun or by `plateaux`."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plateaux.core.callbacks import Tell
from plateaux.core.errors import RecipeError
from plateaux.core.executor import Failure, JobFn
from plateaux.core.member import MemberModule
from plateaux.core.outputs import OutputFn
from plateaux.core.registry import executor
from plateaux.core.runtime import get_device, local_processes
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.process_pool import run_sequentially
from plateaux.distributed.sync_batchnorm import convert_sync_batchnorm

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
BUCKET = 64 << 20  # bytes that travel in one message
DIMENSIONS = 8  # of a block at most
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]


class MeshExecutor:
    """Members are spread over the axis `member`, the samples of a batch over the axis `data`."""

    offloads = False
    is_remote = False

    def __init__(self, mesh: DeviceMesh, sync_batchnorm: bool, device: str) -> None:
        self._members = mesh.get_group("member")
        self._data = mesh.get_group("data")
        self._member_rank, self._member_size = mesh.get_local_rank("member"), mesh.size(0)
        self.data_rank, self.data_size = mesh.get_local_rank("data"), mesh.size(1)
        self.is_sharded = self.data_size > 1
        self._sync_batchnorm = sync_batchnorm
        self.device = device

    def local_members(self, members: int) -> range:
        return _block(members, self._member_rank, self._member_size)

    def groups(self, architectures: Sequence[Hashable], *, is_joint: bool) -> list[list[int]]:
        everyone = list(range(len(architectures)))
        return [everyone] if is_joint else [[position] for position in everyone]

    def map_members(self, output: OutputFn, modules: Sequence[MemberModule], batches: Sequence[Batch]) -> Tensor:
        return torch.stack([output(view, batch) for view, batch in zip(modules, batches, strict=True)])

    def all_gather(self, rows: Tensor, *, batch: bool = False, own_member_only: bool = False) -> Tensor:
        if batch and self.is_sharded and len(rows):  # copies of members without rows have none either
            rows = _gather(rows, self._data, self.data_size, self.data_rank, axis=1)
        if own_member_only or self._member_size == 1:
            return rows
        return _gather(rows, self._members, self._member_size, self._member_rank, axis=0)

    def all_reduce(
        self, tree: TensorTree, op: Literal["sum", "max"] = "sum", *, group: Literal["data", "world"] = "data"
    ) -> TensorTree:
        if group == "data" and not self.is_sharded:
            return tree
        reduced: TensorTree = {}
        for names in _buckets(tree):
            flat = torch.cat([tree[name].reshape(-1) for name in names])
            dist.all_reduce(flat, REDUCE_OPS[op], group=self._data if group == "data" else None)
            pieces = torch.split(flat, [tree[name].numel() for name in names])
            reduced.update({name: piece.view_as(tree[name]) for name, piece in zip(names, pieces, strict=True)})
        return {name: reduced[name] for name in tree}

    def barrier(self) -> None:
        device = torch.device(self.device)
        dist.barrier(device_ids=[device.index or 0] if device.type == "cuda" else None)

    def shard(self, batch: int) -> slice:
        mine = _block(batch, self.data_rank, self.data_size)
        return slice(mine.start, mine.stop)

    def setup_module(self, module: nn.Module) -> None:
        if self.is_sharded and self._sync_batchnorm:
            convert_sync_batchnorm(module, self._data)

    def is_writer(self) -> bool:
        return self.data_rank == 0

    def launch(self, jobs: Sequence[Any], run_job: JobFn, log: Tell) -> list[Failure]:
        return run_sequentially(jobs, run_job, log, device=self.device, processes=local_processes())

    def close(self) -> None:
        return None


@executor
def mesh(*, data_parallel: int = 1, sync_batchnorm: bool = True, devices: tuple[str, ...] = ()) -> MeshExecutor:
    """Processes of torch.distributed: members over one axis, the samples of a batch over the other."""
    if "RANK" not in os.environ:
        raise RecipeError(
            "The mesh needs processes: start it with torchrun, or with "
            "`plateaux train RECIPE --executor mesh --processes N`"
        )
    place = int(os.environ["LOCAL_RANK"])
    usual = f"cuda:{place % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    device = get_device(devices[place % len(devices)] if devices else usual)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    if world % data_parallel:
        raise RecipeError(
            f"{world} processes cannot be cut into executor.data_parallel = {data_parallel} equal parts; choose a "
            f"divisor of {world}"
        )
    return MeshExecutor(
        _axes(dist.group.WORLD, device.type, world // data_parallel, data_parallel), sync_batchnorm, str(device)
    )


@lru_cache(maxsize=8)
def _axes(world: Any, device: str, members: int, copies: int) -> DeviceMesh:
    """Return the two axes; made once in a process, for every group keeps threads of its own that never rest."""
    return init_device_mesh(device, (members, copies), mesh_dim_names=("member", "data"))


def _block(total: int, rank: int, ranks: int) -> range:
    return range(total * rank // ranks, total * (rank + 1) // ranks)


def _gather(mine: Tensor, group: Any, ranks: int, rank: int, *, axis: int) -> Tensor:
    """Lay everyone's blocks side by side; only this process's own block carries gradients.

    A differentiable all-gather would add every process's gradient of the same loss and multiply it by their number. A
    process that has nothing to show, `torch.empty(0)`, learns from the others what shape and type nothing has.
    """
    shapes, kinds = _everyones(mine, group, ranks)
    fullest = max(range(ranks), key=lambda other: len(shapes[other]))
    if not mine.numel() and mine.ndim < len(shapes[fullest]):
        mine = mine.new_zeros(0, *shapes[fullest][1:], dtype=KINDS[kinds[fullest]])
        shapes[rank] = tuple(mine.shape)
    sizes = [shape[axis] if len(shape) > axis else 0 for shape in shapes]
    padded = mine.detach().movedim(axis, 0)
    padded = torch.cat([padded, padded.new_zeros(max(sizes) - len(padded), *padded.shape[1:])]).contiguous()
    blocks = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(blocks, padded, group=group)
    table = [block[:size].movedim(0, axis) for block, size in zip(blocks, sizes, strict=True)]
    table[rank] = mine
    return torch.cat(table, axis)


def _everyones(mine: Tensor, group: Any, ranks: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the shape and the kind of every process's block."""
    words = [KINDS.index(mine.dtype), mine.ndim, *mine.shape, *[0] * (DIMENSIONS - mine.ndim)]
    known: list[Any] = [torch.zeros(len(words), dtype=torch.int64, device=mine.device) for _ in range(ranks)]
    dist.all_gather(known, torch.tensor(words, device=mine.device), group=group)
    told = [each.tolist() for each in known]
    return [tuple(each[2 : 2 + each[1]]) for each in told], [each[0] for each in told]


def _buckets(tree: TensorTree) -> Iterable[list[str]]:
    """Cut the names of a tree into few runs of equal type and at most BUCKET bytes."""
    run: list[str] = []
    size = 0
    for name, tensor in tree.items():
        if run and (size + tensor.nbytes > BUCKET or tensor.dtype != tree[run[0]].dtype):
            yield run
            run, size = [], 0
        run.append(name)
        size += tensor.nbytes
    if run:
        yield run
