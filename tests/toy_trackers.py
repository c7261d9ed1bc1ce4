"""Trackers of tests. `Recorder` appends what it is called with to the file in the variable TOY_TRACKER."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plateaux.core.tracker import TrackedRun


class Recorder:
    """Records its calls as lines of JSON."""

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None:
        self.member = run.member
        own = "ensemble" if run.member is None else f"member-{run.member}"
        self.id = run.id or f"{own}-{os.getpid()}"
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
    """Raises at its first three numbers."""

    failed = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        if type(self).failed < 3:
            type(self).failed += 1
            raise ConnectionError("not yet")
        super().log(values, step)


class Sleeping(Recorder):
    """Starts a process, prints to the terminal, and hangs at the first numbers."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        child = subprocess.Popen(["sleep", "600"])
        print("printed")
        self.record(child=child.pid)
        time.sleep(600)


class Exiting(Recorder):
    """Ends its process."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        os._exit(7)


class WrongId(Recorder):
    """Returns an id that no file should have."""

    def start(self, run: TrackedRun, config: Mapping[str, Any]) -> str | None:
        self.id, self.member = "", run.member
        return "../outside"
