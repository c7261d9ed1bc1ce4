"""The process pool: the same weights as sequential jobs, and failures of single processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import blobs, weight_files
from killable import BY_WORKERS, RECIPE

from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DivergedError, Interrupted
from plateaux.core.progress import MemberUpdate, Message, Progress, ProgressEvent
from plateaux.distributed.process_pool import run_pool, run_sequentially
from plateaux.distributed.stop_signal import graceful_shutdown
from plateaux.storage.run import Run
from plateaux.training.train import train

ALLOWED = Components(trust=("killable",))
SMALL = ("members=3", "model.hidden_sizes=[8]", "method.name=sam", "optimizer.momentum=0.9", "train.epochs=3")


def run_job(job: str, progress: Progress, *, device: str | None = None, processes: int = 1) -> None:
    """Do what the name of the job says, after a message with the job and the settings of the worker."""
    if job == "long":
        with graceful_shutdown() as stop:
            progress(Message(job))
            while not stop.is_set():
                time.sleep(0.01)
        raise Interrupted("Stopped at epoch 1")
    progress(Message(f"{job},{device},{processes},{multiprocessing.get_start_method()}"))
    if job == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "raise":
        raise RuntimeError("an unexpected error")
    if job == "diverge":
        raise DivergedError("Loss of member 7 became NaN or infinite")


def texts(events: Sequence[ProgressEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, Message)]


def test_a_job_that_raises_or_dies_does_not_affect_others() -> None:
    events: list[ProgressEvent] = []
    jobs = ["raise", "die", "a", "diverge", "b", "c"]
    failures = run_pool(jobs, run_job, events.append, processes=2, devices=["cpu", "cpu:0"])
    names, devices, processes, start_methods = zip(*(text.split(",") for text in texts(events)), strict=True)
    assert sorted(names) == sorted(jobs)
    assert set(processes) == {"2"}
    assert set(devices) == {"cpu", "cpu:0"}
    # DataLoader workers start as they do without a pool, without importing torch again.
    assert set(start_methods) == {multiprocessing.get_start_method()}
    by_job = {failure.job: failure for failure in failures}
    assert set(by_job) == {"raise", "die", "diverge"}
    assert [by_job[job].died for job in ("raise", "die", "diverge")] == [False, True, False]
    assert str(by_job["raise"].problem) == "RuntimeError: an unexpected error"
    assert isinstance(by_job["diverge"].problem, DivergedError)
    assert "exit code -9" in str(by_job["die"].problem)
    assert not workers()


def workers() -> list[Any]:
    """Return the processes of the pool; those of meshes of other tests are daemons."""
    return [child for child in multiprocessing.active_children() if not child.daemon]


def test_a_sequential_job_that_fails_does_not_stop_the_next() -> None:
    events: list[ProgressEvent] = []
    failures = run_sequentially(["diverge", "a"], run_job, events.append)
    assert [text.split(",")[0] for text in texts(events)] == ["diverge", "a"]
    assert [failure.job for failure in failures] == ["diverge"]


def test_a_signal_stops_the_worker_and_no_further_job_starts() -> None:
    events: list[ProgressEvent] = []

    def stop(event: ProgressEvent) -> None:
        events.append(event)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"^Stopped\. Run the same command again to resume$"):
        run_pool(["long", "a", "b"], run_job, stop, processes=1)
    assert texts(events) == ["long"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert not workers()


def test_a_signal_before_the_workers_have_started_stops_the_pool() -> None:
    def stop_soon() -> None:
        time.sleep(0.3)  # a worker takes seconds to import torch
        os.kill(os.getpid(), signal.SIGTERM)

    from threading import Thread

    thread = Thread(target=stop_soon)
    thread.start()
    with pytest.raises(Interrupted):
        run_pool(["a", "b"], run_job, lambda _: None, processes=2)
    thread.join()
    assert not workers()


def test_a_progress_callback_that_raises_leaves_no_process_behind() -> None:
    def fail(_: ProgressEvent) -> None:
        raise BrokenPipeError("the reader is gone")

    with pytest.raises(BrokenPipeError):
        run_pool(["long"], run_job, fail, processes=1)
    assert not workers()


def test_a_second_interrupt_ends_at_once() -> None:
    calls = []
    with graceful_shutdown(first=lambda: calls.append(1), again=lambda: calls.append(2)) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert calls == [1, 1, 2]


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup and the workers of a pool do
    try:
        with graceful_shutdown() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGINT, before)


def test_two_processes_train_the_same_weights_as_one_with_loader_workers(tmp_path: Path) -> None:
    recipe = Recipe.parse(RECIPE.format(data=BY_WORKERS, epochs=1))
    queue = train(recipe, tmp_path / "queue", **ALLOWED.keywords())
    pool = train(recipe.replaced(executor={"processes": 2}), tmp_path / "pool", **ALLOWED.keywords())
    assert weight_files(pool) == weight_files(queue)
    assert [pool.log(n) for n in range(3)] == [queue.log(n) for n in range(3)]


def test_a_killed_worker_is_replaced_and_weights_are_bit_identical(tmp_path: Path) -> None:
    recipe = blobs(*SMALL, "executor.processes=2", "train.epochs=10")
    messages: list[str] = []
    killed: list[int] = []

    def kill_one(event: ProgressEvent) -> None:
        messages.extend([event.text] if isinstance(event, Message) else [])
        if not killed and isinstance(event, MemberUpdate) and (event.completed_epoch or 0) >= 2:
            killed.append(workers()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    pool = train(recipe, tmp_path / "pool", progress=kill_one)
    assert killed
    assert any("died; planning the remaining jobs again" in line for line in messages)
    queue = train(recipe.replaced(executor={"processes": 1}), tmp_path / "queue")
    assert weight_files(pool) == weight_files(queue)
    assert not workers()


def test_a_stopped_pool_leaves_checkpoints(tmp_path: Path) -> None:
    recipe = blobs(*SMALL, "executor.processes=2", "train.epochs=3000", "members=2")

    def stop(event: ProgressEvent) -> None:
        if isinstance(event, MemberUpdate) and (event.completed_epoch or 0) >= 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(recipe, tmp_path, progress=stop)
    stopped = Run.open(tmp_path).all_progress()
    assert any(progress.checkpoints for progress in stopped)
    assert not any(progress.finished for progress in stopped)
    assert not workers()


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "from plateaux.distributed.process_pool import run_pool\n"
        "from tests.distributed.test_process_pool import run_forever\n"
        "if __name__ == '__main__':\n"
        "    run_pool([1], run_forever, lambda event: print(event.text, flush=True), processes=1)\n"
    )
    file = tmp_path / "parent.py"
    file.write_text(program)
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


def run_forever(job: int, progress: Progress, *, device: str | None = None, processes: int = 1) -> None:
    """Send the process id again and again."""
    while True:
        progress(Message(str(os.getpid())))
        time.sleep(0.1)
