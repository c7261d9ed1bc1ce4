"""Jobs in this process one after the other, or in a pool of processes that do not communicate with each other."""

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
from plateaux.core.errors import Interrupted, PlateauxError
from plateaux.core.executor import Failure, JobFn
from plateaux.core.progress import Progress, ProgressEvent
from plateaux.distributed.stop_signal import StopFlag, graceful_shutdown
from plateaux.distributed.subprocesses import protected_children


def run_sequentially(
    jobs: Sequence[Any], run_job: JobFn, progress: Progress, *, device: str | None = None, processes: int = 1
) -> list[Failure]:
    """Execute one job after the other in this process; return those that failed."""
    failures: list[Failure] = []
    for job in jobs:
        try:
            run_job(job, progress, device=device, processes=processes)
        except Interrupted:
            raise
        except PlateauxError as error:
            failures.append(Failure(job, error))
    return failures


@dataclass(slots=True)
class _PoolWorker:
    """A slot of the pool: its device, its process, and its current job."""

    device: str | None
    process: Any = None
    connection: Connection | None = None
    job: Any = None


def run_pool(
    jobs: Sequence[Any], run_job: JobFn, progress: Progress, *, processes: int, devices: Sequence[str] = ()
) -> list[Failure]:
    """Execute jobs in `processes` processes, each of which takes the next job; return those that failed."""
    slots = [_PoolWorker(devices[i % len(devices)] if devices else None) for i in range(min(processes, len(jobs)))]
    waiting, failures = deque(jobs), list[Failure]()
    with _forward_signals(slots) as stop:
        try:
            while waiting or any(slot.job is not None for slot in slots):
                for slot in slots:
                    if slot.job is None and waiting and not stop.is_set():
                        _assign_job(slot, waiting.popleft(), run_job, len(slots))
                busy = [slot for slot in slots if slot.job is not None]
                if not busy:
                    break
                if stop.is_set():
                    _terminate(busy)  # again: a process that was still starting has missed the first signal
                for connection in wait([slot.connection for slot in busy if slot.connection is not None]):
                    slot = next(slot for slot in busy if slot.connection is connection)
                    _receive(slot, progress, failures, stop)
        finally:
            _shut_down(slots)
    if stop.is_set():
        raise Interrupted("Stopped. Run the same command again to resume")
    return failures


def _assign_job(slot: _PoolWorker, job: Any, run_job: JobFn, processes: int) -> None:
    if slot.process is None:
        context = multiprocessing.get_context("spawn")
        slot.connection, child_connection = context.Pipe()
        # Not a daemon: daemons cannot have children, and DataLoader workers are children.
        slot.process = context.Process(target=_run_worker, args=(child_connection, run_job, slot.device, processes))
        with protected_children():
            slot.process.start()
        child_connection.close()
    assert slot.connection is not None
    slot.job = job
    with suppress(OSError):  # a process that died meanwhile is detected by the next receive
        slot.connection.send(job)


def _receive(slot: _PoolWorker, progress: Progress, failures: list[Failure], stop: StopFlag) -> None:
    """Handle one message of a process: an event, or the end of its job."""
    assert slot.connection is not None
    try:
        kind, content = slot.connection.recv()
    except (EOFError, OSError):
        slot.process.join()
        error = PlateauxError(f"The process of {slot.job} died (exit code {slot.process.exitcode})")
        failures.append(Failure(slot.job, error, died=True))
        slot.process, slot.connection, slot.job = None, None, None
        return
    if kind == "event":
        progress(content)
        return
    if kind == "failed":
        error = rebuild_error(*content)
        if isinstance(error, Interrupted):
            stop.set()
        else:
            failures.append(Failure(slot.job, error))
    slot.job = None


def _run_worker(connection: Connection, run_job: JobFn, device: str | None, processes: int) -> None:
    """Execute jobs from the connection until it is closed or None arrives; the main function of a process."""
    # A spawned process spawns its children too, and DataLoader workers would import torch again in every epoch.
    multiprocessing.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes; the parent forwards it once

    def send_event(event: ProgressEvent) -> None:
        connection.send(("event", event))

    with suppress(EOFError, OSError):
        while (job := connection.recv()) is not None:
            connection.send(run_captured(partial(run_job, job, send_event, device=device, processes=processes)))


def run_captured(fn: Callable[[], Any]) -> tuple[str, Any]:
    """Call a function; return `("done", None)`, or `("failed", (name, message))` of the exception it raised."""
    try:
        fn()
        return "done", None
    except Exception as error:
        return "failed", (type(error).__name__, str(error))


def rebuild_error(name: str, message: str) -> PlateauxError:
    """Return the exception of a worker: one of `core.errors`, or a PlateauxError that names the original class."""
    error_class = vars(errors).get(name)
    if isinstance(error_class, type) and issubclass(error_class, PlateauxError):
        return error_class(message)
    return PlateauxError(f"{name}: {message}")


def _shut_down(slots: Sequence[_PoolWorker]) -> None:
    for slot in slots:
        if slot.process is None or slot.connection is None:
            continue
        if slot.job is not None:
            slot.process.terminate()
        with suppress(OSError):  # the process may have ended
            slot.connection.send(None)
        slot.process.join()


def _terminate(slots: Sequence[_PoolWorker]) -> None:
    for slot in slots:
        if slot.process is not None and slot.process.is_alive():
            slot.process.terminate()


@contextmanager
def _forward_signals(slots: Sequence[_PoolWorker]) -> Iterator[StopFlag]:
    """Forward Ctrl-C and SIGTERM to the processes, which stop with a checkpoint; a second Ctrl-C kills them."""
    with graceful_shutdown(
        first=lambda: _terminate([slot for slot in slots if slot.job is not None]),
        again=lambda: [slot.process.kill() for slot in slots if slot.process is not None],
    ) as stop:
        yield stop
