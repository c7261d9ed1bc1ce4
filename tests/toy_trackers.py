"""Trackers of tests. `Recorder` appends what it is called with to the file in the variable TOY_TRACKER."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, ClassVar
from uuid import uuid4

from plateaux.core.tracker import TrackedRun


class Recorder:
    """Records its calls as lines of JSON."""

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None:
        self.member = run.member
        self.id = run.id or uuid4().hex
        self.record(start=run.id, parent=run.parent, group=run.group, name=run.name, config=dict(config))
        return self.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.record(step=step, values=dict(values))

    def close(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self.record(summary=dict(summary), files={file.name: file.read_text() for file in files})

    def record(self, **content: Any) -> None:
        with open(os.environ["TOY_TRACKER"], "a") as file:
            file.write(json.dumps({"id": self.id, "pid": os.getpid(), "member": self.member, **content}) + "\n")


class Raising(Recorder):
    """Raises whenever it is given numbers."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise ConnectionError("the server is not there\nsecond line")


class Unready(Recorder):
    """Raises when it is started first, and at its first two calls with numbers."""

    failed = 0

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None:
        self.fail(1)
        return super().start(run, config)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.fail(3)
        super().log(values, step)

    def fail(self, times: int) -> None:
        if type(self).failed < times:
            type(self).failed += 1
            raise ConnectionError("not yet")


class Hanging(Recorder):
    """Waits with its numbers until the test goes on."""

    may_go_on: ClassVar[Event] = Event()

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.record(hangs=step)
        self.may_go_on.wait()
        super().log(values, step)


class Exiting(Recorder):
    """Ends its thread, as a program would end itself."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise SystemExit(7)


class WrongId(Recorder):
    """Returns an id that no file should have."""

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None:
        self.id, self.member = "", run.member
        return "../outside"
