"""A process that trains on request, and can stop (SIGSTOP) at a call of the store.

    python -c "import stoppable; stoppable.serve()"

reads one request a line (JSON): the recipe, the run folder, whether to take over claims, and at which call to stop. It
prints a line when it stops, and one when it has ended: what it said, how many calls it made, and the first of a writer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import plateaux
from plateaux.storage import member_writer, run
from plateaux.storage.remote_fs import RemoteFS


class Trainer:
    """The process, as the test sees it."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import stoppable; stoppable.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )

    def train(self, recipe: str, out: str, *, take_over: bool = False, stop: int = 0) -> dict[str, Any]:
        """Train, and return how that ended, or that the process has stopped."""
        assert self.process.stdin is not None
        request = {"recipe": recipe, "out": out, "take_over": take_over, "stop": stop}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def resume(self) -> dict[str, Any]:
        """Continue the process that has stopped, and return how its training ended."""
        os.kill(self.process.pid, signal.SIGCONT)
        return self._read()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))


class Calls:
    """Counts the requests to a bucket, and the writes, renames, and deletions on a disk."""

    def __init__(self) -> None:
        self.count = self.stop = 0
        self.owner: object = os
        self.first_claim = 0  # the call with which the first writer of a member begins
        member_writer.MemberWriter.__init__ = self._noted(member_writer.MemberWriter.__init__)  # type: ignore[method-assign]
        for owner, name in ((RemoteFS, "_retry"), (os, "fsync"), (os, "replace"), (os, "unlink")):
            setattr(owner, name, self._counted(owner, getattr(owner, name)))

    def _noted(self, call: Any) -> Any:
        def noted(*args: Any) -> None:
            self.first_claim = self.first_claim or self.count + 1
            call(*args)

        return noted

    def _counted(self, owner: object, call: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.count += owner is self.owner
            if owner is self.owner and self.count == self.stop:
                print(json.dumps({"stopped": self.count}), flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            return call(*args, **options)

        return counted


def serve() -> None:
    """Train on request."""
    run.BEGIN_TIMEOUT_S = member_writer.LOCK_TIMEOUT_S = 0.05  # a process that was stopped holds its locks
    calls = Calls()
    for line in sys.stdin:
        request, words = json.loads(line), ""
        calls.count, calls.first_claim, calls.stop = 0, 0, request["stop"]
        calls.owner = RemoteFS if "://" in request["out"] else os
        try:
            if request["take_over"]:
                plateaux.open_run(request["out"]).release_claims()
            plateaux.train(plateaux.Recipe.parse(request["recipe"]), request["out"], progress=lambda _: None)
        except Exception as problem:
            words = f"{type(problem).__name__}: {problem}"
        print(json.dumps({"words": words, "calls": calls.count, "first_claim": calls.first_claim}), flush=True)
