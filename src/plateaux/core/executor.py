"""The protocols of an executor: `Collectives` for a step or an evaluation, `Launcher` for jobs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from plateaux.core.member import MemberModule
from plateaux.core.outputs import OutputFn
from plateaux.core.progress import Progress
from plateaux.core.types import Batch, TensorTree


class ExecutorJob(Protocol):
    """What an executor needs from a job: picklable data that any process can execute."""

    @property
    def members(self) -> tuple[int, ...]:
        """The members that the job works on."""

    @property
    def is_single_process(self) -> bool:
        """Whether one process executes the job, whatever the size of the executor."""

    def with_attempt(self, attempt: int) -> ExecutorJob:
        """Return the same job as its given attempt; 0 is the first one."""


class JobFn(Protocol):
    """Executes one job; it is pickled to be sent to other processes."""

    def __call__(self, job: Any, progress: Progress, /, *, device: str | None = None, processes: int = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that failed: it raised an exception, or its process died."""

    job: Any
    problem: Exception
    died: bool = False


class Collectives(Protocol):
    """Which members and samples this process works on, how outputs are computed, and how processes exchange tensors.

    Processes form a grid of two axes: members are divided over one, the samples of a batch over the other (`data`).
    """

    device: str | None  # the device of this process; None: the caller chooses
    data_rank: int  # the position of this process on the data axis
    data_size: int  # the number of processes that share the samples of a batch

    def local_members(self, members: int) -> range:
        """Return which of the members `0, ..., members - 1` this process holds."""

    def groups(self, architectures: Sequence[Hashable], *, is_joint: bool) -> list[list[int]]:
        """Group the positions of members whose outputs are computed in one call; equal architectures can be stacked."""

    def map_members(self, output: OutputFn, modules: Sequence[MemberModule], batches: Sequence[Batch]) -> Tensor:
        """Compute the outputs of every member on its batch: `[M, B, ...]`."""

    def all_gather(self, rows: Tensor, *, batch: bool = False, own_member_only: bool = False) -> Tensor:
        """Gather rows `[m, b, ...]` of all members, and with `batch` of all samples; only own rows carry gradients.

        With `own_member_only` no rows of other members are gathered.
        """

    def all_reduce(
        self, tree: TensorTree, op: Literal["sum", "max"] = "sum", *, group: Literal["data", "world"] = "data"
    ) -> TensorTree:
        """Reduce a tree over the processes of the data axis, or over all processes (`group="world"`).

        The sum is not a mean: weight the tree by this process's share of the samples first.
        """

    def barrier(self) -> None:
        """Wait until all processes are here."""

    def shard(self, batch: int) -> slice:
        """Return the samples of a batch of the given size that this process works on."""

    def setup_module(self, module: nn.Module) -> None:
        """Prepare a network before its first step, for example synchronize its batch normalization."""

    def is_writer(self) -> bool:
        """Return whether this process writes the files of the members that it holds."""


class Launcher(Protocol):
    """How jobs are executed: in this process, in a pool of processes, or on a cluster."""

    offloads: bool = False  # members are kept on disk while they do not train
    is_remote: bool = False  # jobs run in other processes or nodes: they write job records, and locks may be stale

    def launch(self, jobs: Sequence[Any], run_job: JobFn, progress: Progress) -> list[Failure]:
        """Execute jobs, forward their progress events, and return those that failed."""

    def close(self) -> None:
        """Release workers and connections that are kept between launches."""
        return None


class Executor(Collectives, Launcher, Protocol):
    """What a factory with `@plateaux.executor` returns."""


def all_reduce_max(executor: Collectives, value: int) -> int:
    """Return the maximum of an integer over all processes."""
    tree = {"value": torch.tensor(value, device=executor.device)}
    return int(executor.all_reduce(tree, "max", group="world")["value"])
