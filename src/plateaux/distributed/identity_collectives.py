"""Collective operations of a single process, which are the identity."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from plateaux.core.member import MemberModule
from plateaux.core.outputs import OutputFn
from plateaux.core.types import Batch, TensorTree


class IdentityCollectives:
    """The collectives wherever one process holds all members and all samples."""

    device: str | None = None
    data_rank = 0
    data_size = 1

    def local_members(self, members: int) -> range:
        return range(members)

    def groups(self, architectures: Sequence[Hashable], *, is_joint: bool) -> list[list[int]]:
        positions = list(range(len(architectures)))
        return [positions] if is_joint else [[position] for position in positions]

    def map_members(self, output: OutputFn, modules: Sequence[MemberModule], batches: Sequence[Batch]) -> Tensor:
        return torch.stack(list(map(output, modules, batches)))

    def all_gather(self, rows: Tensor, *, batch: bool = False, own_member_only: bool = False) -> Tensor:
        return rows

    def all_reduce(
        self, tree: TensorTree, op: Literal["sum", "max"] = "sum", *, group: Literal["data", "world"] = "data"
    ) -> TensorTree:
        return tree

    def barrier(self) -> None:
        return None

    def shard(self, batch: int) -> slice:
        return slice(0, batch)

    def setup_module(self, module: nn.Module) -> None:
        return None

    def is_writer(self) -> bool:
        return True
