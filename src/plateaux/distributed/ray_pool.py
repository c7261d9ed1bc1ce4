"""Jobs by the actors of a Ray cluster: who dies is replaced, and its job begins again from its checkpoint elsewhere.

Actors are asked for while jobs wait, and each takes the next job when it is ready: more jobs than places queue, and a
slow one holds nobody back. A job for several processes has a group of actors, placed together or not at all. One that
dies takes its group along, nobody else. Ray's core only: actors, and placement groups.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from plateaux.core.callbacks import Tell
from plateaux.core.errors import Interrupted, PlateauxError, RunError
from plateaux.core.executor import Failure, Job, JobFn
from plateaux.core.progress import MemberUpdate, Message
from plateaux.distributed.process_pool import rebuild_error
from plateaux.distributed.ray_worker import RayWorker
from plateaux.distributed.stop_signal import StopFlag, graceful_shutdown

SCALE_UP_WARN_S = 64  # actors that may be waiting for a place at once: enough for an autoscaler to see the need
MAX_BACKOFF_S = 60.0  # seconds before a job whose process died is begun again
IDLE_TIMEOUT_S = 30.0  # seconds that an actor without work keeps its place
NO_PLACE = 30.0  # seconds without a place for anybody before that is said
OBJECTS = 256 << 20  # bytes of a cluster of our own that travel between processes
BATCH_EVENTS_S = 1.0  # seconds of news in one answer of an actor, and the longest wait for any
POLL_TIMEOUT_S = 50  # answers with news that a driver takes in a second, however many actors there are
STARTS = 10  # actors that may die one after the other before any has begun
# An actor that listens while it works does so in a thread of its own, and glibc gives such a thread's memory back to
# the system with every step, whatever it is told, unless all threads share one arena: thousands of page faults a step.
ENVIRONMENT = {"env_vars": {"MALLOC_ARENA_MAX": "1"}}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one process of a job takes, and how often a job is begun again."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_retries: int = 5


@dataclass(slots=True)
class PendingJob:
    """A job, how many processes it takes, how often it was begun before, and when it may begin."""

    job: Job
    world: int
    attempt: int = 0
    ready: float = 0.0


@dataclass(slots=True, eq=False)
class WorkerGroup:
    """One actor or a group of them, and the task they have now; no task while they wait for a place, or for work."""

    world: int
    workers: list[Any]
    group: Any = None
    found: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # where each of them is
    task: PendingJob | None = None
    answers: int = 0  # of those who have done their part of it
    since: float = field(default_factory=time.monotonic)  # without a task

    @property
    def begun(self) -> bool:
        return len(self.found) == self.world

    @property
    def node(self) -> str:
        return ", ".join(dict.fromkeys(str(each["node"]) for each in self.found.values()))

    def placement_group(self, rank: int) -> dict[str, Any] | None:
        """Return what one of several processes must know to find the others: they meet at the first one's."""
        if self.world == 1:
            return None
        where = {"MASTER_ADDR": self.found[0]["address"], "MASTER_PORT": self.found[0]["port"]}
        return {"RANK": rank, "WORLD_SIZE": self.world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, **where}


@dataclass(slots=True)
class RayWorkerPool:
    """Carries out jobs by actors, which stay for a while should there be more jobs."""

    resources: Resources
    max_groups: int | None = None  # processes that there will ever be room for, where nobody adds machines
    log: Tell = lambda _: None
    pending: list[PendingJob] = field(default_factory=list)
    groups: list[WorkerGroup] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    refs: dict[Any, tuple[str, WorkerGroup, int]] = field(
        default_factory=dict
    )  # what is awaited, of whom, of which rank
    stopping: bool = False
    starts: int = 0  # actors that died before they began, since one did
    idle_since: float = field(default_factory=time.monotonic)

    def run_jobs(
        self, jobs: Sequence[Job], work: JobFn, tell: Tell, *, world_size: Callable[[Job], int] = lambda _: 1
    ) -> list[Failure]:
        """Execute jobs on the cluster, each with `world_size(job)` processes; return those that failed."""
        self.log, self.failures, self.pending = tell, [], [PendingJob(job, world_size(job)) for job in jobs]
        try:
            with graceful_shutdown() as asked:
                self._run(ray.put(work), asked)
        except BaseException:
            self.release_workers()
            raise
        return self.failures

    def _run(self, parcel: Any, asked: StopFlag) -> None:
        while self.pending or any(slot.task for slot in self.groups):
            if asked.is_set() and not self.stopping:
                self._stop()
            self._request_workers()
            self._assign_job(parcel)
            self._handle_events()
        if self.stopping:
            raise Interrupted("Stopped; every member wrote a checkpoint. Run the same command again to go on")

    def max_workers(self) -> int:
        """Return how many processes the cluster has room for."""
        has, needs = ray.cluster_resources(), {"CPU": self.resources.num_cpus, "GPU": self.resources.num_gpus}
        return max(1, int(min(has.get(name, 0) / need for name, need in needs.items() if need)))

    def map(
        self,
        jobs: Sequence[Sequence[Any]],
        ask: Callable[[Any, Any], Any],
        answer: Callable[..., Any],
        parcel: Any,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield each list's first job and `answer(parcel, it, *asked)`, in turn; `asked` is `ask(parcel, job)` of all.

        Both are tasks: what they return stays on the cluster, and Ray runs again what is lost with a node.
        """
        what = {
            "num_cpus": self.resources.num_cpus,
            "num_gpus": self.resources.num_gpus,
            "max_retries": self.resources.max_retries,
        }
        asking, answering = (ray.remote(work).options(**what) for work in (ask, answer))
        sent, coming, under_way = ray.put(parcel), iter(jobs), deque[tuple[Any, Any]]()
        while True:
            for some in islice(coming, max(0, 2 * self.max_workers() - len(under_way))):  # a cluster may shrink
                asked = [asking.remote(sent, job) for job in some]
                under_way.append((some[0], answering.remote(sent, some[0], *asked)))
            if not under_way:
                return
            job, ref = under_way.popleft()
            try:
                yield job, ray.get(ref)
            except RayTaskError as problem:
                raise problem.cause if isinstance(problem.cause, PlateauxError) else problem from None

    def release_workers(self) -> None:
        """Let everybody go."""
        for slot in list(self.groups):
            self._release(slot)

    def _stop(self) -> None:
        """Let everybody who works end with a checkpoint; let nobody begin."""
        self.stopping = True
        self.pending.clear()
        for slot in list(self.groups):
            if slot.task is None:
                self._release(slot)
                continue
            for hand in slot.workers:
                hand.stop.remote()

    def _request_workers(self) -> None:
        """Ask for as many actors as jobs wait; let those go that nothing is left for, or whose place others need."""
        wants = {task.world for task in self.pending}
        for world in wants | {slot.world for slot in self.groups}:
            wanted = sum(task.world == world for task in self.pending)
            free = [slot for slot in self.groups if slot.world == world and slot.task is None]
            free.sort(key=lambda slot: not slot.begun)
            for slot in free[wanted:]:
                if not slot.begun or wants - {world} or time.monotonic() - slot.since > IDLE_TIMEOUT_S:
                    self._release(slot)
            for _ in range(min(wanted, SCALE_UP_WARN_S) - len(free)):
                held = sum(slot.world for slot in self.groups)
                if held and self.max_groups is not None and held + world > self.max_groups:
                    break  # while somebody waits for a place, Ray lets every process look for garbage, again and again
                self._start_group(world)

    def _start_group(self, world: int) -> None:
        what = {"num_cpus": self.resources.num_cpus, "num_gpus": self.resources.num_gpus}
        options = {"max_concurrency": 4, "max_restarts": 0, "runtime_env": ENVIRONMENT, **what}
        actor, group = ray.remote(RayWorker), None
        if world > 1:
            bundle = {"CPU": self.resources.num_cpus, "GPU": self.resources.num_gpus}
            group = placement_group([{k: v for k, v in bundle.items() if v} for _ in range(world)], strategy="PACK")
            places = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(world)]
            hands = [actor.options(scheduling_strategy=place, **options).remote() for place in places]
        else:
            hands = [actor.options(**options).remote()]
        slot = WorkerGroup(world, hands, group)
        self.groups.append(slot)
        for rank, hand in enumerate(hands):
            self.refs[hand.describe.remote()] = "about", slot, rank

    def _assign_job(self, parcel: Any) -> None:
        now = time.monotonic()
        for slot in [slot for slot in self.groups if slot.begun and slot.task is None]:
            task = next((t for t in self.pending if t.world == slot.world and t.ready <= now), None)
            if task is None:
                continue
            self.pending.remove(task)
            slot.task, slot.answers = task, 0
            job = task.job.with_attempt(task.attempt)
            for rank, hand in enumerate(slot.workers):
                self.refs[hand.run_job.remote(parcel, job, self.resources.num_cpus, slot.placement_group(rank))] = (
                    "work",
                    slot,
                    rank,
                )
                self._poll(slot, rank)

    def _poll(self, slot: WorkerGroup, rank: int) -> None:
        patience = max(BATCH_EVENTS_S, sum(each.world for each in self.groups if each.task) / POLL_TIMEOUT_S)
        self.refs[slot.workers[rank].poll_events.remote(patience)] = "news", slot, rank

    def _handle_events(self) -> None:
        """Wait a moment for whatever comes first, and see to it."""
        if not self.refs:
            time.sleep(0.05)
            return
        now = time.monotonic()
        moment = min((task.ready - now for task in self.pending if task.ready > now), default=BATCH_EVENTS_S)
        done, _ = ray.wait(list(self.refs), num_returns=1, timeout=min(moment, BATCH_EVENTS_S))
        more, _ = ray.wait(list(self.refs), num_returns=len(self.refs), timeout=0)
        for ref in dict.fromkeys([*done, *more]):
            if ref not in self.refs:
                continue  # of one that was dismissed meanwhile
            kind, slot, rank = self.refs.pop(ref)
            try:
                self._handle_result(kind, slot, rank, ray.get(ref))
            except RayTaskError as problem:  # an answer that cannot be had: code that is not there, or cannot travel
                self._fail(slot, PlateauxError(_last_line(problem)), RunError(_last_line(problem)))
            except RayError as problem:
                self._handle_lost(slot, problem)
        self._warn_waiting()

    def _handle_result(self, kind: str, slot: WorkerGroup, rank: int, said: Any) -> None:
        if kind == "about":
            self._begin(slot, rank, said)
        elif kind == "news":
            self._forward_stop(slot, said)
            self._poll(slot, rank)
        else:
            self._ended(slot, rank, *said)

    def _begin(self, slot: WorkerGroup, rank: int, where: Mapping[str, Any]) -> None:
        slot.found[rank] = where
        self.starts = 0

    def _forward_stop(self, slot: WorkerGroup, heard: Sequence[Any]) -> None:
        assert slot.task is not None
        for news in heard:
            if isinstance(news, MemberUpdate):
                news = replace(news, node=slot.node, retries=slot.task.attempt)
            self.log(news)

    def _ended(self, slot: WorkerGroup, rank: int, kind: str, content: Any, rest: Sequence[Any]) -> None:
        for ref in [ref for ref, of in self.refs.items() if of == ("news", slot, rank)]:
            del self.refs[ref]
            self._forward_stop(slot, ray.get(ref))  # it comes at once: there is nothing to wait for any more
        self._forward_stop(slot, rest)
        if kind == "broken":
            self._handle_lost(slot, PlateauxError(f"its group fell apart: {content[1].splitlines()[0]}"))
            return
        stopped = kind == "failed" and content[0] == Interrupted.__name__
        if kind == "failed" and not stopped:
            self._fail(slot, rebuild_error(*content))
            return
        slot.answers += 1
        if slot.answers == slot.world:  # of a group that stops, one may still be writing the checkpoint
            slot.task, slot.since = None, time.monotonic()
            if stopped:
                self._release(slot)

    def _fail(self, slot: WorkerGroup, problem: PlateauxError, beginning: PlateauxError | None = None) -> None:
        """End a task that failed by its own fault: it is not tried again, and its process is not used again."""
        task = slot.task
        self._release(slot)
        if task is None:
            raise beginning or problem
        self.failures.append(Failure(task.job, _describe_failure(task.job, problem)))

    def _handle_lost(self, slot: WorkerGroup, problem: Exception) -> None:
        """See to a process or node that died: its task begins again later, elsewhere, unless that was tried enough."""
        task = slot.task
        self._release(slot)
        if task is None:
            self.starts += 1
            if self.starts > STARTS and not any(each.begun for each in self.groups):
                raise RunError(f"{STARTS} processes on the cluster died before they began: {_first_line(problem)}")
            return
        if self.stopping:
            return
        task.attempt += 1
        where = f"{task.job}: its process on {slot.node} died"
        if task.attempt > self.resources.max_retries:
            words = f"{where}, for the {task.attempt}. time; given up ({_first_line(problem)})"
            self.failures.append(Failure(task.job, RunError(words)))
            return
        wait = min(MAX_BACKOFF_S, 0.5 * 2 ** (task.attempt - 1))
        task.ready = time.monotonic() + wait
        self.pending.insert(0, task)
        again = f"begun again in {wait:g} s ({task.attempt} of {self.resources.max_retries} retries)"
        self.log(Message(f"{where}; {again}"))

    def _release(self, slot: WorkerGroup) -> None:
        if slot not in self.groups:
            return
        self.groups.remove(slot)
        self.refs = {ref: of for ref, of in self.refs.items() if of[1] is not slot}
        for hand in slot.workers:
            with suppress(RayError):
                ray.kill(hand)
        if slot.group is not None:
            with suppress(RayError):
                remove_placement_group(slot.group)

    def _warn_waiting(self) -> None:
        """Say it when nobody has found a place for a while."""
        if any(slot.begun for slot in self.groups):
            self.idle_since = time.monotonic()
        elif time.monotonic() - self.idle_since > NO_PLACE:
            self.idle_since = time.monotonic()
            cpus, gpus = (ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU"))
            asked = f"{self.resources.num_cpus:g} CPUs and {self.resources.num_gpus:g} GPUs"
            text = f"waiting for a place with {asked}; the cluster has {cpus:g} CPUs and {gpus:g} GPUs"
            self.log(Message(text))


def is_remote_cluster(address: str | None) -> str | None:
    """Return the address of the cluster that is meant; none where it is to be one of our own."""
    return address or os.environ.get("RAY_ADDRESS") or None


def connect(address: str | None) -> bool:
    """Be connected to a cluster, one that runs, or one of our own that ends with us; say whether it was needed."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = is_remote_cluster(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    ours = {} if address else {"include_dashboard": False, "object_store_memory": OBJECTS}
    try:
        ray.init(address or "local", **ours, **quiet)
    except Exception as problem:  # Ray raises plain ones too
        words = f"Ray's cluster at {address} cannot be joined" if address else "Ray cannot start a cluster here"
        raise RunError(f"{words}: {_first_line(problem)}. Look at `ray status`, or choose another --address") from None
    return True


def disconnect() -> None:
    """Leave the cluster; one of our own ends."""
    ray.shutdown()


def _describe_failure(job: Any, problem: PlateauxError) -> PlateauxError:
    """Return the problem in words that name the job, unless it is one of ours, which says enough."""
    return problem if type(problem) is not PlateauxError else PlateauxError(f"{job} failed: {problem}")


def _first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]


def _last_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[-1]
