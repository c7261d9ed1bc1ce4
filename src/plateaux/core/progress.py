"""Progress of long-running work: one callback for training, evaluation, loss landscapes, and studies.

A function that works for long takes `progress=`, a callable with one argument: a `Message`, a `WorkDone`, a
`MemberUpdate`, a `CheckpointWritten`, or a `SamplesPartitioned`. Events are plain frozen values, so they can be sent
from worker processes and actors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeAlias

logger = logging.getLogger("plateaux")


@dataclass(frozen=True, slots=True)
class Message:
    """A sentence for the log."""

    text: str


@dataclass(frozen=True, slots=True)
class WorkDone:
    """How much of the work is done, in units such as samples or forward passes."""

    done: float
    total: float


@dataclass(frozen=True, slots=True)
class MemberUpdate:
    """The training progress of one member. A field that is None has not changed since the last update."""

    member: int
    epochs: int | None = None  # in the whole training
    epoch: int | None = None  # epochs completed
    steps: int | None = None  # in one epoch
    step: int | None = None  # within the current epoch; None: the epoch is complete
    metrics: Mapping[str, float] = field(default_factory=dict)  # "loss", "train accuracy", "validation nll", ...
    samples_per_second: float | None = None
    seconds_left: float | None = None
    scored: float | None = None  # fraction of the samples that are scored for the data partition
    node: str | None = None  # on a cluster
    retries: int | None = None

    @property
    def completed_epoch(self) -> int | None:
        """The number of completed epochs if this update ends an epoch, else None."""
        return self.epoch if self.step is None and self.scored is None else None

    def merge(self, newer: MemberUpdate) -> MemberUpdate:
        """Return this update with all fields that a newer one of the same member sets; metrics are merged by name."""
        changed = {f.name: getattr(newer, f.name) for f in fields(newer) if getattr(newer, f.name) is not None}
        changed |= {"metrics": {**self.metrics, **newer.metrics}, "scored": newer.scored}
        if newer.epoch is not None:
            changed["step"] = newer.step
        return replace(self, **changed)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set, as JSON types."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """A checkpoint of a member is in the run folder."""

    member: int
    epoch: int  # epochs completed
    step: int  # steps completed of the epoch that follows


@dataclass(frozen=True, slots=True)
class SamplesPartitioned:
    """The training samples were assigned to the members by a data partition, after this epoch."""

    epoch: int


ProgressEvent: TypeAlias = Message | WorkDone | MemberUpdate | CheckpointWritten | SamplesPartitioned
Progress: TypeAlias = Callable[[ProgressEvent], None]


def log_messages(event: ProgressEvent) -> None:
    """Log messages under the logger `plateaux` and ignore all other events. This is the default of `progress=`."""
    if isinstance(event, Message):
        logger.info(event.text)
