"""Jobs, and the state of a run from which they are planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Position = tuple[int, int]  # completed epochs, completed steps of the next epoch


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """The status of one data partition, as stored in the run folder."""

    epoch: int  # completed epochs at which the samples are partitioned
    scored: frozenset[int] = frozenset()  # members whose scores are stored
    assigned: int | None = None  # number of members for which samples were assigned; None: not yet
    without: frozenset[int] = frozenset()  # members that had failed by then and are excluded from the run


@dataclass(frozen=True, slots=True)
class Job:
    """A part of the training of one member or group: picklable, and idempotent, so it may run twice."""

    members: tuple[int, ...]
    start: Position
    stop: int  # epochs completed at its end
    kind: Literal["train", "assign"] = "train"
    attempt: int = 0  # number of earlier attempts

    @property
    def is_single_process(self) -> bool:
        """Whether one process executes the job, whatever the size of the executor."""
        return self.kind == "assign"

    def with_attempt(self, attempt: int) -> Job:
        """Return the same job as its given attempt; 0 is the first one."""
        return replace(self, attempt=attempt)

    def __str__(self) -> str:
        members = ("member " if len(self.members) == 1 else "members ") + ", ".join(map(str, self.members))
        if self.kind == "assign":
            return f"assign samples for {members} at epoch {self.stop}"
        if self.start == (self.stop, 0):
            return f"score samples for {members} at epoch {self.stop}"
        start = f"epoch {self.start[0]}" + (f", step {self.start[1]}" if self.start[1] else "")
        return f"train {members} from {start} to epoch {self.stop}"
