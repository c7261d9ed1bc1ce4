"""A Python process that handles messages in the background. Sending to it never waits, whatever it does.

Messages and replies are lines of JSON, never pickles, and every message has one reply. At most `limit` messages may be
without a reply; more are refused. The process ends when its input ends, so it outlives a killed parent only by the time
that it takes to finish.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from plateaux.distributed.subprocesses import start_python

CHUNK = 1 << 16


class BackgroundProcess:
    """Calls `main()` of a module in a new process, which reads messages from its standard input."""

    def __init__(self, module: str, *, limit: int) -> None:
        self._process = start_python(module)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)
        self._limit, self._waiting = limit, 0
        self._unsent, self._unread = bytearray(), b""
        self._replies: list[dict[str, Any]] = []
        self.has_ended = False  # it reads and writes nothing more
        _running.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_full(self) -> bool:
        """Whether a message would be refused now."""
        self._exchange()
        return self.has_ended or self._waiting >= self._limit

    def send(self, message: Mapping[str, Any], *, force: bool = False) -> bool:
        """Send a message; return False if it was refused. With `force`, the limit does not apply."""
        if self.has_ended or (self.is_full and not force):
            return False
        self._waiting += 1
        self._unsent += json.dumps(message).encode() + b"\n"
        self._exchange()
        return True

    def replies(self) -> list[dict[str, Any]]:
        """Return the replies since the last call."""
        self._exchange()
        replies, self._replies = self._replies, []
        return replies

    def close(self, end: float) -> bool:
        """End the input, and wait until the process ends; at the time `end` of `time.monotonic`, kill it.

        Returns whether it ended by itself.
        """
        try:
            while not self.has_ended and (left := end - time.monotonic()) > 0:
                self._exchange()
                if not self._unsent and not self._input.closed:
                    self._input.close()
                self._wait(min(left, 1.0))
                self._exchange()
            while self._process.poll() is None and time.monotonic() < end:  # it has closed its output
                time.sleep(0.01)
        finally:
            is_alive = self._process.poll() is None
            with suppress(ProcessLookupError, PermissionError):  # also what it has started: it leads a process group
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self.close_pipes()
        return not is_alive

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def close_pipes(self) -> None:
        """Close this end of the pipes."""
        self.has_ended = True
        _running.discard(self)
        for pipe in (self._input, self._output):
            with suppress(OSError):
                pipe.close()

    def _wait(self, seconds: float) -> None:
        """Wait until there is something to read, or room for what is unsent."""
        poll = select.poll()  # takes file descriptors of any number, unlike select.select
        poll.register(self._output, select.POLLIN)
        if self._unsent:
            poll.register(self._input, select.POLLOUT)
        poll.poll(1000 * seconds)

    def _exchange(self) -> None:
        """Write and read as much as possible without waiting."""
        with suppress(BlockingIOError):
            while self._unsent and not self.has_ended:
                try:
                    del self._unsent[: os.write(self._input.fileno(), self._unsent[:CHUNK])]
                except BrokenPipeError:
                    self._unsent.clear()
        with suppress(BlockingIOError):
            while not self.has_ended:
                content = os.read(self._output.fileno(), CHUNK)
                self.has_ended = not content
                *lines, self._unread = (self._unread + content).split(b"\n")
                self._waiting -= len(lines)
                self._replies += map(json.loads, lines)


def close_all(processes: Sequence[BackgroundProcess], seconds: float) -> list[BackgroundProcess]:
    """Close processes, which share the time, and return those that had to be killed."""
    end = time.monotonic() + seconds
    return [process for process in processes if not process.close(end)]


_running: WeakSet[BackgroundProcess] = WeakSet()


def _close_inherited_pipes() -> None:
    """Close a forked child's copies of the pipes: loader workers outlive a killed parent by seconds."""
    for process in list(_running):
        process.close_pipes()


os.register_at_fork(after_in_child=_close_inherited_pipes)
