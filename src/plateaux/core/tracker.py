"""The protocol of a tracker, which sends the numbers of a run to another program, and the names of built-in trackers.

    class MyTracker:
        def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None: ...
        def log(self, values: Mapping[str, float], step: int) -> None: ...
        def close(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None: ...

A recipe names trackers in `run.trackers`. Each has a thread of its own in the process that called `train`, in which one
object per member, and one for the ensemble, is created without arguments and called.

A class with `buffers = True` loses numbers if the process is killed before `close`. It then gets them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker object logs: a member of a run, or the ensemble."""

    name: str  # of the run folder
    member: int | None  # None: the ensemble
    group: str | None  # what the run belongs to: `run.group`, the name of the study
    folder: Path | None  # where files belong that are part of the run folder; None: it is on an object store
    id: str | None  # what `start` returned in an earlier process: continue that run; None: begin a new one
    parent: str | None  # of a member: what `start` returned for the ensemble


class Tracker(Protocol):
    """Logs one member, or the ensemble, to a program outside of Plateaux."""

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None:
        """Begin or continue a run; return an id by which a later process can continue it.

        An id has at most 64 letters, digits, `-`, and `_`. The keys of `config` are dotted: `optimizer.lr`.
        """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name, such as `train/loss`; `step` is the number of completed epochs. Each comes once."""

    def close(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Add the summary and copies of the files, and end the run.

        `summary["status"]` is `finished`, `stopped` (it can be continued), or `failed`. The summary of a member has its
        last numbers. Only the ensemble has files: they are deleted after the call.
        """


@dataclass(frozen=True, slots=True)
class BuiltInTracker:
    """Where the class of a built-in tracker is, and what it needs."""

    target: str  # module:class
    package: str  # also the name of the extra
    connects: bool  # to a server, so that a recipe alone is not enough to start it


BUILT_IN = {
    "wandb": BuiltInTracker("plateaux.integrations.wandb:WandbTracker", "wandb", connects=True),
    "mlflow": BuiltInTracker("plateaux.integrations.mlflow:MlflowTracker", "mlflow", connects=True),
    "tensorboard": BuiltInTracker(
        "plateaux.integrations.tensorboard:TensorBoardTracker", "tensorboard", connects=False
    ),
}
