"""Stop cleanly on SIGINT and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any


class StopFlag:
    """Says whether somebody asked to stop; a signal handler may set it at any moment, which would lock up an Event."""

    def __init__(self) -> None:
        self._up = False

    def is_set(self) -> bool:
        return self._up

    def set(self) -> None:
        self._up = True


_process_wide = StopFlag()  # for work in other threads than the main one, which no signal reaches


def stop_worker_threads() -> None:
    """Ask the work in this process's other threads to stop, as a signal asks the main one."""
    _process_wide.set()


@contextmanager
def graceful_shutdown(
    *, first: Callable[[], Any] = lambda: None, again: Callable[[], Any] = lambda: None
) -> Iterator[StopFlag]:
    """Turn Ctrl-C and SIGTERM into a sign that the work looks at between two steps; a second Ctrl-C ends at once.

    `first` and `again` are called at the moment of the first signal and of the second Ctrl-C.
    """
    asked = StopFlag()

    def raise_sign(number: int, _: Any) -> None:
        if asked.is_set() and number == signal.SIGINT:
            again()
            raise KeyboardInterrupt
        asked.set()
        first()

    if current_thread() is not main_thread():
        yield _process_wide
        return
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    old = {number: signal.signal(number, raise_sign) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
