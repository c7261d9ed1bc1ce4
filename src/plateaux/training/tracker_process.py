"""The process of one tracker: it calls the tracker with the messages of the process that trains.

trackers/<tracker>/<member>.json      the id by which the tracker continues the run, and the last epoch that it has
trackers/<tracker>/ensemble.json      the same for the ensemble

A call that fails is repeated with the next message, in order, so that nothing is lost in a tracker that works again.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, Annotated, Any

from pydantic import Field

from plateaux.core.bounded import Count
from plateaux.core.tracker import TrackedRun, Tracker
from plateaux.storage.atomic import write_atomic
from plateaux.storage.backends import open_store
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.local_store import LocalStore
from plateaux.storage.safe_files import open_folder

ENSEMBLE = "ensemble"
LOCK_WAIT_S = 60.0
PARENT_WAIT_S = 60.0  # for the process that starts the ensemble, if that is another one
TrackerId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


@dataclass(frozen=True, slots=True)
class StoredTracker:
    """What is stored about one member, or the ensemble, in one tracker."""

    id: TrackerId | None = None
    step: Count = 0


@dataclass(slots=True)
class TrackedMember:
    """A tracker object, or what it will be created with, and the numbers that it does not have yet."""

    number: int | None
    config: Mapping[str, Any]
    stored: StoredTracker
    tracker: Tracker | None = None
    pending: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)  # in the order of their epochs


class TrackerHost:
    """Creates the objects of one tracker, and passes messages on to them."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        self.root, self.name, self.group = opening["root"], opening["name"], opening["group"]
        self.target, self.slug = opening["target"], opening["slug"]
        self.store = open_store(self.root)
        self.tracked: dict[str, TrackedMember] = {}
        self.waiting: dict[str, list[Mapping[str, Any]]] = {}  # messages that no member has, because adding it failed
        self.locks = ExitStack()

    def handle(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Handle a message; return the reply."""
        try:
            if "close" in message:
                return self.close(**message["close"])
            self.waiting.setdefault(message["of"], []).append(message)
            self._update(self._member(message["of"]))
        except (Exception, SystemExit) as error:  # libraries raise anything
            return {"error": _describe(error)}
        return {}

    def close(self, status: str, summaries: Mapping[str, Any], files: list[str]) -> dict[str, Any]:
        """End all members, then the ensemble with the files; return the first error and how many numbers are lost."""
        reply: dict[str, Any] = {}
        names = sorted({*self.tracked, *self.waiting}, key=lambda name: (name == ENSEMBLE, name))
        with TemporaryDirectory() as folder:
            for name in names:
                summary = {**summaries.get(name, {}), "status": status}
                try:
                    each = self._member(name)
                    self._update(each)
                    assert each.tracker is not None
                    each.tracker.close(summary, self._copies(files, Path(folder)) if name == ENSEMBLE else [])
                except (Exception, SystemExit) as error:
                    reply.setdefault("error", _describe(error))
        lost = sum(step > each.stored.step for each in self.tracked.values() for step, _ in each.pending)
        lost += sum("step" in message for messages in self.waiting.values() for message in messages)
        self.locks.close()
        return {**reply, "lost": lost} if lost else reply

    def _member(self, name: str) -> TrackedMember:
        """Return a member with the numbers of the messages that waited for it; the first has its configuration."""
        messages = self.waiting.get(name, [])
        if name not in self.tracked:
            wait = LOCK_WAIT_S if len(messages) == 1 else 0.0  # once is enough: other members wait, too
            self.tracked[name] = self._add(name, messages[0]["config"], wait)
        each = self.tracked[name]
        each.pending += [(message["step"], message["values"]) for message in messages if "step" in message]
        self.waiting.pop(name, None)
        return each

    def _add(self, name: str, config: Mapping[str, Any], wait: float) -> TrackedMember:
        """Lock what is stored, because the process of a run that was killed may still be about to end, and read it."""
        with ExitStack() as stack:  # without the member, the lock is released, because it is added again
            stack.enter_context(self.store.lock(self._state_name(name).removesuffix(".json"), timeout=wait))
            member = TrackedMember(None if name == ENSEMBLE else int(name), config, self._stored(name))
            self.locks.enter_context(stack.pop_all())
        return member

    def _stored(self, name: str) -> StoredTracker:
        file = self._state_name(name)
        if not self.store.has(file):
            return StoredTracker()
        advice = "delete it; the tracker then begins a new run"
        return read_shape(StoredTracker, self.store.get_json(file), self.store.root / file, advice)

    def _update(self, each: TrackedMember) -> None:
        """Start the tracker if that is still to be done, and log what is pending."""
        if each.tracker is None:
            module, _, attribute = self.target.partition(":")
            tracker: Tracker = getattr(importlib.import_module(module), attribute)()
            run_id = tracker.start(self._tracked_run(each), each.config)
            self._save(each, run_id, each.stored.step if run_id == each.stored.id else 0)  # it begins a new run
            each.tracker = tracker
        while each.pending:
            step, values = each.pending[0]
            if step > each.stored.step:
                each.tracker.log(values, step)
                self._save(each, each.stored.id, step)
            each.pending.pop(0)

    def _tracked_run(self, each: TrackedMember) -> TrackedRun:
        part = ENSEMBLE if each.number is None else str(each.number)
        parent = None if each.number is None else self._parent()
        return TrackedRun(self.name, each.number, self.group, self._folder(part), each.stored.id, parent)

    def _parent(self) -> str | None:
        """Return the id of the ensemble; on a mesh, another process starts it."""
        file, end = self._state_name(ENSEMBLE), time.monotonic() + PARENT_WAIT_S
        while not self.store.has(file):
            if ENSEMBLE in self.tracked or time.monotonic() > end:  # it cannot be started
                return None
            time.sleep(0.1)
        return self._stored(ENSEMBLE).id

    def _folder(self, part: str) -> Path | None:
        """Return the folder for the files of a tracker, after a check that no symbolic link leads out of the run."""
        if not isinstance(self.store, LocalStore):
            return None
        parts = (self.slug, part)
        for length in (1, 2):
            with suppress(FileNotFoundError), open_folder(self.store.root, parts[:length]):
                pass
        return self.store.root.joinpath(*parts)

    def _save(self, each: TrackedMember, run_id: str | None, step: int) -> None:
        name = ENSEMBLE if each.number is None else str(each.number)
        stored = {"id": run_id, "step": step}
        each.stored = read_shape(StoredTracker, stored, f"what {self.target}.start returned", "return such an id")
        self.store.put_json(self._state_name(name), asdict(each.stored))

    def _state_name(self, name: str) -> str:
        return f"trackers/{self.slug}/{name}.json"

    def _copies(self, files: list[str], folder: Path) -> list[Path]:
        """Copy files of the run folder, which may be remote or contain symbolic links, and files of the caller."""
        copies = []
        for file in files:
            path = folder / Path(file).name
            write_atomic(path, Path(file).read_bytes() if os.path.isabs(file) else self.store.get(file))
            copies.append(path)
        return copies


def main() -> None:
    """Handle messages from the standard input until it ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job; the one that trains says what to do
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # libraries may ask and print
        os.dup2(null, stream)
    opening = json.loads(requests.readline() or "null")
    if opening is None:
        return
    messages: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_read, args=(requests, messages, opening["grace"]), daemon=True).start()
    host = TrackerHost(opening)
    os.write(replies, b"{}\n")
    while (message := messages.get()) is not None:
        reply = host.handle(message)
        with suppress(BrokenPipeError):
            os.write(replies, json.dumps(reply).encode() + b"\n")
        if "close" in message:
            return
    host.close("stopped", {}, [])  # the process that trains was killed


def _read(requests: IO[bytes], messages: SimpleQueue[Any], grace: float) -> None:
    """Read messages. When there are no more, end this process and its children after the seconds of grace."""
    for line in requests:
        message = json.loads(line)
        grace = message.get("grace", grace)
        messages.put(message)
    messages.put(None)
    time.sleep(grace)
    os.killpg(0, signal.SIGKILL)


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
