"""A Ray cluster: every job is an actor's, or a group's that forms a mesh; lost machines cost one job's time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from plateaux.core.callbacks import Tell
from plateaux.core.errors import RecipeError
from plateaux.core.executor import Failure, Job, JobFn
from plateaux.core.registry import executor
from plateaux.distributed.executors.mesh import MeshExecutor, mesh
from plateaux.distributed.identity_collectives import IdentityCollectives

if TYPE_CHECKING:
    from plateaux.distributed.ray_pool import RayWorkerPool


class RayExecutor(IdentityCollectives):
    """Plans here, works elsewhere; a process of the cluster that has a job to itself holds all of its members."""

    is_remote = True

    def __init__(self, address: str | None, cpus: float, gpus: float, retries: int, processes: int, data: int) -> None:
        self._address, self._needs = address, (cpus, gpus, retries)
        self._processes, self._data = processes, data
        self._ours = False  # the connection
        self._crew: RayWorkerPool | None = None

    def launch(self, jobs: Sequence[Any], run_job: JobFn, log: Tell) -> list[Failure]:
        return self._joined().run_jobs(jobs, run_job, log, world_size=self.world_size)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._crew is None:
            return
        from plateaux.distributed import ray_pool

        self._crew.release_workers()
        self._crew = None
        if self._ours:
            ray_pool.disconnect()

    def max_workers(self) -> int:
        """Return how many processes of a job's size the cluster has room for now."""
        return self._joined().max_workers()

    def map(self, jobs: Sequence[Sequence[Any]], ask: Any, answer: Any, parcel: Any) -> Iterator[tuple[Any, Any]]:
        """Yield what `answer` makes of the answers to each list of jobs, asked one by one, in turn."""
        return self._joined().map(jobs, ask, answer, parcel)

    def world_size(self, job: Job) -> int:
        """Return how many processes a job uses: the data axis of one member, or the mesh of a joint method."""
        if job.is_single_process:
            return 1
        return self._data if len(job.members) == 1 else max(self._processes, self._data)

    def _joined(self) -> RayWorkerPool:
        """Return our people on the cluster; connect to it first."""
        if self._crew is None:
            if find_spec("ray") is None:
                raise RecipeError('The executor "ray" needs Ray: pip install "plateaux[ray]"')
            from plateaux.distributed import ray_pool

            self._ours = ray_pool.connect(self._address)
            self._crew = ray_pool.RayWorkerPool(ray_pool.Resources(*self._needs))
            if self._ours and not ray_pool.is_remote_cluster(self._address):
                self._crew.max_groups = self._crew.max_workers()
        return self._crew


@executor
def ray(
    *,
    address: str | None = None,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    max_retries: int = 5,
    processes: int = 1,
    data_parallel: int = 1,
    sync_batchnorm: bool = True,
) -> RayExecutor | MeshExecutor:
    """A Ray cluster: members are jobs that survive lost processes and machines; joint ones form a mesh there."""
    if processes > data_parallel and processes % data_parallel:
        raise RecipeError(
            f"executor.processes = {processes} cannot be cut into executor.data_parallel = {data_parallel} equal "
            "parts; choose a multiple"
        )
    if "RANK" in os.environ:
        group = mesh(data_parallel=data_parallel, sync_batchnorm=sync_batchnorm)
        group.is_remote = True
        return group
    return RayExecutor(address, num_cpus, num_gpus, max_retries, processes, data_parallel)
