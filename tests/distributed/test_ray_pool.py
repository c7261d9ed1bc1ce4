"""What a crew does about everything that can happen to its people, on a cluster that does what it is told to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from toy_jobs import ToyJob

from plateaux.core.errors import Interrupted, PlateauxError, RunError
from plateaux.core.executor import JobFn
from plateaux.core.progress import Message

pytest.importorskip("ray", reason='Ray is not installed: pip install "plateaux[ray]"')

from ray.exceptions import ActorDiedError

from plateaux.distributed import ray_pool
from plateaux.distributed.executors import ray as on_ray

DONE = ("done", None, [Message("well")])
DEAD = ActorDiedError()


class Ref:
    """An answer that is there at once, never, or once something has happened."""

    def __init__(self, answer: Callable[[], Any] | None, when: Callable[[], bool] = lambda: True) -> None:
        self.answer, self.when = answer, when


class Handle:
    """A hand whose methods answer what the cluster's script says."""

    def __init__(self, cluster: FakeRay, place: Any = None) -> None:
        self.cluster, self.place = cluster, place

    def __getattr__(self, name: str) -> Any:
        handle = self

        class Method:
            @staticmethod
            def remote(*args: Any) -> Ref:
                return handle.cluster.called(handle, name, args)

        return Method()


class FakeRay:
    """As much of Ray as a crew uses; `script` holds what the next jobs end with."""

    def __init__(self, *script: Any, places: int = 2) -> None:
        self.script, self.places = list(script), places
        self.alive: list[Handle] = []
        self.calls: list[tuple[str, Any]] = []
        self.waited: list[tuple[Handle, Any]] = []  # work that ends when it is asked to stop

    def put(self, thing: Any) -> Any:
        return thing

    def remote(self, _: type) -> Any:
        cluster = self

        class Made:
            @staticmethod
            def options(*, scheduling_strategy: Any = None, **_: Any) -> Any:
                return Made

            @staticmethod
            def remote() -> Handle:
                cluster.alive.append(Handle(cluster))
                return cluster.alive[-1]

        return Made

    def called(self, handle: Handle, name: str, args: Any) -> Ref:
        self.calls.append((name, args))
        if name == "describe":
            facts = {"pid": 1, "address": "127.0.0.1", "port": 9}
            return Ref(
                lambda: {"node": f"node {self.alive.index(handle)}", **facts},
                lambda: handle in self.alive[: self.places],
            )
        if name == "run_job":
            answer = self.script.pop(0) if self.script else DONE
            if answer == "until stopped":
                ref = Ref(None)
                self.waited.append((handle, ref))
                return ref
            return Ref(lambda: _given(answer))
        if name == "stop":
            for whose, ref in self.waited:
                if whose is handle:
                    ref.answer = lambda: ("failed", ("Interrupted", "with a checkpoint"), [])
        return Ref(lambda: []) if name == "poll_events" else Ref(None)

    def wait(self, refs: list[Ref], *, num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        there = [ref for ref in refs if ref.answer is not None and ref.when()]
        return there, [ref for ref in refs if ref not in there]

    def get(self, ref: Ref) -> Any:
        assert ref.answer is not None
        return ref.answer()

    def kill(self, handle: Handle) -> None:
        self.alive.remove(handle)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0, "GPU": 1.0}


def _given(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def echo(job: Any, progress: Any, *, device: str | None = None, processes: int = 1) -> None:
    """Never called: the script says what comes of it."""


WORK: JobFn = echo


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRay]:
    def make(*script: Any, **options: Any) -> FakeRay:
        made = FakeRay(*script, **options)
        monkeypatch.setattr(ray_pool, "ray", made)
        monkeypatch.setattr(ray_pool, "placement_group", lambda bundles, strategy: bundles)
        monkeypatch.setattr(ray_pool, "remove_placement_group", lambda group: made.calls.append(("removed", group)))
        return made

    monkeypatch.setattr(ray_pool, "MAX_BACKOFF_S", 0.01)
    return make


def carry_out(
    jobs: list[Any], *, needs: ray_pool.Resources | None = None, **options: Any
) -> tuple[list[Any], list[str]]:
    heard: list[str] = []

    def tell(event: Any) -> None:
        heard.append(event.text)

    people = ray_pool.RayWorkerPool(needs or ray_pool.Resources())
    failures = people.run_jobs([ToyJob(str(job)) for job in jobs], WORK, tell, **options)
    people.release_workers()
    return failures, heard


def test_hands_are_used_again_and_all_let_go_in_the_end(cluster: Callable[..., FakeRay]) -> None:
    made = cluster()
    failures, heard = carry_out(list(range(5)))
    assert failures == []
    assert heard == ["well"] * 5
    assert [name for name, _ in made.calls].count("run_job") == 5
    assert made.alive == []


def test_many_hands_are_each_heard_less_often(cluster: Callable[..., FakeRay]) -> None:
    made = cluster()
    carry_out(list(range(3)))
    assert {args for name, args in made.calls if name == "poll_events"} == {(ray_pool.BATCH_EVENTS_S,)}
    made = cluster(places=200)
    carry_out([f"job {number}" for number in range(2)], world_size=lambda _: 100)
    assert max(args for name, args in made.calls if name == "poll_events") == (200 / ray_pool.POLL_TIMEOUT_S,)


def test_a_job_whose_process_died_begins_again_at_most_so_often(cluster: Callable[..., FakeRay]) -> None:
    cluster(DEAD, DEAD, DONE)
    failures, heard = carry_out(["it"], needs=ray_pool.Resources(max_retries=2))
    assert failures == []
    assert "it: its process on node 0 died; begun again in 0.01 s (1 of 2 retries)" in heard[0]
    assert "(2 of 2 retries)" in heard[1]
    cluster(DEAD, DEAD, DEAD)
    (failure,), _ = carry_out(["it"], needs=ray_pool.Resources(max_retries=2))
    assert "for the 3. time; given up" in str(failure.problem)
    assert not failure.died


def test_waiting_grows(cluster: Callable[..., FakeRay], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(DEAD, DEAD, DEAD, DONE)
    monkeypatch.setattr(ray_pool, "MAX_BACKOFF_S", 1.0)
    now = [0.0]
    monkeypatch.setattr(ray_pool.time, "monotonic", lambda: now.__setitem__(0, now[0] + 0.02) or now[0])
    monkeypatch.setattr(ray_pool.time, "sleep", lambda _: None)
    _, heard = carry_out(["it"])
    assert [words.split(" in ")[1].split(" s ")[0] for words in heard[:3]] == ["0.5", "1", "1"]


def test_a_fault_of_its_own_is_not_tried_again(cluster: Callable[..., FakeRay]) -> None:
    made = cluster(("failed", ("KeyError", "'x'"), []), ("failed", ("DivergedError", "no number"), []), DONE)
    failures, _ = carry_out(["a", "b", "c"])
    assert sorted(str(each.problem) for each in failures) == ["a failed: KeyError: 'x'", "no number"]
    assert [name for name, _ in made.calls].count("run_job") == 3


def test_one_of_a_group_that_dies_takes_its_group_along(cluster: Callable[..., FakeRay]) -> None:
    torn = ("broken", ("RuntimeError", "[gloo] Connection closed by peer\nmore"), [])
    made = cluster(DONE, DEAD, torn, DONE, DONE, DONE)
    failures, heard = carry_out(["it"], world_size=lambda _: 2)
    assert failures == []
    assert [words for words in heard if "died" in words] == [
        "it: its process on node 0, node 1 died; begun again in 0.01 s (1 of 5 retries)",
        "it: its process on node 0, node 1 died; begun again in 0.01 s (2 of 5 retries)",
    ]
    assert [name for name, _ in made.calls].count("removed") == 3
    groups = [args[3] for name, args in made.calls if name == "run_job"]
    assert [(group["RANK"], group["WORLD_SIZE"]) for group in groups] == [(0, 2), (1, 2)] * 3


def test_jobs_of_one_process_make_room_for_a_group(cluster: Callable[..., FakeRay]) -> None:
    made = cluster()
    people = ray_pool.RayWorkerPool(ray_pool.Resources())
    assert people.run_jobs([ToyJob("1"), ToyJob("2")], WORK, print) == []
    assert len(made.alive) == 2  # they stay for a while
    assert people.run_jobs([ToyJob("group")], WORK, print, world_size=lambda _: 2) == []
    assert {slot.world for slot in people.groups} == {2}
    people.release_workers()


def test_nobody_is_asked_for_whom_there_will_never_be_room(cluster: Callable[..., FakeRay]) -> None:
    made = cluster()
    people = ray_pool.RayWorkerPool(ray_pool.Resources(), max_groups=2)
    people.pending = [ray_pool.PendingJob(ToyJob(str(number)), 1) for number in range(5)]
    people._request_workers()
    assert len(made.alive) == 2
    people.release_workers()
    assert people.run_jobs([ToyJob(str(n)) for n in range(5)], WORK, print) == []
    assert [name for name, _ in made.calls].count("describe") == 2 + 2
    people.pending = [ray_pool.PendingJob(ToyJob("too large"), 3)]
    people._request_workers()  # those who stayed leave
    people._request_workers()
    assert [slot.world for slot in people.groups] == [3]  # asked for all the same: that there is no room will be told
    people.release_workers()


def test_those_without_work_do_not_stay_for_ever(cluster: Callable[..., FakeRay], monkeypatch: Any) -> None:
    made = cluster(DONE, "until stopped")
    monkeypatch.setattr(ray_pool, "IDLE_TIMEOUT_S", -1.0)
    people = ray_pool.RayWorkerPool(ray_pool.Resources())
    people.log = lambda _: None
    people.pending = [ray_pool.PendingJob(ToyJob("1"), 1), ray_pool.PendingJob(ToyJob("2"), 1)]
    for _ in range(4):
        people._request_workers()
        people._assign_job(None)
        people._handle_events()
    assert len(made.alive) == 1
    people.release_workers()


@pytest.mark.parametrize("dying", [False, True])
def test_a_signal_lets_everybody_end_with_a_checkpoint(
    cluster: Callable[..., FakeRay], dying: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cluster("until stopped", "until stopped", places=2)
    called, rounds = made.called, [0]

    def wait(refs: list[Ref], **options: Any) -> Any:
        rounds[0] += 1
        if rounds[0] == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return FakeRay.wait(made, refs, **options)

    def dies(handle: Handle, name: str, args: Any) -> Ref:
        ref = called(handle, name, args)
        if name == "stop" and dying:
            for _, waits in made.waited:
                waits.answer = lambda: _given(DEAD)
        return ref

    monkeypatch.setattr(made, "wait", wait)
    monkeypatch.setattr(made, "called", dies)
    with pytest.raises(Interrupted, match="Run the same command again"):
        carry_out([1, 2, 3])
    assert made.alive == []
    assert [name for name, _ in made.calls].count("run_job") == 2  # the third never began


def test_a_group_that_stops_is_let_go_when_all_have_answered(cluster: Callable[..., FakeRay]) -> None:
    stopped = ("failed", ("Interrupted", "with a checkpoint"), [])
    made = cluster(stopped, "until stopped")  # the one that writes nothing is done at once
    people = ray_pool.RayWorkerPool(ray_pool.Resources(), pending=[ray_pool.PendingJob(ToyJob("it"), 2)])
    for _ in range(6):
        people._request_workers()
        people._assign_job(None)
        people._handle_events()
    assert len(made.alive) == 2
    assert people.groups[0].answers == 1
    ((_, ref),) = made.waited
    ref.answer = lambda: stopped
    people._handle_events()
    assert made.alive == people.failures == []


def test_a_cluster_that_shrinks_gets_no_more_work_for_a_while(
    cluster: Callable[..., FakeRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cluster()
    monkeypatch.setattr(made, "remote", lambda work: Tasks(work), raising=False)
    sizes = iter([3, *[1] * 20])
    monkeypatch.setattr(made, "cluster_resources", lambda: {"CPU": float(next(sizes))})
    found = ray_pool.RayWorkerPool(ray_pool.Resources()).map(
        [[n] for n in range(9)], lambda _, job: job, lambda _, job, *asked: asked, None
    )
    assert list(found) == [(n, (n,)) for n in range(9)]


class Tasks:
    """A function that Ray would carry out elsewhere, and here when it is asked for."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work

    def options(self, **_: Any) -> Tasks:
        return self

    def remote(self, *args: Any) -> Ref:
        return Ref(lambda: self.work(*(each.answer() if isinstance(each, Ref) else each for each in args)))


def test_hands_that_die_before_they_begin_do_not_end_the_work_of_others(cluster: Callable[..., FakeRay]) -> None:
    made = cluster("until stopped", places=1)
    people = ray_pool.RayWorkerPool(ray_pool.Resources(), pending=[ray_pool.PendingJob(ToyJob("it"), 1)])
    for _ in range(3):
        people._request_workers()
        people._assign_job(None)
        people._handle_events()
    assert people.groups[0].task is not None
    for _ in range(ray_pool.STARTS + 2):  # a machine that came and went, with all that were to begin there
        people._handle_lost(ray_pool.WorkerGroup(1, []), RuntimeError("gone"))
    assert len(made.alive) == 1
    people.release_workers()


def test_hands_that_die_before_they_begin_are_asked_for_only_so_often(
    cluster: Callable[..., FakeRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cluster()
    monkeypatch.setattr(made, "called", lambda *_: Ref(lambda: _given(DEAD)))
    with pytest.raises(RunError, match="10 processes on the cluster died before they began"):
        carry_out(["it"])


def test_who_finds_no_place_says_so(cluster: Callable[..., FakeRay], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(places=0)
    monkeypatch.setattr(ray_pool, "NO_PLACE", 0.0)

    def tell(event: Any) -> None:
        raise PlateauxError(event.text)

    with pytest.raises(PlateauxError, match="place with 2 CPUs and 1 GPUs; the cluster has 4 CPUs and 1 GPUs"):
        ray_pool.RayWorkerPool(ray_pool.Resources(num_cpus=2, num_gpus=1)).run_jobs([ToyJob("it")], WORK, tell)


def test_places_are_what_the_scarcest_resource_allows(cluster: Callable[..., FakeRay]) -> None:
    cluster()
    assert ray_pool.RayWorkerPool(ray_pool.Resources(num_cpus=0.5)).max_workers() == 8
    assert ray_pool.RayWorkerPool(ray_pool.Resources(num_cpus=1, num_gpus=0.25)).max_workers() == 4
    assert ray_pool.RayWorkerPool(ray_pool.Resources(num_cpus=100)).max_workers() == 1


# --- Joining a cluster


class Starting:
    """Ray that only notes how it was started."""

    def __init__(self, *, running: bool = False) -> None:
        self.running, self.started = running, list[Any]()

    def is_initialized(self) -> bool:
        return self.running

    def init(self, address: str, **options: Any) -> None:
        self.started.append((address, options))

    def shutdown(self) -> None:
        self.started.append("shutdown")


def test_a_cluster_is_joined_or_one_of_our_own_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    made = Starting()
    monkeypatch.setattr(ray_pool, "ray", made)
    assert ray_pool.connect("head:6379")
    assert ray_pool.connect(None)
    monkeypatch.setenv("RAY_ADDRESS", "other:6379")
    assert ray_pool.connect(None)
    assert [address for address, _ in made.started] == ["head:6379", "local", "other:6379"]
    assert made.started[1][1]["include_dashboard"] is False
    ray_pool.disconnect()
    assert made.started[-1] == "shutdown"
    made.running = True
    assert not ray_pool.connect("head:6379")


def test_a_cluster_that_cannot_be_joined_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **_: Any) -> None:
        raise ConnectionError("no answer\nmore")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    made = Starting()
    monkeypatch.setattr(made, "init", refuse)
    monkeypatch.setattr(ray_pool, "ray", made)
    with pytest.raises(RunError, match=r"Ray's cluster at head:1 cannot be joined: no answer\. Look"):
        ray_pool.connect("head:1")
    with pytest.raises(RunError, match="Ray cannot start a cluster here: no answer"):
        ray_pool.connect(None)


def test_an_executor_joins_when_it_is_first_needed_and_leaves_what_it_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Starting()
    monkeypatch.setattr(ray_pool, "ray", made)
    executor = on_ray.RayExecutor("head:6379", 1, 0, 5, 4, 2)
    executor.close()
    assert made.started == []
    people = executor._joined()
    assert executor._joined() is people
    executor.close()
    assert made.started[-1] == "shutdown"
    assert executor.world_size(ToyJob("assign", (0, 1), is_single_process=True)) == 1
    assert executor.world_size(ToyJob("train", (0,))) == 2
    assert executor.world_size(ToyJob("train", (0, 1))) == 4


def test_only_a_cluster_of_our_own_never_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Starting()
    monkeypatch.setattr(made, "cluster_resources", lambda: {"CPU": 4.0}, raising=False)
    monkeypatch.setattr(ray_pool, "ray", made)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert on_ray.RayExecutor(None, 2, 0, 5, 1, 1)._joined().max_groups == 2
    assert on_ray.RayExecutor("head:6379", 2, 0, 5, 1, 1)._joined().max_groups is None
    monkeypatch.setenv("RAY_ADDRESS", "other:6379")
    assert on_ray.RayExecutor(None, 2, 0, 5, 1, 1)._joined().max_groups is None
    made.running = True  # by somebody else: it may be any
    monkeypatch.delenv("RAY_ADDRESS")
    assert on_ray.RayExecutor(None, 2, 0, 5, 1, 1)._joined().max_groups is None


def test_inside_a_group_the_executor_is_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(on_ray, "mesh", lambda **options: SimpleNamespace(**options))
    assert vars(on_ray.ray(data_parallel=2, processes=4)) == {
        "data_parallel": 2,
        "sync_batchnorm": True,
        "is_remote": True,
    }
