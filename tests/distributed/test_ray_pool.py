"""The Ray pool on a fake cluster whose replies are scripted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from toy_jobs import ToyJob

from plateaux.core.errors import Interrupted, PlateauxError, RunError
from plateaux.core.executor import JobFn
from plateaux.core.progress import MemberUpdate, Message, Progress, ProgressEvent

pytest.importorskip("ray", reason='Ray is not installed: pip install "plateaux[ray]"')

from ray.exceptions import ActorDiedError

from plateaux.distributed import ray_cluster, ray_pool, worker_groups
from plateaux.distributed.executors import ray as ray_executor
from plateaux.distributed.ray_cluster import Resources
from plateaux.distributed.ray_pool import RayWorkerPool
from plateaux.distributed.worker_groups import PendingJob, WorkerGroup, WorkerGroups

DONE = ("done", None, [Message("finished")])
STOPPED = ("failed", ("Interrupted", "with a checkpoint"), [])
DIED = ActorDiedError()

pytestmark = pytest.mark.nightly  # a Ray cluster takes seconds to start


class Ref:
    """An object ref whose result is available at once, never (None), or once `is_ready` returns true."""

    def __init__(self, result: Callable[[], Any] | None, is_ready: Callable[[], bool] = lambda: True) -> None:
        self.result, self.is_ready = result, is_ready


class FakeActor:
    """An actor whose methods are answered by the cluster."""

    def __init__(self, cluster: FakeRay) -> None:
        self.cluster = cluster

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self.cluster.call(self, name, args))


class FakeRay:
    """The functions of Ray that the pool uses; `script` holds the results of the next jobs."""

    def __init__(self, *script: Any, slots: int = 2) -> None:
        self.script, self.slots = list(script), slots
        self.alive: list[FakeActor] = []
        self.calls: list[tuple[str, Any]] = []
        self.running: list[tuple[FakeActor, Ref]] = []  # jobs that run until they are stopped

    def put(self, value: Any) -> Any:
        return value

    def remote(self, _: type) -> Any:
        def start() -> FakeActor:
            self.alive.append(FakeActor(self))
            return self.alive[-1]

        actor_class = SimpleNamespace(remote=start)
        actor_class.options = lambda **_: actor_class
        return actor_class

    def call(self, actor: FakeActor, name: str, args: Any) -> Ref:
        self.calls.append((name, args))
        if name == "describe":
            location = {"pid": 1, "address": "127.0.0.1", "port": 9}
            return Ref(
                lambda: {"node": f"node {self.alive.index(actor)}", **location},
                lambda: actor in self.alive[: self.slots],
            )
        if name == "run_job":
            result = self.script.pop(0) if self.script else DONE
            if result == "until stopped":
                self.running.append((actor, Ref(None)))
                return self.running[-1][1]
            return Ref(lambda: return_or_raise(result))
        if name == "stop":
            for running, ref in self.running:
                if running is actor:
                    ref.result = lambda: STOPPED
        return Ref(lambda: []) if name == "poll_events" else Ref(None)

    def count(self, name: str) -> int:
        return [call for call, _ in self.calls].count(name)

    def wait(self, refs: list[Ref], *, num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if ref.result is not None and ref.is_ready()]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Ref) -> Any:
        assert ref.result is not None
        return ref.result()

    def kill(self, actor: FakeActor) -> None:
        self.alive.remove(actor)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0, "GPU": 1.0}


def return_or_raise(result: Any) -> Any:
    if isinstance(result, Exception):
        raise result
    return result


def never_called(job: Any, progress: Progress, *, device: str | None = None, processes: int = 1) -> None:
    """The script contains the results of jobs."""


RUN_JOB: JobFn = never_called


def use(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ray_cluster, ray_pool, worker_groups):
        monkeypatch.setattr(module, "ray", fake)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRay]:
    def make(*script: Any, **options: Any) -> FakeRay:
        fake = FakeRay(*script, **options)
        use(fake, monkeypatch)
        monkeypatch.setattr(worker_groups, "placement_group", lambda bundles, strategy: bundles)
        monkeypatch.setattr(worker_groups, "remove_placement_group", lambda group: fake.calls.append(("remove", group)))
        return fake

    monkeypatch.setattr(ray_pool, "MAX_BACKOFF_S", 0.01)
    return make


def jobs(*names: object) -> list[ToyJob]:
    return [ToyJob(str(name)) for name in names]


def run(
    job_list: Iterable[ToyJob], *, resources: Resources | None = None, **options: Any
) -> tuple[list[Any], list[str]]:
    """Run jobs in a new pool; return the failures and the texts of all messages."""
    events: list[ProgressEvent] = []
    pool = RayWorkerPool(resources or Resources())
    failures = pool.run_jobs(list(job_list), RUN_JOB, events.append, **options)
    pool.close()
    return failures, [event.text for event in events if isinstance(event, Message)]


def pool_with(*pending: PendingJob) -> RayWorkerPool:
    pool = RayWorkerPool(Resources())
    pool.pending = list(pending)
    pool.progress = lambda _: None
    return pool


def test_actors_are_reused_and_all_released_in_the_end(cluster: Callable[..., FakeRay]) -> None:
    fake = cluster()
    failures, messages = run(jobs(*range(5)))
    assert failures == []
    assert messages == ["finished"] * 5
    assert fake.count("run_job") == 5
    assert fake.alive == []


def test_member_updates_get_the_node_and_the_number_of_retries(cluster: Callable[..., FakeRay]) -> None:
    cluster(DIED, ("done", None, [MemberUpdate(3, epoch=1), Message("finished")]))
    events: list[ProgressEvent] = []
    pool = RayWorkerPool(Resources())
    assert pool.run_jobs(jobs("it"), RUN_JOB, events.append) == []
    pool.close()
    assert events[1:] == [MemberUpdate(3, epoch=1, node="node 0", retries=1), Message("finished")]


def test_many_actors_are_polled_less_often(cluster: Callable[..., FakeRay]) -> None:
    fake = cluster()
    run(jobs(*range(3)))
    assert {args for name, args in fake.calls if name == "poll_events"} == {(worker_groups.POLL_INTERVAL_S,)}
    fake = cluster(slots=200)
    run(jobs(*range(2)), world_size=lambda _: 100)
    longest = max(args for name, args in fake.calls if name == "poll_events")
    assert longest == (200 / worker_groups.MAX_POLLS_PER_S,)


def test_a_job_whose_process_died_is_retried_at_most_max_retries_times(cluster: Callable[..., FakeRay]) -> None:
    cluster(DIED, DIED, DONE)
    failures, messages = run(jobs("it"), resources=Resources(max_retries=2))
    assert failures == []
    assert messages[0] == "it: the process on node 0 died; retry 1 of 2 in 0.01 s"
    assert "retry 2 of 2" in messages[1]
    cluster(DIED, DIED, DIED)
    (failure,), _ = run(jobs("it"), resources=Resources(max_retries=2))
    assert "died 3 times; no retries are left" in str(failure.problem)
    assert not failure.died


def test_the_backoff_doubles_up_to_its_maximum(
    cluster: Callable[..., FakeRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(DIED, DIED, DIED, DONE)
    monkeypatch.setattr(ray_pool, "MAX_BACKOFF_S", 1.0)
    now = [0.0]
    monkeypatch.setattr(ray_pool.time, "monotonic", lambda: now.__setitem__(0, now[0] + 0.02) or now[0])
    monkeypatch.setattr(ray_pool.time, "sleep", lambda _: None)
    _, messages = run(jobs("it"))
    assert [text.split(" in ")[1] for text in messages[:3]] == ["0.5 s", "1 s", "1 s"]


def test_a_job_that_raises_is_not_retried(cluster: Callable[..., FakeRay]) -> None:
    fake = cluster(("failed", ("KeyError", "'x'"), []), ("failed", ("DivergedError", "loss is NaN"), []), DONE)
    failures, _ = run(jobs("a", "b", "c"))
    assert sorted(str(failure.problem) for failure in failures) == ["a failed: KeyError: 'x'", "loss is NaN"]
    assert fake.count("run_job") == 3


def test_if_one_process_of_a_group_dies_the_group_is_replaced(cluster: Callable[..., FakeRay]) -> None:
    broken = ("broken", ("RuntimeError", "[gloo] Connection closed by peer\nmore"), [])
    fake = cluster(DONE, DIED, broken, DONE, DONE, DONE)
    failures, messages = run(jobs("it"), world_size=lambda _: 2)
    assert failures == []
    assert [text for text in messages if "died" in text] == [
        "it: the process on node 0, node 1 died; retry 1 of 5 in 0.01 s",
        "it: the process on node 0, node 1 died; retry 2 of 5 in 0.01 s",
    ]
    assert fake.count("remove") == 3
    environments = [args[3] for name, args in fake.calls if name == "run_job"]
    assert [(env["RANK"], env["WORLD_SIZE"]) for env in environments] == [(0, 2), (1, 2)] * 3


def test_idle_actors_make_room_for_a_group(cluster: Callable[..., FakeRay]) -> None:
    fake = cluster()
    pool = RayWorkerPool(Resources())
    assert pool.run_jobs(jobs(1, 2), RUN_JOB, print) == []
    assert len(fake.alive) == 2  # kept for a while
    assert pool.run_jobs(jobs("group"), RUN_JOB, print, world_size=lambda _: 2) == []
    assert {group.world_size for group in pool.groups} == {2}
    pool.close()


def test_no_more_actors_are_started_than_the_cluster_has_room_for(cluster: Callable[..., FakeRay]) -> None:
    fake = cluster()
    groups = WorkerGroups(Resources(), max_processes=2)
    groups.scale([1] * 5)
    assert len(fake.alive) == 2
    groups.release_all()
    pool = RayWorkerPool(Resources(), max_processes=2)
    assert pool.run_jobs(jobs(*range(5)), RUN_JOB, print) == []
    assert fake.count("describe") == 2 + 2
    pool.groups.scale([3])  # releases the idle actors
    pool.groups.scale([3])
    assert [group.world_size for group in pool.groups] == [3]  # started anyway, so that the lack of room is reported
    pool.close()


def test_idle_actors_are_released_after_a_while(
    cluster: Callable[..., FakeRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = cluster(DONE, "until stopped")
    monkeypatch.setattr(worker_groups, "IDLE_TIMEOUT_S", -1.0)
    pool = pool_with(PendingJob(ToyJob("1"), 1), PendingJob(ToyJob("2"), 1))
    for _ in range(4):
        pool.step(None)
    assert len(fake.alive) == 1
    pool.close()


@pytest.mark.parametrize("dies", [False, True])
def test_a_signal_stops_all_jobs_with_a_checkpoint(
    cluster: Callable[..., FakeRay], dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = cluster("until stopped", "until stopped", slots=2)
    call, waits = fake.call, [0]

    def wait(refs: list[Ref], **options: Any) -> Any:
        waits[0] += 1
        if waits[0] == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return FakeRay.wait(fake, refs, **options)

    def die_when_stopped(actor: FakeActor, name: str, args: Any) -> Ref:
        ref = call(actor, name, args)
        if name == "stop" and dies:
            for _, running in fake.running:
                running.result = lambda: return_or_raise(DIED)
        return ref

    monkeypatch.setattr(fake, "wait", wait)
    monkeypatch.setattr(fake, "call", die_when_stopped)
    with pytest.raises(Interrupted, match="Run the same command again"):
        run(jobs(1, 2, 3))
    assert fake.alive == []
    assert fake.count("run_job") == 2  # the third job did not start


def test_a_stopped_group_is_released_when_all_its_processes_have_replied(cluster: Callable[..., FakeRay]) -> None:
    fake = cluster(STOPPED, "until stopped")  # the process that does not write ends at once
    pool = pool_with(PendingJob(ToyJob("it"), 2))
    for _ in range(6):
        pool.step(None)
    assert len(fake.alive) == 2
    assert [group.finished for group in pool.groups] == [1]
    ((_, ref),) = fake.running
    ref.result = lambda: STOPPED
    pool.step(None)
    assert fake.alive == pool.failures == []


def test_actors_that_die_at_startup_do_not_affect_running_jobs(cluster: Callable[..., FakeRay]) -> None:
    fake = cluster("until stopped", slots=1)
    pool = pool_with(PendingJob(ToyJob("it"), 1))
    for _ in range(3):
        pool.step(None)
    assert pool.groups.any_busy
    for _ in range(ray_pool.MAX_FAILED_STARTS + 2):  # a node that joined and left, with all actors that started there
        pool._handle_lost(WorkerGroup(1, []), RuntimeError("gone"))
    assert len(fake.alive) == 1
    pool.close()


def test_if_all_actors_die_at_startup_the_pool_gives_up(
    cluster: Callable[..., FakeRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = cluster()
    monkeypatch.setattr(fake, "call", lambda *_: Ref(lambda: return_or_raise(DIED)))
    with pytest.raises(RunError, match="10 processes on the cluster died at startup"):
        run(jobs("it"))


def test_a_cluster_without_room_is_reported(cluster: Callable[..., FakeRay], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(slots=0)
    monkeypatch.setattr(ray_pool, "NO_WORKER_WARN_S", 0.0)

    def fail(event: ProgressEvent) -> None:
        assert isinstance(event, Message)
        raise PlateauxError(event.text)

    with pytest.raises(PlateauxError, match="worker with 2 CPUs and 1 GPUs; the cluster has 4 CPUs and 1 GPUs"):
        RayWorkerPool(Resources(num_cpus=2, num_gpus=1)).run_jobs(jobs("it"), RUN_JOB, fail)


# --- Map and reduce


class FakeTask:
    """A function as a Ray task, which runs in this process when its result is requested."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def options(self, **_: Any) -> FakeTask:
        return self

    def remote(self, *args: Any) -> Ref:
        return Ref(lambda: self.fn(*(arg.result() if isinstance(arg, Ref) and arg.result else arg for arg in args)))


def test_map_reduce_continues_on_a_cluster_that_shrinks(
    cluster: Callable[..., FakeRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = cluster()
    monkeypatch.setattr(fake, "remote", FakeTask, raising=False)
    sizes = iter([3, *[1] * 20])
    monkeypatch.setattr(fake, "cluster_resources", lambda: {"CPU": float(next(sizes))})
    results = ray_cluster.map_reduce(
        Resources(), [[n] for n in range(9)], lambda _, job: job, lambda _, job, *results: results, None
    )
    assert list(results) == [(n, (n,)) for n in range(9)]


def test_the_scarcest_resource_limits_the_number_of_workers(cluster: Callable[..., FakeRay]) -> None:
    cluster()
    assert ray_cluster.max_workers(Resources(num_cpus=0.5)) == 8
    assert ray_cluster.max_workers(Resources(num_cpus=1, num_gpus=0.25)) == 4
    assert ray_cluster.max_workers(Resources(num_cpus=100)) == 1


# --- Connections


class FakeConnection:
    """Ray that only records how it was started."""

    def __init__(self) -> None:
        self.is_running, self.calls = False, list[Any]()

    def is_initialized(self) -> bool:
        return self.is_running

    def init(self, address: str, **options: Any) -> None:
        self.calls.append((address, options))

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> FakeConnection:
    fake = FakeConnection()
    use(fake, monkeypatch)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return fake


def test_connect_joins_the_named_cluster_or_starts_one(
    connection: FakeConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ray_cluster.connect("head:6379")
    assert ray_cluster.connect(None)
    monkeypatch.setenv("RAY_ADDRESS", "other:6379")
    assert ray_cluster.connect(None)
    assert [address for address, _ in connection.calls] == ["head:6379", "local", "other:6379"]
    assert connection.calls[1][1]["include_dashboard"] is False
    ray_cluster.disconnect()
    assert connection.calls[-1] == "shutdown"
    connection.is_running = True
    assert not ray_cluster.connect("head:6379")


def test_a_failed_connection_names_the_cluster(connection: FakeConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **_: Any) -> None:
        raise ConnectionError("no reply\nmore")

    monkeypatch.setattr(connection, "init", refuse)
    with pytest.raises(RunError, match=r"Cannot connect to the Ray cluster at head:1: no reply\. Check `ray status`"):
        ray_cluster.connect("head:1")
    with pytest.raises(RunError, match="Cannot start a Ray cluster here: no reply"):
        ray_cluster.connect(None)


def test_an_executor_connects_when_first_needed_and_disconnects_on_close(connection: FakeConnection) -> None:
    executor = ray_executor.RayExecutor("head:6379", 1, 0, 5, 4, 2)
    executor.close()
    assert connection.calls == []
    pool = executor._connected_pool()
    assert executor._connected_pool() is pool
    executor.close()
    assert connection.calls[-1] == "shutdown"


def test_the_number_of_processes_depends_on_the_job() -> None:
    executor = ray_executor.RayExecutor("head:6379", 1, 0, 5, 4, 2)
    assert executor.world_size(ToyJob("assign", (0, 1), is_single_process=True)) == 1
    assert executor.world_size(ToyJob("train", (0,))) == 2
    assert executor.world_size(ToyJob("train", (0, 1))) == 4


def test_only_a_cluster_that_was_started_here_never_grows(
    connection: FakeConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def max_processes(address: str | None) -> int | None:
        return ray_executor.RayExecutor(address, 2, 0, 5, 1, 1)._connected_pool().groups.max_processes

    assert max_processes(None) == 2
    assert max_processes("head:6379") is None
    monkeypatch.setenv("RAY_ADDRESS", "other:6379")
    assert max_processes(None) is None
    connection.is_running = True  # started by the user: it may be any cluster
    monkeypatch.delenv("RAY_ADDRESS")
    assert max_processes(None) is None


def test_inside_a_group_the_executor_is_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(ray_executor, "mesh", lambda **options: SimpleNamespace(**options))
    assert vars(ray_executor.ray(data_parallel=2, processes=4)) == {
        "data_parallel": 2,
        "sync_batchnorm": True,
        "is_remote": True,
    }
