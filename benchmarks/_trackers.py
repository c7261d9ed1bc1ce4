"""Trackers of the benchmark: one works, one raises at every call, and one sleeps at its first numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from plateaux.core.tracker import TrackedRun


class Works:
    """Does nothing."""

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None:
        return None

    def log(self, values: Mapping[str, float], step: int) -> None:
        pass

    def close(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        pass


class Raises(Works):
    """Raises."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise ConnectionError("there is no server")


class Sleeps(Works):
    """Sleeps 30 s once."""

    seconds: ClassVar[float] = 30.0

    def log(self, values: Mapping[str, float], step: int) -> None:
        time.sleep(Sleeps.seconds)
        Sleeps.seconds = 0.0


class SleepsBriefly(Sleeps):
    """Sleeps 1 s once, for the quick form."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        Sleeps.seconds = min(Sleeps.seconds, 1.0)
        super().log(values, step)
