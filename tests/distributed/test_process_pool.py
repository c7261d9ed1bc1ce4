"""A pool of plain processes: the same weights as a queue, and what dies costs its own time only."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from killable import BY_WORKERS, RECIPE

from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DivergedError, Interrupted
from plateaux.core.progress import MemberUpdate, Message, ProgressEvent
from plateaux.distributed.process_pool import run_pool, run_sequentially
from plateaux.distributed.stop_signal import graceful_shutdown
from plateaux.storage.run import Run
from plateaux.training.train import train

ALLOWED = Components(trust=("killable",))
LITTLE = """
members = 3
[data]
name = "blobs"
samples = 48
test_samples = 12
batch_size = 16
[model]
name = "mlp"
hidden_sizes = [8]
[method]
name = "sam"
[optimizer]
lr = 0.1
momentum = 0.9
[train]
epochs = 3
[executor]
threads = 1
[run]
log_every = 1
"""


def weights(run: Run) -> list[bytes]:
    return [run.store.get(f"members/{n}/weights.safetensors") for n in range(run.recipe.members)]


def work(job: str, progress: Callable[[Any], None], *, device: str | None = None, processes: int = 1) -> None:
    """Do what the job says."""
    if job == "long":
        with graceful_shutdown() as asked:
            progress({"job": job})
            while not asked.is_set():
                time.sleep(0.01)
        raise Interrupted("Stopped at epoch 1")
    progress({"job": job, "device": device, "processes": processes, "start": multiprocessing.get_start_method()})
    if job == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "raise":
        raise RuntimeError("something unforeseen")
    if job == "diverge":
        raise DivergedError("Loss of member 7 became NaN or infinite")


def test_a_job_that_raises_or_dies_stops_no_other() -> None:
    news: list[Mapping[str, Any]] = []
    jobs = ["raise", "die", "a", "diverge", "b", "c"]
    failures = run_pool(jobs, work, news.append, processes=2, devices=["cpu", "cpu:0"])
    assert sorted(each["job"] for each in news) == sorted(jobs)
    assert {each["processes"] for each in news} == {2}
    assert {each["device"] for each in news} == {"cpu", "cpu:0"}
    # A loader's workers start as they do without a pool, and not by importing torch again.
    assert {each["start"] for each in news} == {multiprocessing.get_start_method()}
    found = {failure.job: failure for failure in failures}
    assert set(found) == {"raise", "die", "diverge"}
    assert [found[job].died for job in ("raise", "die", "diverge")] == [False, True, False]
    assert str(found["raise"].problem) == "RuntimeError: something unforeseen"
    assert isinstance(found["diverge"].problem, DivergedError)
    assert "exit code -9" in str(found["die"].problem)
    assert not workers()


def workers() -> list[Any]:
    """Return the pool's processes; those of other tests' meshes are daemons."""
    return [child for child in multiprocessing.active_children() if not child.daemon]


def test_in_turn_a_job_that_fails_does_not_stop_the_next() -> None:
    news: list[Mapping[str, Any]] = []
    failures = run_sequentially(["diverge", "a"], work, news.append)
    assert [each["job"] for each in news] == ["diverge", "a"]
    assert [failure.job for failure in failures] == ["diverge"]


def test_a_stop_reaches_the_worker_and_no_further_job_begins() -> None:
    news: list[Mapping[str, Any]] = []

    def hear(each: Mapping[str, Any]) -> None:
        news.append(each)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="Run the same command again to continue"):
        run_pool(["long", "a", "b"], work, hear, processes=1)
    assert [each["job"] for each in news] == ["long"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert not workers()


def test_a_stop_before_the_workers_have_begun_is_a_stop_too() -> None:
    def stop_soon() -> None:
        time.sleep(0.3)  # a worker takes seconds to import torch
        os.kill(os.getpid(), signal.SIGTERM)

    from threading import Thread

    thread = Thread(target=stop_soon)
    thread.start()
    with pytest.raises(Interrupted):
        run_pool(["a", "b"], work, lambda _: None, processes=2)
    thread.join()
    assert not workers()


def test_a_listener_that_fails_leaves_no_process_behind() -> None:
    def fail(_: Mapping[str, Any]) -> None:
        raise BrokenPipeError("nobody reads the news")

    with pytest.raises(BrokenPipeError):
        run_pool(["long"], work, fail, processes=1)
    assert not workers()


def test_a_second_interrupt_ends_at_once() -> None:
    calls = []
    with graceful_shutdown(first=lambda: calls.append(1), again=lambda: calls.append(2)) as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert calls == [1, 1, 2]


def test_who_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup and a pool's workers do
    try:
        with graceful_shutdown() as asked:
            os.kill(os.getpid(), signal.SIGINT)
            assert not asked.is_set()
    finally:
        signal.signal(signal.SIGINT, before)


def test_two_processes_train_what_one_trains_even_with_workers_that_read(tmp_path: Path) -> None:
    recipe = Recipe.parse(RECIPE.format(data=BY_WORKERS, epochs=1))
    queue = train(recipe, tmp_path / "queue", **ALLOWED.keywords())
    pool = train(recipe.replaced(executor={"processes": 2}), tmp_path / "pool", **ALLOWED.keywords())
    assert weights(pool) == weights(queue)
    assert [pool.log(n) for n in range(3)] == [queue.log(n) for n in range(3)]


def test_a_killed_worker_is_replaced_and_no_bit_changes(tmp_path: Path) -> None:
    recipe = Recipe.parse(LITTLE, ["executor.processes=2", "train.epochs=10"])
    said: list[str] = []
    killed: list[int] = []

    def kill_one(event: ProgressEvent) -> None:
        said.extend([event.text] if isinstance(event, Message) else [])
        if not killed and isinstance(event, MemberUpdate) and (event.completed_epoch or 0) >= 2:
            killed.append(workers()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    pool = train(recipe, tmp_path / "pool", progress=kill_one)
    assert killed
    assert any("died; planning the remaining jobs again" in line for line in said)
    queue = train(recipe.replaced(executor={"processes": 1}), tmp_path / "queue")
    assert weights(pool) == weights(queue)
    assert not workers()


def test_a_stopped_pool_leaves_checkpoints_and_goes_on_from_them(tmp_path: Path) -> None:
    recipe = Recipe.parse(LITTLE, ["executor.processes=2", "train.epochs=3000", "members=2"])

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
        "from tests.distributed.test_process_pool import endless\n"
        "if __name__ == '__main__':\n"
        "    run_pool([1], endless, lambda news: print(news['pid'], flush=True), processes=1)\n"
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


def endless(job: int, progress: Callable[[Any], None], *, device: str | None = None, processes: int = 1) -> None:
    """Tell and tell."""
    while True:
        progress({"pid": os.getpid()})
        time.sleep(0.1)
