"""Jobs, and the state of a run that they are planned from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Position = tuple[int, int]  # completed epochs, completed steps of the next one


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """A meeting as the run folder shows it."""

    epoch: int  # completed epochs at which members meet
    scored: frozenset[int] = frozenset()  # members whose scores are there
    assigned: int | None = None  # for how many members it was decided
    without: frozenset[int] = frozenset()  # those of them that were given up, and have no part in the run any more


@dataclass(frozen=True, slots=True)
class Job:
    """A span of work for one member or group: small data that any process can carry out, harmless if done twice."""

    members: tuple[int, ...]
    start: Position
    stop: int  # epochs completed at its end
    kind: Literal["train", "assign"] = "train"
    attempt: int = 0  # how often it was begun before

    @property
    def is_single_process(self) -> bool:
        """Whether one process executes the job, whatever the size of the executor."""
        return self.kind == "assign"

    def with_attempt(self, attempt: int) -> Job:
        """Return the same job as its given attempt; 0 is the first one."""
        return replace(self, attempt=attempt)

    def __str__(self) -> str:
        who = ("member " if len(self.members) == 1 else "members ") + ", ".join(map(str, self.members))
        if self.kind == "assign":
            return f"assign samples for {who} at epoch {self.stop}"
        if self.start == (self.stop, 0):
            return f"score by {who} at epoch {self.stop}"
        at = f"epoch {self.start[0]}" + (f", step {self.start[1]}" if self.start[1] else "")
        return f"train {who} from {at} to epoch {self.stop}"
