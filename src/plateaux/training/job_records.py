"""Records of jobs: one small object for every attempt at a job, so that a run can be watched from anywhere.

jobs/<members>-<kind>-<stop>-<mark>.json    where, since when, how far, what was said, and how it ended

An object is written whole, when the job begins, every few seconds, and when it ends; one that ends no more was killed.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

from plateaux.core.callbacks import Tell
from plateaux.core.errors import Interrupted, StorageError
from plateaux.core.runtime import node_name
from plateaux.storage.run import Run
from plateaux.training.jobs import Job, Position

WRITE_EVERY_S = 5.0  # seconds between two writes
LOST_AFTER_S = 60.0  # seconds after which a job that says nothing counts as gone
MAX_LOG_LINES = 200  # of what was said


class JobRecord:
    """Writes down what a job tells, and passes it on."""

    def __init__(self, run: Run, job: Job, tell: Tell, *, wanted: bool) -> None:
        self._run, self._tell, self._wanted = run, tell, wanted
        who = "_".join(map(str, job.members[:8])) + ("_and_more" if len(job.members) > 8 else "")
        self.name = f"jobs/{who}-{job.kind}-{job.stop}-{uuid4().hex[:12]}.json"
        self._facts: dict[str, Any] = {
            "job": str(job), "kind": job.kind, "members": list(job.members), "attempt": job.attempt, "stop": job.stop,
            "start": list(job.start), "node": node_name(), "pid": os.getpid(), "begun": time.time(),
            "outcome": "running",
        }  # fmt: skip
        self._news: dict[str, dict[str, Any]] = {}
        self._said: list[str] = []
        self._written = 0.0

    def begins(self, place: Position) -> None:
        """Note where the members really begin."""
        self._facts["start"] = list(place)
        self._write()

    def tell(self, news: Mapping[str, Any]) -> None:
        """Take news, and pass them on."""
        self._tell(news)
        if "say" in news:
            self._said = [*self._said, str(news["say"])][-MAX_LOG_LINES:]
        elif "member" in news:
            self._news.setdefault(str(news["member"]), {}).update(news)
        if time.monotonic() - self._written > WRITE_EVERY_S:
            self._write()

    def ends(self, outcome: str, problem: str = "") -> None:
        """Note how the job ended."""
        self._facts |= {"outcome": outcome, "ended": time.time(), **({"problem": problem} if problem else {})}
        self._write()

    def _write(self) -> None:
        if self._wanted:
            self._written = time.monotonic()
            whole = {**self._facts, "last_seen": time.time(), "log": self._said, "progress": self._news}
            with suppress(StorageError):  # to be seen is worth no job
                self._run.store.put_json(self.name, whole)


@contextmanager
def record_job(run: Run, job: Job, tell: Tell, *, wanted: bool) -> Iterator[JobRecord]:
    """Lend the record of one attempt at a job; nothing is written unless it is wanted."""
    record = JobRecord(run, job, tell, wanted=wanted)
    try:
        yield record
    except Interrupted as problem:
        record.ends("stopped", str(problem))
        raise
    except Exception:
        record.ends("failed", traceback.format_exc())
        raise
    record.ends("done")


def records(run: Run) -> list[dict[str, Any]]:
    """Return the records of a run's jobs, those that began first first."""
    found = [run.store.get_json(name) for name in run.store.names("jobs")]
    return sorted(found, key=lambda each: float(each["begun"]))


def latest_by_member(run: Run) -> dict[int, dict[str, Any]]:
    """Return for every member what its newest job tells: node, attempt, outcome, and how far it is."""
    found: dict[int, dict[str, Any]] = {}
    for each in records(run):
        gone = each["outcome"] == "running" and time.time() - each["last_seen"] > LOST_AFTER_S
        facts = {name: each[name] for name in ("node", "attempt", "begun", "last_seen")}
        for number in each["members"] if each["kind"] == "train" else ():
            news = each["progress"].get(str(number), {})
            found[number] = {**facts, "outcome": "lost" if gone else each["outcome"], **news}
    return found
