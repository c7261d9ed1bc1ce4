"""Trackers: complete numbers in a process of their own, whatever happens to it or to training."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner
from waiting import wait_until

import plateaux
from plateaux.cli.main import app
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DivergedError, Interrupted
from plateaux.core.progress import MemberUpdate, ProgressEvent
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run
from plateaux.storage.verify import verify
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study
from plateaux.training import tracker_process, trackers
from plateaux.training.tracker_process import TrackerHost
from plateaux.training.trackers import stored_epochs

TESTS = Path(__file__).parents[1]
TEXT = """
members = 2
[data]
name = "blobs"
samples = 48
test_samples = 12
batch_size = 16
validation_split = 12
[model]
name = "mlp"
hidden_sizes = [6]
[optimizer]
lr = [0.1, 0.05]
[train]
epochs = 3
[executor]
threads = 1
"""


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which the trackers of `toy_trackers` record their calls."""
    file = tmp_path / "recorded.jsonl"
    monkeypatch.setenv("TOY_TRACKER", str(file))
    return file


def recipe(*trackers: str, changes: Sequence[str] = ()) -> Recipe:
    names = [f"toy_trackers:{name}" for name in trackers]
    return Recipe.parse(TEXT, [f"run.trackers={json.dumps(names)}", *changes])


def train(what: Recipe, out: Path, **options: Any) -> Run:
    return plateaux.train(what, out, trust=["toy_trackers"], **options)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def numbers(calls: Sequence[dict[str, Any]], member: int) -> list[tuple[int, dict[str, float]]]:
    return [(call["step"], call["values"]) for call in calls if call["member"] == member and "step" in call]


def logged(run: Run, member: int) -> list[tuple[int, dict[str, float]]]:
    """Return what the log in the run folder has for every epoch, with the names that trackers get."""
    lines = [line for line in run.log(member) if "step" not in line and "probe" not in line]
    return [
        (line["epoch"], {name.replace(" ", "/", 1): value for name, value in line.items() if name != "epoch"})
        for line in lines
    ]


def weights(run: Run) -> list[bytes]:
    return [run.store.get(f"members/{n}/weights.safetensors") for n in range(run.recipe.members)]


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# --- What a tracker gets


@pytest.mark.parametrize("processes", [1, 2])
def test_a_tracker_gets_the_numbers_of_every_epoch_once(tmp_path: Path, recorded: Path, processes: int) -> None:
    run = train(recipe("Recorder", changes=[f"executor.processes={processes}"]), tmp_path / "run")
    calls = read(recorded)
    for member in (0, 1):
        assert len(logged(run, member)) == 3
        assert numbers(calls, member) == logged(run, member)
    assert len({call["pid"] for call in calls}) == 1
    assert calls[0]["pid"] != os.getpid()


def test_a_tracker_never_runs_in_a_process_that_trains(tmp_path: Path, recorded: Path) -> None:
    train(recipe("Recorder"), tmp_path / "run")
    assert "toy_trackers" not in sys.modules
    assert len(read(recorded)) == 12


def test_members_belong_to_the_ensemble_and_know_their_recipe(tmp_path: Path, recorded: Path) -> None:
    run = train(recipe("Recorder", changes=["run.group=seeds"]), tmp_path / "run")
    calls = read(recorded)
    started = {call["member"]: call for call in calls if "start" in call}
    assert list(started) == [None, 0, 1]
    assert started[None]["parent"] is None
    assert [started[n]["parent"] for n in (0, 1)] == [started[None]["id"]] * 2
    assert {(call["group"], call["name"]) for call in started.values()} == {("seeds", "run")}
    assert started[1]["config"]["optimizer.lr"] == [0.1, 0.05]
    assert started[1]["config"]["train.epochs"] == 3
    ended = {call["member"]: call for call in calls if "summary" in call}
    assert list(ended) == [0, 1, None]
    assert ended[1]["summary"] == {"epoch": 3, **logged(run, 1)[-1][1], "status": "finished"}
    assert (ended[None]["summary"]["members/finished"], ended[None]["summary"]["epoch"]) == (2, 3)
    assert set(ended[None]["files"]) == {"recipe.toml", "environment.json"}
    assert Recipe.parse(ended[None]["files"]["recipe.toml"]) == run.recipe
    assert ended[0]["files"] == {}


def test_probes_are_logged_with_the_epoch(tmp_path: Path, recorded: Path) -> None:
    probe = ["probe.probes=['average_l2(samples=4)']", "probe.every=2", "probe.samples=8"]
    run = train(recipe("Recorder", changes=probe), tmp_path / "run")
    values = {line["epoch"]: line["rows"][""]["value"] for line in run.log(0) if "probe" in line}
    sent = {step: metrics.get("probe/average_l2(samples=4)") for step, metrics in numbers(read(recorded), 0)}
    assert sent == {1: None, **values}
    assert set(values) == {2, 3}
    replayed = stored_epochs(run, 0)
    assert {n: {k.replace(" ", "/", 1): v for k, v in e.items()} for n, e in replayed.items()} == dict(
        numbers(read(recorded), 0)
    )


def test_runs_of_a_study_have_its_name_as_group(tmp_path: Path, recorded: Path) -> None:
    text = """
    name = "two rates"
    [base]
    members = 1
    data = {name = "blobs", samples = 20, test_samples = 6, batch_size = 10}
    model = {name = "mlp", hidden_sizes = [4]}
    train = {epochs = 1}
    run = {trackers = ["toy_trackers:Recorder"]}
    [grid]
    "optimizer.lr" = [0.1, 0.05]
    [evaluate]
    metrics = ["accuracy"]
    """
    (tmp_path / "study.toml").write_text(text)
    components = plateaux.config.components.Components(trust=("toy_trackers",))
    StudyRunner(Study.load(str(tmp_path / "study.toml")), tmp_path / "study", components=components).run()
    started = [call for call in read(recorded) if "start" in call]
    assert len({call["name"] for call in started}) == 2
    assert {call["group"] for call in started} == {"two rates"}


@pytest.mark.slow
def test_on_a_mesh_every_process_logs_its_members(tmp_path: Path, recorded: Path) -> None:
    what = recipe("Recorder", changes=["executor.name=mesh", "executor.processes=2", "members=3", "optimizer.lr=0.1"])
    (tmp_path / "recipe.toml").write_text(what.to_toml())
    words = ["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--trust", "toy_trackers"]
    env = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run([sys.executable, "-m", "plateaux", *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    calls, run = read(recorded), Run.open(tmp_path / "run")
    for member in range(3):
        assert numbers(calls, member) == logged(run, member)
    started = [call for call in calls if "start" in call]
    (ensemble,) = [call["id"] for call in started if call["member"] is None and call["start"] is None]
    assert {call["parent"] for call in started if call["member"] is not None} == {ensemble}
    assert len({call["pid"] for call in started if call["member"] is not None}) == 2


def test_replicas_of_a_member_on_a_mesh_are_logged_once(tmp_path: Path, recorded: Path) -> None:
    changes = ["executor.name=mesh", "executor.processes=2", "executor.data_parallel=2"]
    (tmp_path / "recipe.toml").write_text(recipe("Recorder", changes=changes).to_toml())
    words = ["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--trust", "toy_trackers"]
    env = os.environ | {"PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "plateaux", *words, "--no-evaluate"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    calls = read(recorded)
    assert len({call["pid"] for call in calls}) == 1
    assert [numbers(calls, n) for n in (0, 1)] == [logged(Run.open(tmp_path / "run"), n) for n in (0, 1)]


def test_results_and_a_report_are_added_to_the_runs_of_the_tracker(tmp_path: Path, recorded: Path) -> None:
    run = train(recipe("Recorder"), tmp_path / "run")
    (ensemble,) = [call["id"] for call in read(recorded) if "start" in call and call["member"] is None]
    (tmp_path / "run" / "report.html").write_text("<p>report</p>")
    (tmp_path / "figure.svg").write_text("<svg/>")
    results = plateaux.evaluate(run, metrics=["accuracy", "confidence_histogram"][:1])
    before = len(read(recorded))
    plateaux.log_results(run, results, files=[tmp_path / "figure.svg"], trust=["toy_trackers"])
    started, ended = read(recorded)[before:]
    assert (started["start"], started["member"]) == (ensemble, None)
    assert ended["summary"]["test/accuracy"] == results["accuracy"].value
    assert set(ended["files"]) == {"recipe.toml", "environment.json", "report.html", "figure.svg"}
    with pytest.raises(plateaux.core.errors.UntrustedCodeError, match="--trust toy_trackers"):
        plateaux.log_results(run)


def test_the_command_line_adds_the_results_of_the_evaluation(tmp_path: Path, recorded: Path) -> None:
    (tmp_path / "recipe.toml").write_text(recipe("Recorder").to_toml())
    words = ["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--trust", "toy_trackers"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    measured = {each["metric"]: each for each in json.loads(done.stdout)["metrics"]}
    ended = [call for call in read(recorded) if "summary" in call and call["member"] is None]
    value = measured["accuracy"]["rows"]["ensemble (mean probability)"]["value"]
    assert ended[-1]["summary"]["test/accuracy"] == value


# --- Trackers that fail


def test_training_is_the_same_with_trackers_that_fail_and_each_problem_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recorded: Path
) -> None:
    run = train(recipe("Raising", "Recorder", "Exiting", "Missing", "WrongId"), tmp_path / "run")
    plain = train(recipe(), tmp_path / "plain")
    assert weights(run) == weights(plain)
    assert run.log(0) == plain.log(0)
    assert numbers(read(recorded), 1) == logged(run, 1)  # the one that works
    texts = warnings_of(caplog)
    for name, problem in {
        "Raising": "failed: ConnectionError: the server is not there. Training is not affected.",
        "Exiting": r"ended unexpectedly (exit code 7)",
        "Missing": "failed: AttributeError: module 'toy_trackers' has no attribute 'Missing'",
        "WrongId": "WrongId.start returned: id = '../outside'",
    }.items():
        (text,) = [text for text in texts if f"toy_trackers:{name}' " in text and "lacks" not in text]
        assert problem in text
        assert "run the same command again" in text
    (lost,) = [text for text in texts if "Raising' lacks" in text]
    assert "lacks the numbers of 6 epochs" in lost
    assert not (tmp_path / "outside.json").exists()


def test_a_tracker_that_works_again_gets_what_it_has_missed_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recorded: Path
) -> None:
    run = train(recipe("Unready"), tmp_path / "run")
    assert [numbers(read(recorded), n) for n in (0, 1)] == [logged(run, n) for n in (0, 1)]
    (text,) = warnings_of(caplog)
    assert "'toy_trackers:Unready' failed: ConnectionError: not yet" in text


@pytest.fixture
def no_ensemble(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Do not wait for the process that starts the ensemble, because there is none. The tracker is imported here."""
    monkeypatch.setattr(tracker_process, "PARENT_WAIT_S", 0.0)
    yield
    sys.modules.pop("toy_trackers", None)


def host_of(root: Path) -> TrackerHost:
    opening = {"root": str(root), "name": "run", "group": None, "target": "toy_trackers:Recorder", "slug": "recorder"}
    return TrackerHost(opening)


def epochs_of(*steps: int) -> list[dict[str, Any]]:
    """Return messages of member 0; only the first has its configuration."""
    values = [{"of": "0", "step": step, "values": {"loss": float(step)}} for step in steps]
    return [{**values[0], "config": {"seed": 1}}, *values[1:]]


@pytest.mark.usefixtures("no_ensemble")
@pytest.mark.parametrize("works_again_at", [2, 4])
def test_a_member_whose_first_message_failed_gets_all_its_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Path, works_again_at: int
) -> None:
    host, calls, lock = host_of(tmp_path), iter(range(1, 100)), LocalStore.lock

    def fail_at_first(*args: Any, **options: Any) -> Any:
        if next(calls) < works_again_at:
            raise OSError("a temporary failure of the store")
        return lock(*args, **options)

    monkeypatch.setattr(LocalStore, "lock", fail_at_first)
    replies = [host.handle(message) for message in epochs_of(1, 2, 3)]
    failed = {"error": "OSError: a temporary failure of the store"}
    assert replies == [failed] * (works_again_at - 1) + [{}] * (4 - works_again_at)
    assert host.close("finished", {}, []) == {}
    assert [call["step"] for call in read(recorded) if "step" in call] == [1, 2, 3]
    assert next(call["config"] for call in read(recorded) if "config" in call) == {"seed": 1}


@pytest.mark.usefixtures("no_ensemble")
def test_a_member_that_could_not_be_added_holds_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Path
) -> None:
    monkeypatch.setattr(tracker_process, "LOCK_WAIT_S", 0.0)
    host = host_of(tmp_path)
    host.store.put_json("trackers/recorder/0.json", {"id": "../../x", "step": 1})
    replies = [host.handle(message) for message in epochs_of(1, 2)]
    assert all("id = '../../x'" in reply["error"] for reply in replies), "not an error of the lock"


@pytest.mark.usefixtures("no_ensemble")
def test_only_the_first_message_of_a_member_waits_for_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Path
) -> None:
    host, waits, lock = host_of(tmp_path), [], LocalStore.lock

    def refuse(store: LocalStore, name: str, *, timeout: float) -> Any:
        waits.append(timeout)
        return lock(store, name, timeout=0.0)

    monkeypatch.setattr(LocalStore, "lock", refuse)
    with lock(LocalStore(host.store.root), "trackers/recorder/0", timeout=0.0):
        replies = [host.handle(message) for message in epochs_of(1, 2, 3)]
    assert all("is locked by another process" in reply["error"] for reply in replies)
    assert waits == [60.0, 0.0, 0.0]
    assert host.close("finished", {}, []) == {}
    assert [call["step"] for call in read(recorded) if "step" in call] == [1, 2, 3]


@pytest.mark.usefixtures("no_ensemble")
def test_numbers_of_a_member_that_could_not_be_added_are_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Path
) -> None:
    host = host_of(tmp_path)

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError("no lock")

    monkeypatch.setattr(LocalStore, "lock", fail)
    assert [host.handle(message) for message in epochs_of(1, 2)] == [{"error": "OSError: no lock"}] * 2
    assert host.close("finished", {}, []) == {"error": "OSError: no lock", "lost": 2}


@pytest.mark.usefixtures("no_ensemble")
def test_a_tracker_that_begins_a_new_run_gets_the_earlier_epochs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Path
) -> None:
    host = host_of(tmp_path)
    for message in epochs_of(1, 2):
        host.handle(message)
    host.close("stopped", {}, [])
    recorded.write_text("")
    same = host_of(tmp_path)
    for message in epochs_of(1, 2, 3):
        same.handle(message)
    same.close("stopped", {}, [])
    assert [call["step"] for call in read(recorded) if "step" in call] == [3]
    recorded.write_text("")
    monkeypatch.setattr("toy_trackers.Recorder.start", start_a_new_run)
    other = host_of(tmp_path)
    for message in epochs_of(1, 2, 3, 4):
        other.handle(message)
    other.close("finished", {}, [])
    assert [call["step"] for call in read(recorded) if "step" in call] == [1, 2, 3, 4]


def start_a_new_run(self: Any, run: Any, config: Any) -> str:
    """Return another id than the stored one, as if the run had been deleted on the server."""
    self.member, self.id = run.member, "new"
    return self.id


def test_a_tracker_that_hangs_is_ended_with_all_it_has_started(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    recorded: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 4.0)
    run = train(recipe("Sleeping"), tmp_path / "run")
    assert all(each.finished for each in run.all_progress())
    calls = read(recorded)
    (child,) = [call["child"] for call in calls if "child" in call]
    wait_until(lambda: not is_alive(child) and not is_alive(calls[0]["pid"]), seconds=20)
    (text,) = warnings_of(caplog)
    assert "did not finish within 4 s and was ended" in text
    assert "printed" not in "".join(capfd.readouterr())


def test_numbers_that_do_not_fit_into_the_queue_are_counted_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, recorded: Path
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 3.0)
    monkeypatch.setattr(trackers, "QUEUE_SIZE", 5)

    def wait_for_child(event: ProgressEvent) -> None:  # then the messages before have replies
        if isinstance(event, MemberUpdate) and event.completed_epoch == 2:
            wait_until(lambda: any("child" in call for call in read(recorded)))

    train(recipe("Sleeping", changes=["members=1", "optimizer.lr=0.1", "train.epochs=10"]), tmp_path / "run",
          progress=wait_for_child)  # fmt: skip
    (lost,) = [text for text in warnings_of(caplog) if "lacks" in text]
    assert "lacks the numbers of 5 epochs of members" in lost


def test_a_closed_run_folder_with_a_link_is_not_written_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    what = Recipe.parse(TEXT, ["run.trackers=['tensorboard']"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").symlink_to(tmp_path / "elsewhere")
    plateaux.train(what, tmp_path / "run")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (text,) = [text for text in warnings_of(caplog) if "lacks" not in text]
    assert "symbolic link" in text


def test_a_stored_id_of_another_shape_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recorded: Path
) -> None:
    run = train(recipe("Recorder"), tmp_path / "run")
    file = "trackers/tracker-toy_trackers-Recorder/0.json"
    assert run.store.get_json(file)["id"].startswith("member-0-")
    run.store.put_json(file, {"id": "../../x", "step": 1})
    recorded.unlink()
    train(recipe("Recorder"), tmp_path / "run")
    assert numbers(read(recorded), 0) == []
    assert any("id = '../../x'" in text for text in warnings_of(caplog))


# --- Interruptions

SCRIPT = """
import pathlib, sys, plateaux
from plateaux.core.progress import MemberUpdate
from plateaux.training import tracker_process, trackers
from waiting import wait_until
trackers.STOP_SECONDS = 2.0

def pause(event):
    if isinstance(event, MemberUpdate) and event.completed_epoch == 3 and event.member == 1:
        wait_until(pathlib.Path(sys.argv[3]).exists)

plateaux.train(plateaux.Recipe.load(sys.argv[1]), sys.argv[2], trust=["toy_trackers"], progress=pause)
"""


def start_until(folder: Path, what: Recipe, recorded: Path, until: str) -> subprocess.Popen[bytes]:
    """Train in a new process, which waits in the last epoch of member 1, until a call of that kind is recorded."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "recipe.toml").write_text(what.to_toml())
    arguments = [str(folder / name) for name in ("script.py", "recipe.toml", "run", "go")]
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(TESTS)})
    wait_until(lambda: any(until in call for call in read(recorded)))
    return process


def test_a_killed_run_continues_the_same_runs_of_the_tracker(tmp_path: Path, recorded: Path) -> None:
    what = recipe("Recorder", changes=["run.checkpoint_every_epochs=2"])
    process = start_until(tmp_path, what, recorded, "step")
    wait_until(lambda: len(numbers(read(recorded), 1)) == 2)
    process.kill()
    process.wait()
    first = wait_until(lambda: [call for call in read(recorded) if "summary" in call and call["member"] is None])
    wait_until(lambda: not is_alive(first[0]["pid"]))
    before = read(recorded)
    assert {call["summary"]["status"] for call in before if "summary" in call} == {"stopped"}
    run = train(what, tmp_path / "run")
    calls = read(recorded)
    assert [numbers(calls, n) for n in (0, 1)] == [logged(run, n) for n in (0, 1)]
    ids = {call["member"]: call["id"] for call in before if "start" in call}
    again = {call["member"]: call for call in calls[len(before) :] if "start" in call}
    assert {member: (call["start"], call["id"]) for member, call in again.items()} == {
        member: (known, known) for member, known in ids.items()
    }
    assert len({call["pid"] for call in calls}) == 2
    assert verify(run).damaged == {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_is_left_when_training_ends_while_a_tracker_hangs(
    tmp_path: Path, recorded: Path, number: signal.Signals
) -> None:
    process = start_until(tmp_path, recipe("Sleeping"), recorded, "child")
    (call,) = [call for call in read(recorded) if "child" in call]
    pids = (call["pid"], call["child"])
    assert all(map(is_alive, pids))
    process.send_signal(number)
    (tmp_path / "go").touch()
    process.wait()
    wait_until(lambda: not any(map(is_alive, pids)), seconds=30)


def test_a_stopped_run_and_a_failed_run_say_so(tmp_path: Path, recorded: Path) -> None:
    def stop(event: ProgressEvent) -> None:
        if isinstance(event, MemberUpdate) and event.completed_epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(recipe("Recorder"), tmp_path / "stopped", progress=stop)
    assert {call["summary"]["status"] for call in read(recorded) if "summary" in call} == {"stopped"}
    recorded.unlink()
    with pytest.raises(DivergedError):
        train(recipe("Recorder", changes=["optimizer.lr=1e30"]), tmp_path / "failed")
    assert {call["summary"]["status"] for call in read(recorded) if "summary" in call} == {"failed"}


def test_a_tracker_that_is_added_later_gets_the_epochs_before(tmp_path: Path, recorded: Path) -> None:
    train(recipe(), tmp_path / "run")
    assert not recorded.exists()
    run = train(recipe("Recorder"), tmp_path / "run")
    assert [numbers(read(recorded), n) for n in (0, 1)] == [logged(run, n) for n in (0, 1)]
    before = len(read(recorded))
    train(recipe("Recorder"), tmp_path / "run")
    assert [call for call in read(recorded)[before:] if "step" in call] == []


def test_data_loader_workers_do_not_keep_a_tracker_alive(tmp_path: Path, recorded: Path) -> None:
    what = recipe("Recorder", changes=["data.num_workers=1"])
    start = time.monotonic()
    train(what, tmp_path / "run")
    assert time.monotonic() - start < 400
    assert len([call for call in read(recorded) if "summary" in call]) == 3


def test_torch_is_not_imported_for_a_tracker(tmp_path: Path) -> None:
    code = "import plateaux.training.tracker_process, plateaux.integrations.tensorboard as t, sys\n"
    code += "t.TensorBoardTracker(); raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert torch.__version__
