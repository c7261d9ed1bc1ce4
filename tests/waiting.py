"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(find: Callable[[], Found | None], *, seconds: float = 400) -> Found:
    """Call `find` again and again until it returns a true value, and return this value."""
    end = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found
