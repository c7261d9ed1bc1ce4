"""Job records: one JSON file for every attempt at a job on a cluster, so that a run can be monitored from anywhere.

jobs/<members>-<kind>-<stop>-<id>.json    node, start time, progress, log, and outcome

A record is rewritten when the job starts, every few seconds, and when it ends. A record that still says "running" but
is no longer rewritten belongs to a job that was killed.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import AfterValidator

from plateaux.core.errors import Interrupted, StorageError
from plateaux.core.formatting import hide_folders
from plateaux.core.process_info import node_id
from plateaux.core.progress import MemberUpdate, Message, Progress, ProgressEvent
from plateaux.core.ranges import Finite, StoredInt
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.run import Run
from plateaux.training.jobs import Job, Position

WRITE_INTERVAL_S = 5.0
LOST_AFTER_S = 60.0  # without a write, a running job counts as lost
MAX_LOG_LINES = 200

Outcome = Literal["running", "done", "stopped", "failed", "lost"]


def _check_counts(update: MemberUpdate) -> MemberUpdate:
    counts = (update.member, update.epochs, update.epoch, update.steps, update.step, update.retries)
    if any(count is not None and not 0 <= count < 1 << 53 for count in counts):
        raise ValueError("the numbers of epochs and steps are not valid")
    return update


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One attempt at a job, as stored in the run folder."""

    job: str
    kind: str
    members: tuple[StoredInt, ...]
    attempt: StoredInt
    start: Position
    stop: StoredInt
    node: str
    pid: int
    started: Finite  # Unix time, as are the two below
    last_seen: Finite
    ended: Finite | None = None
    outcome: Outcome = "running"
    problem: str = ""
    log: tuple[str, ...] = ()
    progress: Mapping[int, Annotated[MemberUpdate, AfterValidator(_check_counts)]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON types, without fields that are not set."""
        plain = asdict(replace(self, progress={}))
        progress = {str(number): update.to_dict() for number, update in self.progress.items()}
        return {name: value for name, value in plain.items() if value is not None} | {"progress": progress}

    @classmethod
    def from_dict(cls, stored: Any, file: object = "the job record") -> JobRecord:
        """Return the record that `to_dict` stored."""
        return read_shape(cls, stored, file, "delete it; job records only show progress")

    def latest(self, member: int) -> MemberUpdate:
        """Return the progress of one member, with the node and the number of retries."""
        return replace(self.progress[member], node=self.node, retries=self.attempt)

    def summary(self, member: int) -> dict[str, Any]:
        """Return where one member of the job runs, the outcome, and its progress, as JSON types."""
        names = ("node", "attempt", "started", "last_seen", "outcome")
        progress = self.progress[member].to_dict() if member in self.progress else {}
        return {name: getattr(self, name) for name in names} | progress


class JobRecorder:
    """Writes the record of a job while it runs, and forwards its progress events."""

    def __init__(self, run: Run, job: Job, progress: Progress, *, enabled: bool) -> None:
        self._run, self._progress, self._enabled = run, progress, enabled
        members = "_".join(map(str, job.members[:8])) + ("_and_more" if len(job.members) > 8 else "")
        self.name = f"jobs/{members}-{job.kind}-{job.stop}-{uuid4().hex[:12]}.json"
        now = time.time()
        self.record = JobRecord(
            str(job), job.kind, job.members, job.attempt, job.start, job.stop, node_id(), os.getpid(), now, now
        )
        self._last_write = 0.0

    def set_start(self, position: Position) -> None:
        """Record where the members actually start."""
        self.record = replace(self.record, start=position)
        self._write()

    def progress(self, event: ProgressEvent) -> None:
        """Forward a progress event, and store messages and the progress of members."""
        self._progress(event)
        record = self.record
        if isinstance(event, Message):
            self.record = replace(record, log=(*record.log, self._public(event.text))[-MAX_LOG_LINES:])
        elif isinstance(event, MemberUpdate):
            known = record.progress.get(event.member)
            update = event if known is None else known.merge(event)
            self.record = replace(record, progress={**record.progress, event.member: update})
        if time.monotonic() - self._last_write > WRITE_INTERVAL_S:
            self._write()

    def finish(self, outcome: Outcome, problem: str = "") -> None:
        """Record how the job ended."""
        self.record = replace(self.record, outcome=outcome, ended=time.time(), problem=self._public(problem))
        self._write()

    def _public(self, text: str) -> str:
        """Return a text without the folders of this machine; tracebacks and messages contain some."""
        return hide_folders(text, str(self._run.store.root))

    def _write(self) -> None:
        if self._enabled:
            self._last_write = time.monotonic()
            self.record = replace(self.record, last_seen=time.time())
            with suppress(StorageError):  # a job must not fail because its record cannot be written
                self._run.store.put_json(self.name, self.record.to_dict())


@contextmanager
def record_job(run: Run, job: Job, progress: Progress, *, enabled: bool) -> Iterator[JobRecorder]:
    """Yield the recorder of one attempt at a job, and record the outcome; without `enabled`, nothing is written."""
    recorder = JobRecorder(run, job, progress, enabled=enabled)
    try:
        yield recorder
    except Interrupted as error:
        recorder.finish("stopped", str(error))
        raise
    except Exception:
        recorder.finish("failed", traceback.format_exc())
        raise
    recorder.finish("done")


def load_records(run: Run) -> list[JobRecord]:
    """Return the job records of a run, sorted by start time; a job that was killed has the outcome "lost"."""
    stored = {name: run.store.get_json(name) for name in run.store.names("jobs")}
    records = [JobRecord.from_dict(tree, run.store.root / name) for name, tree in stored.items()]
    return [_mark_lost(record) for record in sorted(records, key=lambda record: record.started)]


def latest_by_member(run: Run) -> dict[int, JobRecord]:
    """Return the newest training record of every member."""
    return {number: record for record in load_records(run) if record.kind == "train" for number in record.members}


def _mark_lost(record: JobRecord) -> JobRecord:
    is_lost = record.outcome == "running" and time.time() - record.last_seen > LOST_AFTER_S
    return replace(record, outcome="lost") if is_lost else record
