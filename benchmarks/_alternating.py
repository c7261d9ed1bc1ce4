"""Alternate sides of a comparison in intervals of seconds; meanwhile, the processes of the other sides are suspended.

On a shared machine, two consecutive runs of ten minutes meet different conditions. In intervals of seconds, all sides
meet the same conditions, and their ratio is stable.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil
from _common import Budget

INTERVAL = 3.0  # seconds
ROLES = ("members", "driver", "services")  # processes that train, the one that dispatches jobs, and Ray's own


class AlternatingSide:
    """Work in a separate process and its children, which can be resumed and suspended.

    The work receives a function with which it sends "progress" after each progress event, "done" when the part that is
    compared ends, and finally a dictionary of facts.
    """

    def __init__(self, work: Callable[..., dict[str, float]], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child_pipe = context.Pipe()
        self.process = context.Process(target=_run_work, args=(child_pipe, work, args))
        self.process.start()
        child_pipe.close()
        self.progress: list[tuple[float, dict[str, float]]] = []  # active seconds and CPU seconds at each event
        self.facts: dict[str, float] = {}
        self.done = self.exited = False
        self.active = 0.0
        self._used: dict[tuple[int, float], tuple[str, float]] = {}

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of all processes by role, including those of processes that have exited."""
        for process in self._processes():
            with suppress(psutil.Error):
                key = process.pid, process.create_time()
                known = self._used.get(key, ("", 0.0))[0]  # Ray renames a worker that has finished training to "idle"
                role = known if known == "members" else self._role(process)
                self._used[key] = role, sum(process.cpu_times()[:2])
        totals = dict.fromkeys(ROLES, 0.0)
        for role, used in self._used.values():
            totals[role] += used
        return totals

    def resume(self, until: Callable[[], object], budget: Budget, seconds: float = float("inf")) -> None:
        """Let it run until a condition holds, for at most the given seconds; raise OutOfTime after the budget."""
        self._for_each(psutil.Process.resume)
        begin = time.perf_counter()
        try:
            while not until() and not self.exited and (left := begin + seconds - time.perf_counter()) > 0:
                if self.pipe.poll(min(left, budget.require(), 0.5)):
                    self._receive(self.pipe.recv(), self.active + time.perf_counter() - begin)
                else:
                    self.cpu_seconds()
        finally:
            self._for_each(psutil.Process.suspend)
            self.active += time.perf_counter() - begin

    def measured(self) -> dict[str, float]:
        """Return active seconds and CPU seconds between the first and the last progress event, and the start-up."""
        (first, before), (last, after) = self.progress[0], self.progress[-1]
        used = {role: after[role] - before[role] for role in ROLES}
        return {"start-up seconds": first, "seconds": last - first, "work": sum(used.values()), **used}

    def close(self) -> None:
        """End all processes of this side."""
        if not self.exited:
            self._for_each(psutil.Process.kill)
        self._for_each(psutil.Process.resume)
        self.process.join()

    def _receive(self, message: Any, now: float) -> None:
        if message == "progress":
            self.progress.append((now, self.cpu_seconds()))
        elif message == "done":
            self.done = True
        elif isinstance(message, dict):
            self.facts, self.exited = message, True
        else:
            raise RuntimeError(message)

    def _role(self, process: psutil.Process) -> str:
        if process.pid == self.process.pid:
            return "driver"
        command = " ".join(process.cmdline())
        return "members" if "ray::RayWorker" in command or "spawn_main" in command else "services"

    def _processes(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def _for_each(self, act: Callable[[psutil.Process], None]) -> None:
        for process in self._processes():
            with suppress(psutil.Error):
                act(process)


def alternate(
    starts: Sequence[Callable[[], AlternatingSide]], budget: Budget, interval: float = INTERVAL
) -> list[AlternatingSide]:
    """Start each side alone up to its first progress event, alternate until all are done, and let each exit alone."""
    sides: list[AlternatingSide] = []
    try:
        for start in starts:
            sides.append(side := start())
            side.resume(lambda side=side: side.progress, budget)
        while any(not side.done for side in sides):
            for side in sides:
                side.resume(lambda side=side: side.done, budget, interval)
        for side in sides:
            side.resume(lambda: False, budget)
    finally:
        for side in sides:
            side.close()
    return sides


def _run_work(pipe: Connection, work: Callable[..., dict[str, float]], args: Sequence[Any]) -> None:
    try:
        pipe.send(work(pipe.send, *args))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise
