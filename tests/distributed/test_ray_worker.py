"""The worker of a Ray cluster, without a cluster: events, errors of the process group, stop requests."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import Any

import pytest

from plateaux.core.errors import DivergedError
from plateaux.core.progress import Message
from plateaux.distributed import stop_signal
from plateaux.distributed.process_pool import rebuild_error, run_captured
from plateaux.distributed.ray_worker import RayWorker
from plateaux.distributed.stop_signal import graceful_shutdown


def test_a_worker_runs_a_job_and_returns_its_events() -> None:
    worker = RayWorker()

    def run_job(job: Any, progress: Any, *, device: str | None = None, processes: int = 1) -> None:
        progress(Message(f"{job} of {processes >= 1}"))

    assert worker.poll_events(0.0) == []
    assert worker.run_job(run_job, "job", 1.0) == ("done", None, [Message("job of True")])
    frozen = gc.get_freeze_count()
    assert frozen > 10_000  # imported objects are excluded when Ray collects garbage
    garbage: list[Any] = []
    garbage.append(garbage)
    worker.run_job(run_job, "job", 1.0)
    assert gc.get_freeze_count() <= frozen  # but objects of earlier jobs are collected


def test_events_are_batched_while_a_job_runs_and_returned_at_once_when_it_ends() -> None:
    worker, sent, may_end = RayWorker(), Event(), Event()

    def run_job(job: Any, progress: Any, **_: Any) -> None:
        progress(Message("one"))
        progress(Message("two"))
        sent.set()
        may_end.wait(20)
        progress(Message("three"))

    with ThreadPoolExecutor(2) as threads:
        result = threads.submit(worker.run_job, run_job, "job", 1.0)
        sent.wait()
        start_time = time.perf_counter()
        assert worker.poll_events(0.3) == [Message("one"), Message("two")]  # it waits although there are events
        assert time.perf_counter() - start_time >= 0.29
        events = threads.submit(worker.poll_events, 60.0)
        may_end.set()
        assert [*events.result(timeout=30), *result.result(timeout=30)[2]] == [Message("three")]


def test_a_failure_of_the_process_group_is_distinguished_from_one_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")

    def failing_job(error: str | Exception) -> Any:
        def run_job(job: Any, progress: Any, **_: Any) -> None:
            raise RuntimeError(error) if isinstance(error, str) else error

        return run_job

    worker = RayWorker()
    closed = failing_job("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert worker.run_job(closed, "job", 1.0)[0] == "failed"
    group = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1234}
    assert worker.run_job(closed, "job", 1.0, group)[0] == "broken"
    assert os.environ["RANK"] == "1"
    lost = type("DistNetworkError", (RuntimeError,), {})("Failed to recv, got 0 bytes")
    assert worker.run_job(failing_job(lost), "job", 1.0, group)[0] == "broken"
    own = worker.run_job(failing_job("sample 7"), "job", 1.0, group)
    assert own[:2] == ("failed", ("RuntimeError", "sample 7"))


def test_a_stop_request_reaches_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signal, "_process_wide", stop_signal.StopFlag())
    flags: list[bool] = []

    def work() -> None:
        with graceful_shutdown() as stop:
            flags.append(stop.is_set())
            RayWorker().stop()
            flags.append(stop.is_set())

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert flags == [False, True]


def test_errors_of_a_worker_are_rebuilt_by_name() -> None:
    assert run_captured(lambda: None) == ("done", None)
    assert isinstance(rebuild_error("DivergedError", "reason"), DivergedError)
    assert str(rebuild_error("KeyError", "reason")) == "KeyError: reason"
    assert str(rebuild_error("suggest", "reason")) == "suggest: reason"  # a function of that module is not an error
