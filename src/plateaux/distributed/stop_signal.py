"""Stop cleanly on SIGINT and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any


class StopFlag:
    """Whether a stop was requested. Unlike threading.Event, it can be set in a signal handler without a deadlock."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True


_process_wide = StopFlag()  # for other threads than the main one, which receive no signals


def stop_worker_threads() -> None:
    """Request a stop of the work in other threads of this process, as a signal does for the main thread."""
    _process_wide.set()


@contextmanager
def graceful_shutdown(
    *, first: Callable[[], Any] = lambda: None, again: Callable[[], Any] = lambda: None
) -> Iterator[StopFlag]:
    """Set a flag on Ctrl-C and SIGTERM, which the work checks between steps; a second Ctrl-C interrupts at once.

    `first` and `again` are called by the first signal and by the second Ctrl-C. Ignored signals stay ignored.
    """
    stop = StopFlag()

    def handle(number: int, _: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            again()
            raise KeyboardInterrupt
        stop.set()
        first()

    if current_thread() is not main_thread():
        yield _process_wide
        return
    signals = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, handle) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
