"""Jobs in turn, or by a pool of plain processes: no process group, so one that dies costs one job's time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from plateaux import errors
from plateaux.errors import PlateauxError, Stopped
from plateaux.exchange import CarryOut, Failure, Tell


def run_in_turn(
    jobs: Sequence[Any], carry_out: CarryOut, tell: Tell, *, device: str | None = None, processes: int = 1
) -> list[Failure]:
    """Carry out one job after the other in this process; a job that fails does not stop the next."""
    failures: list[Failure] = []
    for job in jobs:
        try:
            carry_out(job, tell, device=device, processes=processes)
        except Stopped:
            raise
        except PlateauxError as problem:
            failures.append(Failure(job, problem))
    return failures


@dataclass(slots=True)
class _Slot:
    """A place in the pool: its device, and the worker and job that hold it now."""

    device: str | None
    worker: Any = None
    line: Connection | None = None
    job: Any = None


def run_pool(
    jobs: Sequence[Any], carry_out: CarryOut, tell: Tell, *, processes: int, devices: Sequence[str] = ()
) -> list[Failure]:
    """Carry out jobs by `processes` workers that each take the next one; return what failed."""
    slots = [_Slot(devices[i % len(devices)] if devices else None) for i in range(min(processes, len(jobs)))]
    waiting, failures, stopped = deque(jobs), list[Failure](), False
    with _passed_on(slots):
        try:
            while waiting or any(slot.job is not None for slot in slots):
                for slot in slots:
                    if slot.job is None and waiting and not stopped:
                        _hand_over(slot, waiting.popleft(), carry_out, len(slots))
                busy = [slot for slot in slots if slot.job is not None]
                if not busy:
                    break
                for line in wait([slot.line for slot in busy if slot.line is not None]):
                    slot = next(slot for slot in busy if slot.line is line)
                    stopped |= _listen(slot, tell, failures)
        finally:
            _dismiss(slots)
    if stopped:
        raise Stopped("The pool was stopped; every member wrote a checkpoint. Run the same command again to go on")
    return failures


def _hand_over(slot: _Slot, job: Any, carry_out: CarryOut, processes: int) -> None:
    if slot.worker is None:
        context = multiprocessing.get_context("spawn")
        slot.line, theirs = context.Pipe()
        slot.worker = context.Process(target=_work, args=(theirs, carry_out, slot.device, processes), daemon=True)
        slot.worker.start()
        theirs.close()
    assert slot.line is not None
    slot.job = job
    slot.line.send(job)


def _listen(slot: _Slot, tell: Tell, failures: list[Failure]) -> bool:
    """Take one message of a worker; return whether it was told to stop."""
    assert slot.line is not None
    try:
        kind, content = slot.line.recv()
    except (EOFError, ConnectionResetError):
        slot.worker.join()
        problem = PlateauxError(f"The process of {slot.job} died (exit code {slot.worker.exitcode})")
        failures.append(Failure(slot.job, problem, died=True))
        slot.worker, slot.line, slot.job = None, None, None
        return False
    if kind == "news":
        tell(content)
        return False
    if kind == "failed":
        name, message = content
        cause = getattr(errors, name, None)
        problem = cause(message) if cause is not None else PlateauxError(f"{name}: {message}")
        if not isinstance(problem, Stopped):
            failures.append(Failure(slot.job, problem))
        slot.job = None
        return isinstance(problem, Stopped)
    slot.job = None
    return False


def _work(line: Connection, carry_out: CarryOut, device: str | None, processes: int) -> None:
    """Take jobs until there are none: the whole life of a worker."""
    while (job := line.recv()) is not None:
        try:
            carry_out(job, lambda news: line.send(("news", dict(news))), device=device, processes=processes)
            line.send(("done", None))
        except Exception as problem:  # whatever it is, the others go on, and the parent tells
            line.send(("failed", (type(problem).__name__, str(problem))))


def _dismiss(slots: Sequence[_Slot]) -> None:
    for slot in slots:
        if slot.worker is None or slot.line is None:
            continue
        if slot.job is None:
            slot.line.send(None)
        else:
            slot.worker.terminate()
        slot.worker.join()


@contextmanager
def _passed_on(slots: Sequence[_Slot]) -> Iterator[None]:
    """Pass SIGTERM and SIGINT on to the workers while the pool is at work: each ends with a checkpoint."""

    def pass_on(number: int, _: Any) -> None:
        for slot in slots:
            if slot.worker is not None and slot.worker.is_alive():
                os.kill(slot.worker.pid, signal.SIGTERM)

    old = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
