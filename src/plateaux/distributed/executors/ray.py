"""Executor for a Ray cluster: every job runs in an actor, or in a group of actors that form a mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from plateaux.core.errors import RecipeError
from plateaux.core.executor import Executor, ExecutorJob, Failure, JobFn, Launcher
from plateaux.core.progress import Progress
from plateaux.core.registry import executor
from plateaux.distributed.executors.mesh import mesh
from plateaux.distributed.identity_collectives import IdentityCollectives

if TYPE_CHECKING:
    from plateaux.distributed.ray_pool import RayWorkerPool


class RayExecutor(IdentityCollectives, Launcher):
    """Plans jobs in this process and executes them on the cluster.

    In a process of the cluster that has a job to itself, it is an executor of one process.
    """

    is_remote = True

    def __init__(
        self, address: str | None, cpus: float, gpus: float, retries: int, processes: int, data_parallel: int
    ) -> None:
        self._address, self._resources = address, (cpus, gpus, retries)
        self._processes, self._data_parallel = processes, data_parallel
        self._owns_connection = False
        self._pool: RayWorkerPool | None = None

    def launch(self, jobs: Sequence[ExecutorJob], run_job: JobFn, progress: Progress) -> list[Failure]:
        return self._connected_pool().run_jobs(jobs, run_job, progress, world_size=self.world_size)

    def close(self) -> None:
        """Release the actors and leave the cluster; a cluster that was started here ends."""
        if self._pool is None:
            return
        from plateaux.distributed import ray_cluster

        self._pool.close()
        self._pool = None
        if self._owns_connection:
            ray_cluster.disconnect()

    def map_reduce(
        self,
        shards: Sequence[Sequence[Any]],
        map_fn: Callable[[Any, Any], Any],
        reduce_fn: Callable[..., Any],
        context: Any,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield, in order, the first job of every list and `reduce_fn(context, job, *results)` of its results."""
        from plateaux.distributed import ray_cluster

        return ray_cluster.map_reduce(self._connected_pool().resources, shards, map_fn, reduce_fn, context)

    def world_size(self, job: ExecutorJob) -> int:
        """Return how many processes a job uses: the data axis of one member, or the mesh of a joint method."""
        if job.is_single_process:
            return 1
        return self._data_parallel if len(job.members) == 1 else max(self._processes, self._data_parallel)

    def _connected_pool(self) -> RayWorkerPool:
        """Return the pool; connect to the cluster first."""
        if self._pool is None:
            if find_spec("ray") is None:
                raise RecipeError('The executor "ray" needs Ray: pip install "plateaux[ray]"')
            from plateaux.distributed import ray_cluster, ray_pool

            self._owns_connection = ray_cluster.connect(self._address)
            resources = ray_cluster.Resources(*self._resources)
            can_grow = not self._owns_connection or ray_cluster.cluster_address(self._address) is not None
            max_processes = None if can_grow else ray_cluster.max_workers(resources)
            self._pool = ray_pool.RayWorkerPool(resources, max_processes=max_processes)
        return self._pool


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
) -> Executor:
    """A Ray cluster: jobs survive lost processes and nodes; jobs of joint methods run on a mesh there."""
    if processes > data_parallel and processes % data_parallel:
        raise RecipeError(
            f"executor.processes = {processes} is not a multiple of executor.data_parallel = {data_parallel}; choose a "
            "multiple"
        )
    if "RANK" in os.environ:
        group = mesh(data_parallel=data_parallel, sync_batchnorm=sync_batchnorm)
        group.is_remote = True
        return group
    return RayExecutor(address, num_cpus, num_gpus, max_retries, processes, data_parallel)
