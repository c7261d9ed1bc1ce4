"""Records of jobs: what happens is written down, and can be seen from outside while it happens and afterwards."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from cases import GIVEN, NO_DATA, recipe
from rich.console import Console

import plateaux
from plateaux.cli.progress import lines
from plateaux.core.errors import DivergedError, Interrupted, StorageError
from plateaux.distributed import stop_signal
from plateaux.distributed.process_pool import rebuild_error, run_captured
from plateaux.distributed.ray_worker import RayWorker
from plateaux.distributed.stop_signal import graceful_shutdown
from plateaux.storage.run import Run
from plateaux.training import job_records
from plateaux.training.jobs import Job

JOB = Job((1,), (0, 0), 4, attempt=2)
NEWS = {"member": 1, "epoch": 2, "epochs": 4, "step": 3, "steps": 5, "loss": 0.5, "rate": 900.0, "left": 61.0}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.begin(tmp_path / "run", recipe("sam"), NO_DATA)


def test_a_job_is_written_down_while_it_goes_on_and_when_it_has_ended(run: Run) -> None:
    heard: list[Any] = []
    with job_records.record_job(run, JOB, heard.append, wanted=True) as record:
        record.begins((2, 0))
        record.tell(NEWS)
        (now,) = job_records.records(run)
        assert (now["outcome"], now["start"], now["attempt"], now["members"]) == ("running", [2, 0], 2, [1])
        record._written -= job_records.WRITE_EVERY_S + 1
        record.tell({"say": "hello"})
        (now,) = job_records.records(run)
        assert (now["log"], now["progress"]["1"]["loss"]) == (["hello"], 0.5)
    (now,) = job_records.records(run)
    assert now["outcome"] == "done"
    assert now["begun"] <= now["ended"]
    assert heard == [NEWS, {"say": "hello"}]


@pytest.mark.parametrize(
    ("problem", "outcome"),
    [(Interrupted("so"), "stopped"), (DivergedError("so"), "failed"), (KeyError("so"), "failed")],
)
def test_how_a_job_ended_is_written_down(run: Run, problem: Exception, outcome: str) -> None:
    with pytest.raises(type(problem)), job_records.record_job(run, JOB, print, wanted=True):
        raise problem
    (found,) = job_records.records(run)
    assert found["outcome"] == outcome
    assert "so" in found["problem"]
    assert ("Traceback" in found["problem"]) == (outcome == "failed")


def test_nothing_is_written_unless_it_is_wanted(run: Run) -> None:
    with job_records.record_job(run, JOB, print, wanted=False) as record:
        record.begins((0, 0))
    assert job_records.records(run) == []


def test_a_full_disk_ends_the_record_and_not_the_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StorageError("full")

    monkeypatch.setattr(type(run.store), "put_json", full)
    with job_records.record_job(run, JOB, print, wanted=True) as record:
        record.begins((0, 0))


def test_the_newest_record_of_a_member_is_what_is_shown(run: Run) -> None:
    many = Job(tuple(range(10)), (0, 0), 4)
    with job_records.record_job(run, many, print, wanted=True) as record:
        assert "_and_more" in record.name
    with job_records.record_job(run, Job((1,), (4, 0), 4, "decide"), print, wanted=True):
        pass
    record = job_records.JobRecord(run, JOB, lambda _: None, wanted=True)
    record._news = {"1": dict(NEWS)}
    record.begins((2, 0))
    found = job_records.latest_by_member(run)
    assert found[0]["outcome"] == "done"
    assert (found[1]["outcome"], found[1]["attempt"], found[1]["loss"]) == ("running", 2, 0.5)
    stale = run.store.get_json(record.name)
    run.store.put_json(record.name, {**stale, "last_seen": 0.0})
    console = Console(width=160, record=True)
    console.print(lines({1: job_records.latest_by_member(run)[1]}))
    shown = console.export_text()
    assert f"on {found[1]['node']}" in shown
    assert "2 retries lost" in shown
    assert "1 min 01 s left" in shown


# --- The hands of a cluster, without one


def test_a_hand_carries_out_and_tells_what_it_heard() -> None:
    hand = RayWorker()

    def work(job: Any, tell: Any, *, device: str | None = None, processes: int = 1) -> None:
        tell({"say": f"{job} of {processes >= 1}"})

    assert hand.poll_events(0.0) == []
    assert hand.run_job(work, "it", 1.0) == ("done", None, [{"say": "it of True"}])
    kept = gc.get_freeze_count()
    assert kept > 10_000  # all that was imported is left alone when Ray asks for garbage
    garbage: list[Any] = []
    garbage.append(garbage)
    hand.run_job(work, "it", 1.0)
    assert gc.get_freeze_count() <= kept  # but what earlier jobs left behind is found


def test_news_are_gathered_while_a_job_goes_on_and_come_at_once_when_it_ends() -> None:
    hand, told, ends = RayWorker(), Event(), Event()

    def work(job: Any, tell: Any, **_: Any) -> None:
        tell({"say": "one"})
        tell({"say": "two"})
        told.set()
        ends.wait(20)
        tell({"say": "three"})

    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(hand.run_job, work, "it", 1.0)
        told.wait()
        begun = time.perf_counter()
        assert hand.poll_events(0.3) == [{"say": "one"}, {"say": "two"}]  # it waits although there is news
        assert time.perf_counter() - begun >= 0.29
        heard = threads.submit(hand.poll_events, 60.0)
        ends.set()
        assert [*heard.result(timeout=30), *answer.result(timeout=30)[2]] == [{"say": "three"}]


def test_a_fault_of_the_group_is_told_from_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")

    def fails(what: str | Exception) -> Any:
        def work(job: Any, tell: Any, **_: Any) -> None:
            raise RuntimeError(what) if isinstance(what, str) else what

        return work

    hand = RayWorker()
    torn = fails("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert hand.run_job(torn, "it", 1.0)[0] == "failed"
    group = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1234}
    assert hand.run_job(torn, "it", 1.0, group)[0] == "broken"
    assert os.environ["RANK"] == "1"
    lost = type("DistNetworkError", (RuntimeError,), {})("Failed to recv, got 0 bytes")
    assert hand.run_job(fails(lost), "it", 1.0, group)[0] == "broken"
    assert hand.run_job(fails("sample 7"), "it", 1.0, group)[:2] == ("failed", ("RuntimeError", "sample 7"))


def test_a_stop_reaches_work_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signal, "_process_wide", stop_signal.StopFlag())
    seen: list[bool] = []

    def work() -> None:
        with graceful_shutdown() as asked:
            seen.append(asked.is_set())
            RayWorker().stop()
            seen.append(asked.is_set())

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, True]


def test_what_a_worker_raised_is_told_by_its_name() -> None:
    assert run_captured(lambda: None) == ("done", None)
    assert isinstance(rebuild_error("DivergedError", "so"), DivergedError)
    assert str(rebuild_error("KeyError", "so")) == "KeyError: so"
    assert str(rebuild_error("suggest", "so")) == "suggest: so"  # a function of that module is no error


def test_a_run_on_this_machine_leaves_no_records(tmp_path: Path) -> None:
    run = plateaux.train(recipe("sam"), tmp_path / "run", components=GIVEN)
    assert job_records.latest_by_member(run) == {}
