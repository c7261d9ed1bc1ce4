"""Jobs for tests of executors and pools."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ToyJob:
    """A job for one process, with a name."""

    name: str
    members: tuple[int, ...] = (0,)
    is_single_process: bool = False
    attempt: int = 0

    def with_attempt(self, attempt: int) -> ToyJob:
        return replace(self, attempt=attempt)

    def __str__(self) -> str:
        return self.name
