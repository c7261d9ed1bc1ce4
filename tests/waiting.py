"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(happened: Callable[[], Any], *, seconds: float = 400) -> None:
    """Look again and again until it has happened."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
