"""TensorBoard: event files in `tensorboard/<member>` and `tensorboard/ensemble` of the run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plateaux.core.imports import optional_import
from plateaux.core.tracker import TrackedRun


class TensorBoardTracker:
    """Writes scalars without importing torch."""

    def __init__(self) -> None:
        self._proto = optional_import("tensorboard.compat.proto.summary_pb2", extra="tensorboard")
        self._events = optional_import("tensorboard.compat.proto.event_pb2", extra="tensorboard")
        self._files = optional_import("tensorboard.summary.writer.record_writer", extra="tensorboard")
        self._gfile = optional_import("tensorboard.compat.tensorflow_stub.io.gfile", extra="tensorboard")
        self._writer: Any = None
        self._folder = Path()
        self._is_ensemble = False

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None:
        if run.folder is None:
            raise ValueError("TensorBoard appends to files, which an object store does not support")
        self._folder, self._is_ensemble = run.folder, run.member is None
        return None  # the files of an earlier process are in the same folder

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._write(values, step)

    def close(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        if self._is_ensemble:
            numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
            self._write({f"summary/{name}": value for name, value in numbers.items()}, int(numbers.get("epoch", 0)))
        if self._writer is not None:
            self._writer.close()

    def _write(self, values: Mapping[str, float], step: int) -> None:
        if not values:
            return
        if self._writer is None:  # at the first number: no empty files
            # Not EventFileWriter: it names its file after the machine, and run folders are published.
            self._gfile.makedirs(str(self._folder))
            name = self._folder / f"events.out.tfevents.{time.time_ns()}"
            self._writer = self._files.RecordWriter(self._gfile.GFile(str(name), "wb"))
            self._add(file_version="brain.Event:2")
        scalars = [self._proto.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._proto.Summary(value=scalars)
        self._add(step=step, summary=summary)
        self._writer.flush()  # numbers that are recorded as sent survive a kill

    def _add(self, **content: Any) -> None:
        self._writer.write(self._events.Event(wall_time=time.time(), **content).SerializeToString())
