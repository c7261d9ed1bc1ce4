"""The number of processes that the tests of this process started, or used."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import wraps
from multiprocessing.process import BaseProcess

started = 0


def count() -> None:
    """Count a process, also one that an earlier test started and this one uses."""
    global started
    started += 1


def _counted(start: Callable[..., None]) -> Callable[..., None]:
    @wraps(start)
    def counted(*args: object, **kwargs: object) -> None:
        count()
        start(*args, **kwargs)

    return counted


subprocess.Popen.__init__ = _counted(subprocess.Popen.__init__)  # type: ignore[method-assign]
BaseProcess.start = _counted(BaseProcess.start)  # type: ignore[method-assign]
