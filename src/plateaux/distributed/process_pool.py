"""Jobs in turn, or by a pool of plain processes: no process group, so one that dies costs one job's time."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from plateaux.core import errors
from plateaux.core.callbacks import Tell
from plateaux.core.errors import Interrupted, PlateauxError
from plateaux.core.executor import Failure, JobFn
from plateaux.distributed.stop_signal import StopFlag, graceful_shutdown


def run_sequentially(
    jobs: Sequence[Any], run_job: JobFn, log: Tell, *, device: str | None = None, processes: int = 1
) -> list[Failure]:
    """Carry out one job after the other in this process; a job that fails does not stop the next."""
    failures: list[Failure] = []
    for job in jobs:
        try:
            run_job(job, log, device=device, processes=processes)
        except Interrupted:
            raise
        except PlateauxError as problem:
            failures.append(Failure(job, problem))
    return failures


@dataclass(slots=True)
class _PoolWorker:
    """A place in the pool: its device, and the worker and job that hold it now."""

    device: str | None
    worker: Any = None
    line: Connection | None = None
    job: Any = None


def run_pool(
    jobs: Sequence[Any], run_job: JobFn, log: Tell, *, processes: int, devices: Sequence[str] = ()
) -> list[Failure]:
    """Carry out jobs by `processes` workers that each take the next one; return what failed."""
    slots = [_PoolWorker(devices[i % len(devices)] if devices else None) for i in range(min(processes, len(jobs)))]
    waiting, failures = deque(jobs), list[Failure]()
    with _forward_signals(slots) as stopped:
        try:
            while waiting or any(slot.job is not None for slot in slots):
                for slot in slots:
                    if slot.job is None and waiting and not stopped.is_set():
                        _assign_job(slot, waiting.popleft(), run_job, len(slots))
                busy = [slot for slot in slots if slot.job is not None]
                if not busy:
                    break
                if stopped.is_set():
                    _stop(busy)  # again: one that was about to begin has not heard it
                for line in wait([slot.line for slot in busy if slot.line is not None]):
                    slot = next(slot for slot in busy if slot.line is line)
                    _receive(slot, log, failures, stopped)
        finally:
            _shut_down(slots)
    if stopped.is_set():
        raise Interrupted("The pool was stopped; every member wrote a checkpoint. Run the same command again to go on")
    return failures


def _assign_job(slot: _PoolWorker, job: Any, run_job: JobFn, processes: int) -> None:
    if slot.worker is None:
        context = multiprocessing.get_context("spawn")
        slot.line, theirs = context.Pipe()
        # Not a daemon: those may have no children, and a worker that reads by a loader's workers needs some.
        slot.worker = context.Process(target=_work, args=(theirs, run_job, slot.device, processes))
        slot.worker.start()
        theirs.close()
    assert slot.line is not None
    slot.job = job
    with suppress(OSError):  # one that died meanwhile is missed when it is listened to
        slot.line.send(job)


def _receive(slot: _PoolWorker, log: Tell, failures: list[Failure], stopped: StopFlag) -> None:
    """Take one message of a worker."""
    assert slot.line is not None
    try:
        kind, content = slot.line.recv()
    except (EOFError, OSError):
        slot.worker.join()
        problem = PlateauxError(f"The process of {slot.job} died (exit code {slot.worker.exitcode})")
        failures.append(Failure(slot.job, problem, died=True))
        slot.worker, slot.line, slot.job = None, None, None
        return
    if kind == "news":
        log(content)
        return
    if kind == "failed":
        problem = rebuild_error(*content)
        if isinstance(problem, Interrupted):
            stopped.set()
        else:
            failures.append(Failure(slot.job, problem))
    slot.job = None


def _work(line: Connection, run_job: JobFn, device: str | None, processes: int) -> None:
    """Take jobs until there are none, or nobody to work for: the whole life of a worker."""
    # A spawned process spawns in its turn: the loader's workers would import torch anew in every epoch.
    multiprocessing.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent passes it on, once

    def send(event: Any) -> None:
        line.send(("news", event))

    with suppress(EOFError, OSError):
        while (job := line.recv()) is not None:
            line.send(run_captured(partial(run_job, job, send, device=device, processes=processes)))


def run_captured(work: Callable[[], Any]) -> tuple[str, Any]:
    """Return `done`, or `failed` with the error's name and words: what a parent is told, whatever its child raised."""
    try:
        work()
        return "done", None
    except Exception as problem:
        return "failed", (type(problem).__name__, str(problem))


def rebuild_error(name: str, message: str) -> PlateauxError:
    """Return the error that a worker told of: one of ours, or one that names what somebody's code raised."""
    cause = getattr(errors, name, None)
    if isinstance(cause, type) and issubclass(cause, PlateauxError):
        return cause(message)
    return PlateauxError(f"{name}: {message}")


def _shut_down(slots: Sequence[_PoolWorker]) -> None:
    for slot in slots:
        if slot.worker is None or slot.line is None:
            continue
        if slot.job is not None:
            slot.worker.terminate()
        with suppress(OSError):  # it may be gone already
            slot.line.send(None)
        slot.worker.join()


def _stop(slots: Sequence[_PoolWorker]) -> None:
    for slot in slots:
        if slot.worker is not None and slot.worker.is_alive():
            slot.worker.terminate()


@contextmanager
def _forward_signals(slots: Sequence[_PoolWorker]) -> Iterator[StopFlag]:
    """Pass Ctrl-C and SIGTERM on to the workers, who end with a checkpoint; a second Ctrl-C ends them at once."""
    with graceful_shutdown(
        first=lambda: _stop([slot for slot in slots if slot.job is not None]),
        again=lambda: [slot.worker.kill() for slot in slots if slot.worker is not None],
    ) as stopped:
        yield stopped
