"""The contract of an executor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from plateaux.core.callbacks import Tell
from plateaux.core.member import View
from plateaux.core.outputs import Offer
from plateaux.core.types import Batch, Tree


class CarryOut(Protocol):
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

    parks: bool  # members rest on disk between their turns
    device: str | None  # where this process works; None: wherever it is told to
    far: bool  # jobs are carried out in other places: they leave records, and one that is lost may live on for a moment

    def rows(self, members: int) -> range:
        """Say which of so many members are held here."""

    def groups(self, kinds: Sequence[Hashable], *, together: bool) -> list[list[int]]:
        """Say which members' rows are computed in one go, by position; equal kinds are equal networks."""

    def each(self, offer: Offer, views: Sequence[View], batches: Sequence[Batch]) -> Tensor:
        """Run the offer for every member given; one row each."""

    def gather(self, rows: Tensor, *, whole: bool = False, alone: bool = False) -> Tensor:
        """Bring everyone's rows: own rows attached, others detached; `alone`, no rows of other members."""

    def average(self, tree: Tree) -> Tree:
        """Add up a tree, already weighted by this copy's share, over the copies that saw other samples."""

    def shard(self, batch: int) -> slice:
        """Say which samples of a batch this copy works on."""

    def agree(self, wish: int) -> int:
        """Return the strongest wish of any process: all get the same answer."""

    def prepare(self, module: nn.Module) -> None:
        """Make a network fit to live here, before its first step."""

    def writes(self) -> bool:
        """Say whether this process writes for the members it holds."""

    def launch(self, jobs: Sequence[Any], carry_out: CarryOut, tell: Tell) -> list[Failure]:
        """Carry out the jobs; executors import nothing above them, so they are given the function."""

    def close(self) -> None:
        """Give back what is held between launches."""
