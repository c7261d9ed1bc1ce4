"""Callbacks for progress and messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Tell = Callable[[Mapping[str, Any]], None]
"""Takes news of the work under way: plain values by name."""


Say = Callable[[str], None]


Seen = Callable[[int, int], None]


def nothing(*_: Any) -> None:
    """Say and show nothing."""
    return None
