"""Groups of Ray actors: they are started, given jobs, polled for events, and released.

A job with several processes runs on a group of actors that Ray places together or not at all. Only the core of Ray is
used: actors and placement groups.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from plateaux.core.executor import ExecutorJob
from plateaux.distributed.ray_cluster import Resources
from plateaux.distributed.ray_worker import RayWorker

MAX_STARTING = 64  # groups of one size that wait for resources at once: enough for an autoscaler to see the demand
IDLE_TIMEOUT_S = 30.0  # an actor without a job is released after this time
POLL_INTERVAL_S = 1.0  # an actor collects events for this time before it replies
MAX_POLLS_PER_S = 50  # replies with events that the driver handles per second, for any number of actors
# An actor that replies while it works does so in another thread, and glibc returns the memory of such a thread to the
# system in every step, unless all threads share one arena: thousands of page faults per step.
RUNTIME_ENV = {"env_vars": {"MALLOC_ARENA_MAX": "1"}}

CallKind: TypeAlias = Literal["describe", "job", "events"]


@dataclass(slots=True)
class PendingJob:
    """A job that waits or runs, the number of its processes, and its retries."""

    job: ExecutorJob
    world_size: int
    attempt: int = 0
    not_before: float = 0.0  # earliest start, in seconds of time.monotonic


@dataclass(slots=True, eq=False)
class WorkerGroup:
    """The actors of one job: one, or several that form a process group; without a job while they start or idle."""

    world_size: int
    workers: list[Any]
    placement: Any = None
    locations: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by rank: node, address, port
    pending: PendingJob | None = None
    finished: int = 0  # ranks that have finished the job
    idle_since: float = field(default_factory=time.monotonic)

    @property
    def is_started(self) -> bool:
        return len(self.locations) == self.world_size

    @property
    def node(self) -> str:
        return ", ".join(dict.fromkeys(str(location["node"]) for location in self.locations.values()))

    def environment(self, rank: int) -> dict[str, Any] | None:
        """Return the variables by which torch.distributed finds the other processes; None for a single process."""
        if self.world_size == 1:
            return None
        master = {"MASTER_ADDR": self.locations[0]["address"], "MASTER_PORT": self.locations[0]["port"]}
        return {"RANK": rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, **master}


class WorkerGroups:
    """All groups of a pool, and the calls whose results they have not returned yet."""

    def __init__(self, resources: Resources, max_processes: int | None = None) -> None:
        self.resources = resources
        self.max_processes = max_processes  # the size of a cluster that never grows
        self._groups: list[WorkerGroup] = []
        self._calls: dict[Any, tuple[CallKind, WorkerGroup, int]] = {}  # kind, group, and rank by object ref

    def __iter__(self) -> Iterator[WorkerGroup]:
        return iter(list(self._groups))

    @property
    def any_started(self) -> bool:
        return any(group.is_started for group in self._groups)

    @property
    def any_busy(self) -> bool:
        return any(group.pending for group in self._groups)

    def scale(self, world_sizes: Sequence[int]) -> None:
        """Start a group for every waiting job, and release idle groups that are not needed or occupy resources."""
        for world_size in {*world_sizes, *(group.world_size for group in self._groups)}:
            wanted = world_sizes.count(world_size)
            free = [group for group in self._groups if group.world_size == world_size and group.pending is None]
            free.sort(key=lambda group: not group.is_started)
            others_wait = any(size != world_size for size in world_sizes)
            for group in free[wanted:]:
                if not group.is_started or others_wait or time.monotonic() - group.idle_since > IDLE_TIMEOUT_S:
                    self.release(group)
            for _ in range(min(wanted, MAX_STARTING) - len(free)):
                processes = sum(group.world_size for group in self._groups)
                if processes and self.max_processes is not None and processes + world_size > self.max_processes:
                    break  # while an actor waits for resources, Ray runs garbage collection in every process
                self._start(world_size)

    def assign(self, group: WorkerGroup, pending: PendingJob, run_job: Any) -> None:
        """Send a job to all actors of a group."""
        group.pending, group.finished = pending, 0
        job = pending.job.with_attempt(pending.attempt)
        for rank, worker in enumerate(group.workers):
            ref = worker.run_job.remote(run_job, job, self.resources.num_cpus, group.environment(rank))
            self._calls[ref] = "job", group, rank
            self.poll(group, rank)

    def poll(self, group: WorkerGroup, rank: int) -> None:
        """Request the next events of an actor; the more actors are busy, the longer each of them collects events."""
        busy = sum(group.world_size for group in self._groups if group.pending)
        interval = max(POLL_INTERVAL_S, busy / MAX_POLLS_PER_S)
        self._calls[group.workers[rank].poll_events.remote(interval)] = "events", group, rank

    def take_poll(self, group: WorkerGroup, rank: int) -> list[Any]:
        """Return the refs of the outstanding polls of an actor, which the caller handles."""
        refs = [ref for ref, call in self._calls.items() if call == ("events", group, rank)]
        for ref in refs:
            del self._calls[ref]
        return refs

    def wait(self, timeout: float) -> Iterator[tuple[Any, CallKind, WorkerGroup, int]]:
        """Wait at most `timeout` seconds for a call to return; yield ref, kind, group, and rank of all that did."""
        if not self._calls:
            time.sleep(0.05)
            return
        first, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout)
        rest, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for ref in dict.fromkeys([*first, *rest]):
            if ref in self._calls:  # otherwise its group was released by the caller
                yield ref, *self._calls.pop(ref)

    def release(self, group: WorkerGroup) -> None:
        """End the actors of a group and forget their calls."""
        if group not in self._groups:
            return
        self._groups.remove(group)
        self._calls = {ref: call for ref, call in self._calls.items() if call[1] is not group}
        for worker in group.workers:
            with suppress(RayError):
                ray.kill(worker)
        if group.placement is not None:
            with suppress(RayError):
                remove_placement_group(group.placement)

    def release_all(self) -> None:
        """End all actors."""
        for group in self:
            self.release(group)

    def _start(self, world_size: int) -> None:
        needs = {"num_cpus": self.resources.num_cpus, "num_gpus": self.resources.num_gpus}
        options = {"max_concurrency": 4, "max_restarts": 0, "runtime_env": RUNTIME_ENV, **needs}
        actor, placement = ray.remote(RayWorker), None
        if world_size > 1:
            bundle = {"CPU": self.resources.num_cpus, "GPU": self.resources.num_gpus}
            bundles = [{name: amount for name, amount in bundle.items() if amount} for _ in range(world_size)]
            placement = placement_group(bundles, strategy="PACK")
            strategies = [PlacementGroupSchedulingStrategy(placement, rank) for rank in range(world_size)]
            workers = [actor.options(scheduling_strategy=strategy, **options).remote() for strategy in strategies]
        else:
            workers = [actor.options(**options).remote()]
        group = WorkerGroup(world_size, workers, placement)
        self._groups.append(group)
        for rank, worker in enumerate(workers):
            self._calls[worker.describe.remote()] = "describe", group, rank
