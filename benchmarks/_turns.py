"""Interleave two sides of a measurement in intervals of seconds; the processes of the other side are suspended.

What a machine shared with strangers does to one run of ten minutes it need not do to the next. In turns of seconds both
sides meet the same minutes, and their ratio is steady.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

TURN = 3.0  # seconds
PARTS = ("members", "driver", "services")  # whose work it is: those who train, who hands out, and Ray's own


class Side:
    """Work in a process of its own and in those it starts, which is given time and halted.

    It gets a line to say "news" whenever there is some, "done" when what is compared is over, and at last a dictionary.
    """

    def __init__(self, work: Callable[..., dict[str, float]], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_answered, args=(theirs, work, args))
        self.process.start()
        theirs.close()
        self.news: list[tuple[float, dict[str, float]]] = []  # the seconds and the work until then
        self.facts: dict[str, float] = {}
        self.done = self.over = False
        self.awake = 0.0
        self._used: dict[tuple[int, float], tuple[str, float]] = {}

    def work(self) -> dict[str, float]:
        """Return the CPU seconds of its processes by their part; what one has used is remembered beyond its end."""
        for each in self._processes():
            with suppress(psutil.Error):
                key = each.pid, each.create_time()
                known = self._used.get(key, ("", 0.0))[0]  # one that has trained is called idle at its end
                part = known if known == "members" else self._part(each)
                self._used[key] = part, sum(each.cpu_times()[:2])
        parts = dict.fromkeys(PARTS, 0.0)
        for part, seconds in self._used.values():
            parts[part] += seconds
        return parts

    def go(self, enough: Callable[[], object], seconds: float = float("inf")) -> None:
        """Give it time until there is enough, or so many seconds."""
        self._each(psutil.Process.resume)
        begun = time.perf_counter()
        while not enough() and not self.over and (left := begun + seconds - time.perf_counter()) > 0:
            if self.line.poll(min(left, 0.5)):
                self._hear(self.line.recv(), self.awake + time.perf_counter() - begun)
            else:
                self.work()
        self._each(psutil.Process.suspend)
        self.awake += time.perf_counter() - begun

    def taken(self) -> dict[str, float]:
        """Return the seconds and the work between its first and its last news, by parts too, and what came before."""
        (first, before), (last, after) = self.news[0], self.news[-1]
        parts = {part: after[part] - before[part] for part in PARTS}
        return {"start-up seconds": first, "seconds": last - first, "work": sum(parts.values()), **parts}

    def end(self) -> None:
        """Leave nothing behind."""
        if not self.over:
            self._each(psutil.Process.kill)
        self._each(psutil.Process.resume)
        self.process.join()

    def _hear(self, said: Any, now: float) -> None:
        if said == "news":
            self.news.append((now, self.work()))
        elif said == "done":
            self.done = True
        elif isinstance(said, dict):
            self.facts, self.over = said, True
        else:
            raise RuntimeError(said)

    def _part(self, process: psutil.Process) -> str:
        if process.pid == self.process.pid:
            return "driver"
        words = " ".join(process.cmdline())
        return "members" if "ray::RayWorker" in words or "spawn_main" in words else "services"

    def _processes(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            here = psutil.Process(self.process.pid)
            return [here, *here.children(recursive=True)]
        return []

    def _each(self, act: Callable[[psutil.Process], None]) -> None:
        for each in self._processes():
            with suppress(psutil.Error):
                act(each)


def in_turns(sides: Sequence[Callable[[], Side]], turn: float = TURN) -> list[Side]:
    """Start each side alone until its first news, let them take turns until all are done, and each end alone."""
    begun: list[Side] = []
    try:
        for start in sides:
            begun.append(side := start())
            side.go(lambda side=side: side.news)
        while any(not side.done for side in begun):
            for side in begun:
                side.go(lambda side=side: side.done, turn)
        for side in begun:
            side.go(lambda: False)
    finally:
        for side in begun:
            side.end()
    return begun


def _answered(line: Connection, work: Callable[..., dict[str, float]], args: Sequence[Any]) -> None:
    try:
        line.send(work(line.send, *args))
    except BaseException as problem:
        line.send(f"{type(problem).__name__}: {problem}")
        raise
