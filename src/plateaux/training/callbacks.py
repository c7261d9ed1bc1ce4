"""Callbacks of training: Python code of the caller that runs after epochs, checkpoints, and data partitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plateaux.core.errors import RecipeError, RunError, first_line
from plateaux.core.progress import CheckpointWritten, MemberUpdate, ProgressEvent, SamplesPartitioned
from plateaux.storage.run import Run, partition_summary_path
from plateaux.storage.run_info import StoredPartition


class Callback:
    """The base class of callbacks: override the methods that you need.

    They are called in the process that called `train`, also if members train in other processes; on a mesh, in the
    process that writes the files of the member. After an interruption, the epochs since the last checkpoint are trained
    again, and reported again. An exception stops training.
    """

    def on_epoch_end(self, run: Run, member: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Run after `epoch` epochs of a member, with its metrics by name, such as `train loss`."""

    def on_checkpoint(self, run: Run, member: int, epoch: int, step: int) -> None:
        """Run after a checkpoint of a member was written, which has `epoch` epochs and `step` more steps."""

    def on_partition(self, run: Run, epoch: int, partition: StoredPartition) -> None:
        """Run after the samples were assigned to the members by a data partition at `epoch`."""


class CallbackFailure(Exception):
    """An exception of a callback. It is not a PlateauxError, so that no executor continues with other jobs."""

    def __init__(self, problem: RunError) -> None:
        super().__init__(str(problem))
        self.problem = problem


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise RecipeError if an object is not a callback."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            is_class = isinstance(callback, type)
            found = f"the class {callback.__name__}" if is_class else f"a {type(callback).__name__}"
            raise RecipeError(
                f"callbacks= contains {found}. Expected: objects of classes that inherit from plateaux.Callback"
            )


class CallbackList:
    """Calls callbacks for the progress events of a run."""

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        self.run, self.callbacks = run, callbacks

    def handle(self, event: ProgressEvent) -> None:
        """Call the method that belongs to an event, if there is one."""
        if isinstance(event, MemberUpdate) and (epoch := event.completed_epoch) is not None:
            self._call("on_epoch_end", event.member, epoch, dict(event.metrics))
        elif isinstance(event, CheckpointWritten):
            self._call("on_checkpoint", event.member, event.epoch, event.step)
        elif isinstance(event, SamplesPartitioned) and self.callbacks:
            summary = self.run.partition_summary(partition_summary_path(event.epoch))
            self._call("on_partition", event.epoch, summary)

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            try:
                getattr(callback, name)(self.run, *arguments)
            except Exception as error:
                raise CallbackFailure(
                    RunError(
                        f"Training was stopped because the callback {type(callback).__qualname__}.{name} raised "
                        f"{type(error).__name__}: {first_line(error)}. Fix the callback and train again to resume from "
                        "the last checkpoint"
                    )
                ) from error
