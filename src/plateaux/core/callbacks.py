"""Callbacks for progress and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Say = Callable[[str], None]


Seen = Callable[[int, int], None]


def nothing(*_: Any) -> None:
    """Say and show nothing."""
    return None
