"""Executor for a mesh of torch.distributed processes with the axes `member` and `data`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plateaux.core.errors import RecipeError
from plateaux.core.executor import Executor, Failure, JobFn, Launcher
from plateaux.core.process_info import local_processes
from plateaux.core.progress import Progress
from plateaux.core.registry import executor
from plateaux.core.runtime import get_device
from plateaux.core.types import TensorTree
from plateaux.distributed.identity_collectives import IdentityCollectives
from plateaux.distributed.process_pool import run_sequentially
from plateaux.distributed.sync_batchnorm import convert_sync_batchnorm

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
BUCKET_BYTES = 64 << 20  # size of one message of all_reduce
MAX_DIMS = 8  # of gathered tensors
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


class MeshExecutor(IdentityCollectives, Launcher):
    """Members are divided over the axis `member`, the samples of a batch over the axis `data`."""

    def __init__(self, mesh: DeviceMesh, sync_batchnorm: bool, device: str) -> None:
        self._members = mesh.get_group("member")
        self._data = mesh.get_group("data")
        self._member_rank, self._member_size = mesh.get_local_rank("member"), mesh.size(0)
        self.data_rank, self.data_size = mesh.get_local_rank("data"), mesh.size(1)
        self._sync_batchnorm = sync_batchnorm
        self.device = device

    def local_members(self, members: int) -> range:
        return _block(members, self._member_rank, self._member_size)

    def all_gather(self, rows: Tensor, *, batch: bool = False, own_member_only: bool = False) -> Tensor:
        if batch and self.data_size > 1 and len(rows):  # without members here, there are none on the data axis either
            rows = _gather(rows, self._data, self.data_size, self.data_rank, axis=1)
        if own_member_only or self._member_size == 1:
            return rows
        return _gather(rows, self._members, self._member_size, self._member_rank, axis=0)

    def all_reduce(
        self, tree: TensorTree, op: Literal["sum", "max"] = "sum", *, group: Literal["data", "world"] = "data"
    ) -> TensorTree:
        if group == "data" and self.data_size == 1:
            return tree
        reduced: TensorTree = {}
        for names in _buckets(tree):
            flat = torch.cat([tree[name].reshape(-1) for name in names])
            dist.all_reduce(flat, REDUCE_OPS[op], group=self._data if group == "data" else None)
            pieces = torch.split(flat, [tree[name].numel() for name in names])
            reduced.update({name: piece.view_as(tree[name]) for name, piece in zip(names, pieces, strict=True)})
        return {name: reduced[name] for name in tree}

    def barrier(self) -> None:
        device = torch.device(self.device or "cpu")
        dist.barrier(device_ids=[device.index or 0] if device.type == "cuda" else None)

    def shard(self, batch: int) -> slice:
        block = _block(batch, self.data_rank, self.data_size)
        return slice(block.start, block.stop)

    def setup_module(self, module: nn.Module) -> None:
        if self.data_size > 1 and self._sync_batchnorm:
            convert_sync_batchnorm(module, self._data)

    def is_writer(self) -> bool:
        return self.data_rank == 0

    def launch(self, jobs: Sequence[Any], run_job: JobFn, progress: Progress) -> list[Failure]:
        return run_sequentially(jobs, run_job, progress, device=self.device, processes=local_processes())


@executor
def mesh(*, data_parallel: int = 1, sync_batchnorm: bool = True, devices: tuple[str, ...] = ()) -> Executor:
    """A mesh of torch.distributed processes: members on one axis, the samples of a batch on the other."""
    if "RANK" not in os.environ:
        raise RecipeError(
            "The executor 'mesh' needs several processes: start them with torchrun, or with "
            "`plateaux train RECIPE --executor mesh --processes N`"
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    default = f"cuda:{local_rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    device = get_device(devices[local_rank % len(devices)] if devices else default)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    world_size = dist.get_world_size()
    if world_size % data_parallel:
        raise RecipeError(
            f"executor.data_parallel = {data_parallel} does not divide the number of processes, {world_size}; choose a "
            f"divisor of {world_size}"
        )
    grid = _device_mesh(dist.group.WORLD, device.type, world_size // data_parallel, data_parallel)
    return MeshExecutor(grid, sync_batchnorm, str(device))


@lru_cache(maxsize=8)
def _device_mesh(world: Any, device: str, member_size: int, data_size: int) -> DeviceMesh:
    """Return the mesh; cached, because every process group has threads of its own that run until the process ends."""
    return init_device_mesh(device, (member_size, data_size), mesh_dim_names=("member", "data"))


def _block(total: int, rank: int, ranks: int) -> range:
    return range(total * rank // ranks, total * (rank + 1) // ranks)


def _gather(block: Tensor, group: Any, ranks: int, rank: int, *, axis: int) -> Tensor:
    """Concatenate the blocks of all processes; only the block of this process carries gradients.

    A differentiable all-gather would sum the gradients of the same loss over all processes, which is a multiple of the
    gradient. A process without rows passes `torch.empty(0)`; it takes shape and dtype from the other blocks.
    """
    shapes, dtypes = _gather_shapes(block, group, ranks)
    reference = max(range(ranks), key=lambda other: len(shapes[other]))
    if not block.numel() and block.ndim < len(shapes[reference]):
        block = block.new_zeros(0, *shapes[reference][1:], dtype=DTYPES[dtypes[reference]])
        shapes[rank] = tuple(block.shape)
    sizes = [shape[axis] if len(shape) > axis else 0 for shape in shapes]
    padded = block.detach().movedim(axis, 0)
    padded = torch.cat([padded, padded.new_zeros(max(sizes) - len(padded), *padded.shape[1:])]).contiguous()
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    blocks = [other[:size].movedim(0, axis) for other, size in zip(gathered, sizes, strict=True)]
    blocks[rank] = block
    return torch.cat(blocks, axis)


def _gather_shapes(block: Tensor, group: Any, ranks: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the shape of every process's block, and the index of its dtype in DTYPES."""
    header = [DTYPES.index(block.dtype), block.ndim, *block.shape, *[0] * (MAX_DIMS - block.ndim)]
    gathered: list[Any] = [torch.zeros(len(header), dtype=torch.int64, device=block.device) for _ in range(ranks)]
    dist.all_gather(gathered, torch.tensor(header, device=block.device), group=group)
    headers = [tensor.tolist() for tensor in gathered]
    return [tuple(header[2 : 2 + header[1]]) for header in headers], [header[0] for header in headers]


def _buckets(tree: TensorTree) -> Iterable[list[str]]:
    """Divide the names of a tree into consecutive runs of equal dtype and at most BUCKET_BYTES."""
    bucket: list[str] = []
    size = 0
    for name, tensor in tree.items():
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.dtype != tree[bucket[0]].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += tensor.nbytes
    if bucket:
        yield bucket
