"""What the requests of a worker may use together: bytes of memory, and threads that parse and decode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

from plateaux.core.errors import PlateauxError

THREADS = 2  # that parse and decode
Reserve = Callable[[int], None]
Found = TypeVar("Found")


class TooLargeError(PlateauxError):
    """A request exceeds a limit of the service."""


class BusyError(PlateauxError):
    """Other requests use what a request needs."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__("The service is busy. Retry later, or send fewer requests at once")
        self.retry_after_s = retry_after_s


class MemoryBudget:
    """Bytes that all requests of a worker may hold together. Threads may share it."""

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0
        self._lock = Lock()

    @contextmanager
    def request(self) -> Iterator[Reserve]:
        """Yield a function that reserves bytes until the end of the block."""
        held = 0

        def reserve(count: int) -> None:
            nonlocal held
            with self._lock:
                if held + count > self.size:
                    raise TooLargeError(
                        f"The request needs {held + count:,} bytes of memory. Expected: at most {self.size:,}; send "
                        "fewer rows, or binary tensors instead of JSON"
                    )
                if self.used + count > self.size:
                    raise BusyError
                self.used, held = self.used + count, held + count

        try:
            yield reserve
        finally:
            with self._lock:
                self.used -= held


class DecodingPool:
    """Threads outside the event loop. More calls than a limit are refused."""

    def __init__(self, limit: int) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="decode")
        self._limit, self._calls = limit, 0

    async def run(self, function: Callable[[], Found]) -> Found:
        """Return the result of a function. If the request ends before, it still waits for a call that has begun."""
        if self._calls >= self._limit:
            raise BusyError
        self._calls += 1
        job = self._threads.submit(function)
        waiting = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not job.cancel():  # its memory is in use until it ends
                await asyncio.wait([waiting])
            raise
        finally:
            self._calls -= 1

    def stop(self) -> None:
        """Release the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
