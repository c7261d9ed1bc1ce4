"""The contract of an executor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from plateaux.core.callbacks import Tell
from plateaux.core.member import MemberModule
from plateaux.core.outputs import OutputFn
from plateaux.core.types import Batch, TensorTree


class JobFn(Protocol):
    """Carries out one job; can be sent to another process."""

    def __call__(self, job: Any, tell: Tell, *, device: str | None = None, processes: int = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that did not end well: by its own fault, or because its process died."""

    job: Any
    problem: Exception
    died: bool = False


class Executor(Protocol):
    """Where members live: three verbs and `launch`. Nothing else changes between one process and a mesh."""

    offloads: bool  # members rest on disk between their turns
    device: str | None  # where this process works; None: wherever it is told to
    is_remote: (
        bool  # jobs are carried out in other places: they leave records, and one that is lost may live on for a moment
    )

    def local_members(self, members: int) -> range:
        """Say which of so many members are held here."""

    def groups(self, architectures: Sequence[Hashable], *, is_joint: bool) -> list[list[int]]:
        """Say which members' rows are computed in one go, by position; equal kinds are equal networks."""

    def map_members(self, output: OutputFn, modules: Sequence[MemberModule], batches: Sequence[Batch]) -> Tensor:
        """Run the offer for every member given; one row each."""

    def all_gather(self, rows: Tensor, *, batch: bool = False, own_member_only: bool = False) -> Tensor:
        """Bring everyone's rows: own rows attached, others detached; `alone`, no rows of other members."""

    def all_reduce(self, tree: TensorTree) -> TensorTree:
        """Add up a tree, already weighted by this copy's share, over the copies that saw other samples."""

    def shard(self, batch: int) -> slice:
        """Say which samples of a batch this copy works on."""

    def all_reduce_max(self, value: int) -> int:
        """Return the strongest wish of any process: all get the same answer."""

    def setup_module(self, module: nn.Module) -> None:
        """Make a network fit to live here, before its first step."""

    def is_writer(self) -> bool:
        """Say whether this process writes for the members it holds."""

    def launch(self, jobs: Sequence[Any], run_job: JobFn, log: Tell) -> list[Failure]:
        """Carry out the jobs; executors import nothing above them, so they are given the function."""

    def close(self) -> None:
        """Give back what is held between launches."""
