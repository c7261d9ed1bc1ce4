"""TensorBoard: event files in `tensorboard/<member>` and `tensorboard/ensemble` of the run folder."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plateaux.core.optional import optional_import
from plateaux.core.process_info import host_id
from plateaux.core.tracker import TrackedRun


class TensorBoardTracker:
    """Writes scalars without importing torch."""

    def __init__(self) -> None:
        self._proto = optional_import("tensorboard.compat.proto.summary_pb2", extra="tensorboard")
        self._events = optional_import("tensorboard.compat.proto.event_pb2", extra="tensorboard")
        self._files = optional_import("tensorboard.summary.writer.event_file_writer", extra="tensorboard")
        self._writer: Any = None
        self._folder = Path()
        self._is_ensemble = False

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None:
        if run.folder is None:
            raise ValueError("TensorBoard appends to files, which an object store does not support")
        # Event files are named after the machine, and run folders are published. This process does nothing else.
        socket.gethostname = host_id
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
            self._writer = self._files.EventFileWriter(str(self._folder))
        scalars = [self._proto.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._proto.Summary(value=scalars)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()
