"""Job records: what is written while a job runs and when it ends, and what `plateaux status` shows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import GIVEN, NO_DATA, recipe
from rich.console import Console

import plateaux
from plateaux.cli.progress import member_table
from plateaux.config.experiment import Experiment
from plateaux.core.errors import DivergedError, Interrupted, StorageError
from plateaux.core.progress import MemberUpdate, Message, ProgressEvent
from plateaux.storage.run import Run
from plateaux.training import job_records
from plateaux.training.jobs import Job

JOB = Job((1,), (0, 0), 4, attempt=2)
UPDATE = MemberUpdate(
    1, epoch=2, epochs=4, step=3, steps=5, metrics={"loss": 0.5}, samples_per_second=900.0, seconds_left=61.0
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.begin(tmp_path / "run", Experiment(recipe("sam")), NO_DATA)


def test_a_record_is_written_while_the_job_runs_and_when_it_ends(run: Run) -> None:
    events: list[ProgressEvent] = []
    with job_records.record_job(run, JOB, events.append, enabled=True) as recorder:
        recorder.set_start((2, 0))
        recorder.progress(UPDATE)
        (record,) = job_records.load_records(run)
        assert (record.outcome, record.start, record.attempt, record.members) == ("running", (2, 0), 2, (1,))
        recorder._last_write -= job_records.WRITE_INTERVAL_S + 1
        recorder.progress(Message("hello"))
        (record,) = job_records.load_records(run)
        assert (record.log, record.progress[1]) == (("hello",), UPDATE)
    (record,) = job_records.load_records(run)
    assert record.outcome == "done"
    assert record.ended is not None
    assert record.started <= record.ended
    assert events == [UPDATE, Message("hello")]


def test_a_record_is_stored_as_json_and_read_back_unchanged(run: Run) -> None:
    recorder = job_records.JobRecorder(run, JOB, lambda _: None, enabled=True)
    recorder.progress(UPDATE)
    recorder.finish("failed", "Traceback ...")
    stored = run.store.get_json(recorder.name)
    assert stored["progress"]["1"]["metrics"] == {"loss": 0.5}
    assert "scored" not in stored["progress"]["1"]  # fields that are None are not stored
    assert job_records.JobRecord.from_dict(stored) == recorder.record


def test_the_log_of_a_record_keeps_the_newest_lines(run: Run) -> None:
    recorder = job_records.JobRecorder(run, JOB, lambda _: None, enabled=False)
    for number in range(job_records.MAX_LOG_LINES + 3):
        recorder.progress(Message(str(number)))
    assert (len(recorder.record.log), recorder.record.log[0]) == (job_records.MAX_LOG_LINES, "3")


@pytest.mark.parametrize(
    ("problem", "outcome"),
    [(Interrupted("reason"), "stopped"), (DivergedError("reason"), "failed"), (KeyError("reason"), "failed")],
)
def test_the_outcome_of_a_job_is_recorded(run: Run, problem: Exception, outcome: str) -> None:
    with pytest.raises(type(problem)), job_records.record_job(run, JOB, print, enabled=True):
        raise problem
    (record,) = job_records.load_records(run)
    assert record.outcome == outcome
    assert "reason" in record.problem
    assert ("Traceback" in record.problem) == (outcome == "failed")


def test_nothing_is_written_unless_records_are_enabled(run: Run) -> None:
    with job_records.record_job(run, JOB, print, enabled=False) as recorder:
        recorder.set_start((0, 0))
    assert job_records.load_records(run) == []


def test_a_full_disk_ends_the_record_and_not_the_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("full")

    monkeypatch.setattr(type(run.store), "put_json", fail)
    with job_records.record_job(run, JOB, print, enabled=True) as recorder:
        recorder.set_start((0, 0))


def test_status_shows_the_newest_record_of_a_member(run: Run) -> None:
    group = Job(tuple(range(10)), (0, 0), 4)
    with job_records.record_job(run, group, print, enabled=True) as recorder:
        assert "_and_more" in recorder.name
    with job_records.record_job(run, Job((1,), (4, 0), 4, "assign"), print, enabled=True):
        pass
    recorder = job_records.JobRecorder(run, JOB, lambda _: None, enabled=True)
    recorder.progress(UPDATE)
    recorder.set_start((2, 0))
    latest = job_records.latest_by_member(run)
    assert latest[0].outcome == "done"
    assert (latest[1].outcome, latest[1].attempt, latest[1].progress[1].metrics) == ("running", 2, {"loss": 0.5})
    assert latest[1].summary(1).items() >= {"outcome": "running", "attempt": 2, "epoch": 2, "step": 3}.items()
    stored = run.store.get_json(recorder.name)
    run.store.put_json(recorder.name, {**stored, "last_seen": 0.0})
    lost = job_records.latest_by_member(run)[1]
    assert lost.outcome == "lost"
    console = Console(width=160, record=True)
    console.print(member_table({1: lost.latest(1)}, lost=[1]))
    text = console.export_text()
    assert f"on {lost.node}" in text
    assert "2 retries lost" in text
    assert "1 min 01 s left" in text


def test_a_local_run_writes_no_records(tmp_path: Path) -> None:
    run = plateaux.train(recipe("sam"), tmp_path / "run", **GIVEN.keywords())
    assert job_records.latest_by_member(run) == {}
