"""A pool of Ray actors that executes jobs: lost processes are replaced, and their jobs resume from checkpoints.

Actors are requested while jobs wait, and each takes the next job when it is ready: jobs queue if there are more of them
than resources, and a slow actor blocks no other. If a process of a group dies, its group is replaced and no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from plateaux.core.errors import Interrupted, PlateauxError, RunError, first_line
from plateaux.core.executor import ExecutorJob, Failure, JobFn
from plateaux.core.progress import MemberUpdate, Message, Progress, ProgressEvent, log_messages
from plateaux.distributed.process_pool import rebuild_error
from plateaux.distributed.ray_cluster import Resources
from plateaux.distributed.stop_signal import StopFlag, graceful_shutdown
from plateaux.distributed.worker_groups import POLL_INTERVAL_S, PendingJob, WorkerGroup, WorkerGroups

MAX_BACKOFF_S = 60.0  # longest wait before a job whose process died is retried
NO_WORKER_WARN_S = 30.0  # a message is sent after this time without a started actor
MAX_FAILED_STARTS = 10  # actors that may die in a row before any has started


class RayWorkerPool:
    """Executes jobs with actors, which are kept for a while in case of further jobs."""

    def __init__(self, resources: Resources, *, max_processes: int | None = None) -> None:
        self.resources = resources
        self.groups = WorkerGroups(resources, max_processes)
        self.pending: list[PendingJob] = []
        self.failures: list[Failure] = []
        self.progress: Progress = log_messages
        self._is_stopping = False
        self._failed_starts = 0
        self._last_started = time.monotonic()

    def run_jobs(
        self,
        jobs: Sequence[ExecutorJob],
        run_job: JobFn,
        progress: Progress,
        *,
        world_size: Callable[[ExecutorJob], int] = lambda _: 1,
    ) -> list[Failure]:
        """Execute jobs on the cluster, each with `world_size(job)` processes; return those that failed."""
        self.progress, self.failures = progress, []
        self.pending = [PendingJob(job, world_size(job)) for job in jobs]
        try:
            with graceful_shutdown() as stop:
                self._run(ray.put(run_job), stop)
        except BaseException:
            self.close()
            raise
        return self.failures

    def close(self) -> None:
        """Release all actors."""
        self.groups.release_all()

    def _run(self, run_job: Any, stop: StopFlag) -> None:
        while self.pending or self.groups.any_busy:
            if stop.is_set() and not self._is_stopping:
                self._stop()
            self.step(run_job)
        if self._is_stopping:
            raise Interrupted("Stopped. Run the same command again to resume")

    def step(self, run_job: Any) -> None:
        """Start actors, assign waiting jobs, and handle the results that arrive within a moment."""
        self.groups.scale([pending.world_size for pending in self.pending])
        self._assign_jobs(run_job)
        self._handle_results()
        self._warn_without_workers()

    def _stop(self) -> None:
        """Ask running jobs to stop with a checkpoint, and drop the waiting ones."""
        self._is_stopping = True
        self.pending.clear()
        for group in self.groups:
            if group.pending is None:
                self.groups.release(group)
                continue
            for worker in group.workers:
                worker.stop.remote()

    def _assign_jobs(self, run_job: Any) -> None:
        now = time.monotonic()
        for group in self.groups:
            if not group.is_started or group.pending is not None:
                continue
            ready = (p for p in self.pending if p.world_size == group.world_size and p.not_before <= now)
            pending = next(ready, None)
            if pending is not None:
                self.pending.remove(pending)
                self.groups.assign(group, pending, run_job)

    def _handle_results(self) -> None:
        now = time.monotonic()
        next_retry = min((p.not_before - now for p in self.pending if p.not_before > now), default=POLL_INTERVAL_S)
        for ref, kind, group, rank in self.groups.wait(min(next_retry, POLL_INTERVAL_S)):
            try:
                result = ray.get(ref)
                if kind == "describe":
                    group.locations[rank] = result
                    self._failed_starts = 0
                elif kind == "events":
                    self._forward_events(group, result)
                    self.groups.poll(group, rank)
                else:
                    self._handle_job_result(group, rank, *result)
            except RayTaskError as error:  # code that cannot be imported there, or results that cannot be pickled
                self._fail(group, PlateauxError(_last_line(error)), RunError(_last_line(error)))
            except RayError as error:
                self._handle_lost(group, error)

    def _forward_events(self, group: WorkerGroup, events: Sequence[ProgressEvent]) -> None:
        assert group.pending is not None
        for event in events:
            if isinstance(event, MemberUpdate):
                event = replace(event, node=group.node, retries=group.pending.attempt)
            self.progress(event)

    def _handle_job_result(
        self, group: WorkerGroup, rank: int, status: str, error: Any, events: Sequence[ProgressEvent]
    ) -> None:
        for ref in self.groups.take_poll(group, rank):
            self._forward_events(group, ray.get(ref))  # returns at once: the job is over
        self._forward_events(group, events)
        if status == "broken":
            self._handle_lost(group, PlateauxError(f"its process group broke: {error[1].splitlines()[0]}"))
            return
        is_stopped = status == "failed" and error[0] == Interrupted.__name__
        if status == "failed" and not is_stopped:
            self._fail(group, rebuild_error(*error))
            return
        group.finished += 1
        if group.finished == group.world_size:  # until then, another process may still write the checkpoint
            group.pending, group.idle_since = None, time.monotonic()
            if is_stopped:
                self.groups.release(group)

    def _fail(self, group: WorkerGroup, error: PlateauxError, start_error: PlateauxError | None = None) -> None:
        """Record a job that raised an exception, without a retry, and release its actors."""
        pending = group.pending
        self.groups.release(group)
        if pending is None:
            raise start_error or error
        self.failures.append(Failure(pending.job, _with_job(pending.job, error)))

    def _handle_lost(self, group: WorkerGroup, error: Exception) -> None:
        """Release a group whose process or node died, and retry its job later, unless it has no retries left."""
        pending = group.pending
        self.groups.release(group)
        if pending is None:
            self._failed_starts += 1
            if self._failed_starts > MAX_FAILED_STARTS and not self.groups.any_started:
                raise RunError(f"{MAX_FAILED_STARTS} processes on the cluster died at startup: {first_line(error)}")
            return
        if self._is_stopping:
            return
        pending.attempt += 1
        problem, retries = f"{pending.job}: the process on {group.node} died", self.resources.max_retries
        if pending.attempt > retries:
            text = f"{problem} {pending.attempt} times; no retries are left ({first_line(error)})"
            self.failures.append(Failure(pending.job, RunError(text)))
            return
        backoff = min(MAX_BACKOFF_S, 0.5 * 2 ** (pending.attempt - 1))
        pending.not_before = time.monotonic() + backoff
        self.pending.insert(0, pending)
        self.progress(Message(f"{problem}; retry {pending.attempt} of {retries} in {backoff:g} s"))

    def _warn_without_workers(self) -> None:
        """Send a message if the cluster has had no room for any actor for a while."""
        if self.groups.any_started:
            self._last_started = time.monotonic()
        elif time.monotonic() - self._last_started > NO_WORKER_WARN_S:
            self._last_started = time.monotonic()
            cpus, gpus = (ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU"))
            needed = f"{self.resources.num_cpus:g} CPUs and {self.resources.num_gpus:g} GPUs"
            self.progress(
                Message(f"waiting for a worker with {needed}; the cluster has {cpus:g} CPUs and {gpus:g} GPUs")
            )


def _with_job(job: ExecutorJob, error: PlateauxError) -> PlateauxError:
    """Name the job in an exception that is not one of Plateaux, whose messages are complete."""
    return error if type(error) is not PlateauxError else PlateauxError(f"{job} failed: {error}")


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
