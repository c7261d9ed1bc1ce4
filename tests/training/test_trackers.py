"""Trackers: every number arrives once, whatever happens to the tracker or to training."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import toy_trackers
from typer.testing import CliRunner
from waiting import wait_until

import plateaux
from plateaux.cli.main import app
from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DivergedError, Interrupted, UntrustedCodeError
from plateaux.core.progress import MemberUpdate, ProgressEvent
from plateaux.storage.run import Run
from plateaux.storage.verify import verify
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study
from plateaux.training import trackers
from plateaux.training.trackers import log_results, stored_epochs

TESTS = Path(__file__).parents[1]
TEXT = """
members = 2
data = {name = "blobs", samples = 48, test_samples = 12, batch_size = 16, validation_split = 12}
model = {name = "mlp", hidden_sizes = [6]}
optimizer = {lr = [0.1, 0.05]}
train = {epochs = 3}
executor = {threads = 1}
"""
ONE_MEMBER = ("members=1", "optimizer.lr=0.1")


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file in which the trackers of `toy_trackers` record their calls."""
    file = tmp_path / "recorded.jsonl"
    monkeypatch.setenv("TOY_TRACKER", str(file))
    monkeypatch.setattr(toy_trackers.Hanging, "may_go_on", threading.Event())
    monkeypatch.setattr(toy_trackers.Unready, "failed", 0)
    yield file
    toy_trackers.Hanging.may_go_on.set()


def recipe(*names: str, changes: Sequence[str] = ()) -> Recipe:
    return Recipe.parse(TEXT, [f"run.trackers={json.dumps([f'toy_trackers:{name}' for name in names])}", *changes])


def train(what: Recipe, out: Path, **options: Any) -> Run:
    return plateaux.train(what, out, trust=["toy_trackers"], **options)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def sent(file: Path, members: int = 2) -> list[list[tuple[int, dict[str, float]]]]:
    """Return the epochs that each member sent, in order."""
    calls = [call for call in read(file) if "step" in call]
    return [[(call["step"], call["values"]) for call in calls if call["member"] == n] for n in range(members)]


def logged(run: Run) -> list[list[tuple[int, dict[str, float]]]]:
    """Return what the logs in the run folder have for every epoch, with the names that trackers get."""
    return [
        [
            (line["epoch"], {name.replace(" ", "/", 1): value for name, value in line.items() if name != "epoch"})
            for line in run.log(number)
            if "step" not in line and "probe" not in line
        ]
        for number in range(run.recipe.members)
    ]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def command_line(what: Recipe, folder: Path) -> list[str]:
    (folder / "recipe.toml").write_text(what.to_toml())
    return ["train", str(folder / "recipe.toml"), "--out", str(folder / "run"), "--trust", "toy_trackers"]


# --- What a tracker gets


@pytest.mark.process
@pytest.mark.parametrize("processes", [1, 2])
def test_a_tracker_gets_the_numbers_of_every_epoch_once(tmp_path: Path, recorded: Path, processes: int) -> None:
    run = train(recipe("Recorder", changes=[f"executor.processes={processes}"]), tmp_path / "run")
    assert [len(epochs) for epochs in logged(run)] == [3, 3]
    assert sent(recorded) == logged(run)
    assert verify(run).damaged == {}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_on_a_mesh_every_member_is_logged_once(tmp_path: Path, recorded: Path, replicas: int) -> None:
    mesh = ["executor.name=mesh", "executor.processes=2", f"executor.data_parallel={replicas}"]
    words = [*command_line(recipe("Recorder", changes=mesh), tmp_path), "--no-evaluate"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", "plateaux", *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sent(recorded) == logged(Run.open(tmp_path / "run"))
    started = [call for call in read(recorded) if "start" in call]
    (ensemble,) = [call["id"] for call in started if call["member"] is None]
    assert [call["parent"] for call in started if call["member"] is not None] == [ensemble] * 2
    assert len({call["pid"] for call in started if call["member"] is not None}) == 2 // replicas


def test_tracked_members_have_the_ensemble_as_parent_and_their_recipe_as_config(tmp_path: Path, recorded: Path) -> None:
    run = train(recipe("Recorder", changes=["run.group=seeds"]), tmp_path / "run")
    started = {call["member"]: call for call in read(recorded) if "start" in call}
    assert list(started) == [None, 0, 1]
    assert [started[n]["parent"] for n in (None, 0, 1)] == [None, *[started[None]["id"]] * 2]
    assert {(call["group"], call["name"]) for call in started.values()} == {("seeds", "run")}
    assert (started[1]["config"]["optimizer.lr"], started[1]["config"]["train.epochs"]) == ([0.1, 0.05], 3)
    ended = {call["member"]: call for call in read(recorded) if "summary" in call}
    assert list(ended) == [0, 1, None]
    assert ended[1]["summary"] == {"epoch": 3, **logged(run)[1][-1][1], "status": "finished"}
    assert (ended[None]["summary"]["members/finished"], ended[None]["summary"]["epoch"]) == (2, 3)
    assert set(ended[None]["files"]) == {"recipe.toml", "environment.json"}
    assert Recipe.parse(ended[None]["files"]["recipe.toml"]) == run.recipe
    assert ended[0]["files"] == {}


def test_probes_are_sent_with_the_epoch(tmp_path: Path, recorded: Path) -> None:
    probe = ["probe.probes=['average_l2(samples=4)']", "probe.every=2", "probe.samples=8"]
    run = train(recipe("Recorder", changes=probe), tmp_path / "run")
    values = {line["epoch"]: line["rows"][""]["value"] for line in run.log(0) if "probe" in line}
    live = dict(sent(recorded)[0])
    assert {n: epoch.get("probe/average_l2(samples=4)") for n, epoch in live.items()} == {1: None, **values}
    replayed = {n: {k.replace(" ", "/", 1): v for k, v in e.items()} for n, e in stored_epochs(run, 0).items()}
    assert replayed == live


def test_runs_of_a_study_have_its_name_as_group(tmp_path: Path, recorded: Path) -> None:
    text = f'name = "rates"\n[base]\n{TEXT}run = {{trackers = ["toy_trackers:Recorder"]}}\n'
    (tmp_path / "study.toml").write_text(f'{text}[grid]\n"train.epochs" = [1, 2]\n[evaluate]\nmetrics = ["nll"]\n')
    study = Study.load(str(tmp_path / "study.toml"))
    StudyRunner(study, tmp_path / "study", components=Components(trust=("toy_trackers",))).run()
    started = [call for call in read(recorded) if "start" in call]
    assert len({call["name"] for call in started}) == 2
    assert {call["group"] for call in started} == {"rates"}


def test_results_and_files_are_added_and_no_epoch_is_sent_again(tmp_path: Path, recorded: Path) -> None:
    run = train(recipe("Recorder"), tmp_path / "run")
    (ensemble,) = [call["id"] for call in read(recorded) if "start" in call and call["member"] is None]
    (tmp_path / "run" / "report.html").write_text("<p>report</p>")
    (tmp_path / "figure.svg").write_text("<svg/>")
    for number in (0, 1):  # as if the members had not been sent
        (tmp_path / f"run/trackers/tracker-toy_trackers-Recorder/{number}.json").unlink()
    results = plateaux.evaluate(run, metrics=["accuracy"])
    before = len(read(recorded))
    log_results(plateaux.open_run(run, trust=["toy_trackers"]), results, files=[tmp_path / "figure.svg"])
    started, ended = read(recorded)[before:]
    assert (started["start"], started["member"]) == (ensemble, None)
    assert ended["summary"]["test/accuracy"] == results["accuracy"].value
    assert set(ended["files"]) == {"recipe.toml", "environment.json", "report.html", "figure.svg"}
    with pytest.raises(UntrustedCodeError, match="--trust toy_trackers"):
        log_results(run.store.root)


def test_the_command_line_adds_the_results_of_the_evaluation(tmp_path: Path, recorded: Path) -> None:
    done = CliRunner().invoke(app, [*command_line(recipe("Recorder"), tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    measured = {each["metric"]: each for each in json.loads(done.stdout)["metrics"]}
    ended = [call for call in read(recorded) if "summary" in call and call["member"] is None]
    value = measured["accuracy"]["rows"]["ensemble (mean probability)"]["value"]
    assert ended[-1]["summary"]["test/accuracy"] == value


# --- Trackers that fail


def test_trackers_that_fail_do_not_change_training_and_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recorded: Path
) -> None:
    run = train(recipe("Raising", "Recorder", "Exiting", "Missing", "WrongId"), tmp_path / "run")
    plain = train(recipe(), tmp_path / "plain")
    assert [run.weights_hash(n) for n in (0, 1)] == [plain.weights_hash(n) for n in (0, 1)]
    assert logged(run) == logged(plain) == sent(recorded)  # by the one that works
    for name, problem in {
        "Raising": "failed: ConnectionError: the server is not there. Training is not affected.",
        "Exiting": "failed: SystemExit: 7",
        "Missing": "failed: AttributeError: module 'toy_trackers' has no attribute 'Missing'",
        "WrongId": "WrongId.start returned: id = '../outside'",
    }.items():
        text, lost = [text for text in warnings_of(caplog) if f"toy_trackers:{name}' " in text]
        assert problem in text
        assert "run the same command again" in text
        assert "lacks the numbers of 6 epochs of members" in lost


def test_a_tracker_that_works_again_gets_the_missed_epochs_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recorded: Path
) -> None:
    assert logged(train(recipe("Unready"), tmp_path / "run")) == sent(recorded)
    ensemble, *members = [call for call in read(recorded) if "start" in call]
    assert [call["parent"] for call in members] == [ensemble["id"]] * 2
    (text,) = warnings_of(caplog)
    assert "'toy_trackers:Unready' failed: ConnectionError: not yet" in text


@pytest.mark.slow
def test_training_does_not_wait_for_a_hanging_tracker_and_the_next_run_sends_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, recorded: Path
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 2.0)
    run = train(recipe("Hanging", "Recorder", changes=ONE_MEMBER), tmp_path / "run")
    assert run.progress(0).finished
    assert sent(recorded, 1) == logged(run)  # by the one that works
    text, lost = warnings_of(caplog)
    assert "'toy_trackers:Hanging' did not finish within 2 s and was left behind" in text
    assert "lacks the numbers of 3 epochs" in lost
    recorded.unlink()
    (thread,) = [each for each in threading.enumerate() if each.name == "tracker toy_trackers:Hanging"]
    toy_trackers.Hanging.may_go_on.set()
    thread.join()
    assert sent(recorded, 1) == [logged(run)[0][:1]]
    train(recipe("Hanging", changes=ONE_MEMBER), tmp_path / "run")
    assert sent(recorded, 1) == logged(run)


def test_epochs_that_do_not_fit_into_the_queue_are_counted_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, recorded: Path
) -> None:
    monkeypatch.setattr(trackers, "QUEUE_SIZE", 3)

    def pace(event: ProgressEvent) -> None:  # called before the tracker gets the epoch
        if isinstance(event, MemberUpdate) and event.completed_epoch == 2:
            wait_until(lambda: any("hangs" in call for call in read(recorded)))
        if isinstance(event, MemberUpdate) and event.completed_epoch == 10:
            toy_trackers.Hanging.may_go_on.set()
            wait_until(lambda: len(sent(recorded, 1)[0]) == 4)

    changes = [*ONE_MEMBER, "train.epochs=10", "run.checkpoint_every_epochs=10"]
    run = train(recipe("Hanging", changes=changes), tmp_path / "run", progress=pace)
    assert [epoch for epoch, _ in sent(recorded, 1)[0]] == [1, 2, 3, 4, 10]
    assert sent(recorded, 1)[0][-1] == logged(run)[0][-1]
    (text,) = warnings_of(caplog)
    assert "lacks the numbers of 5 epochs of members" in text


def test_a_link_in_the_run_folder_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard", reason='TensorBoard is not installed: pip install "plateaux[tensorboard]"')
    for folder in ("elsewhere", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run/tensorboard").symlink_to(tmp_path / "elsewhere")
    plateaux.train(Recipe.parse(TEXT, ["run.trackers=['tensorboard']"]), tmp_path / "run")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert "symbolic link" in warnings_of(caplog)[0]


# --- Restarts

KILLED = """
import json, os, pathlib, signal, sys, plateaux
from waiting import wait_until

def has(member, step):
    file = pathlib.Path(sys.argv[2], f"trackers/tracker-toy_trackers-Recorder/{member}.json")
    return file.exists() and json.loads(file.read_text())["step"] == step

def kill(event):
    if (getattr(event, "member", None), getattr(event, "completed_epoch", None)) == (1, 3):
        wait_until(lambda: has(0, 3) and has(1, 2))
        os.kill(os.getpid(), signal.SIGKILL)

plateaux.train(plateaux.Recipe.load(sys.argv[1]), sys.argv[2], trust=["toy_trackers"], progress=kill)
"""


@pytest.mark.process
def test_a_killed_run_continues_the_same_runs_of_the_tracker(tmp_path: Path, recorded: Path) -> None:
    what = recipe("Recorder", changes=["run.checkpoint_every_epochs=2"])
    _, file, _, out, *_ = command_line(what, tmp_path)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    assert subprocess.run([sys.executable, "-c", KILLED, file, out], env=env).returncode == -signal.SIGKILL
    first = {call["member"]: call["id"] for call in read(recorded) if "start" in call}
    assert [len(epochs) for epochs in sent(recorded)] == [3, 2]
    before = len(read(recorded))
    run = train(what, tmp_path / "run")
    assert sent(recorded) == logged(run)
    again = {call["member"]: call["start"] for call in read(recorded)[before:] if "start" in call}
    assert again == first
    assert verify(run).damaged == {}


def stop(event: ProgressEvent) -> None:
    if isinstance(event, MemberUpdate) and event.completed_epoch == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def test_trackers_get_the_status_of_stopped_and_failed_runs(tmp_path: Path, recorded: Path) -> None:
    with pytest.raises(Interrupted):
        train(recipe("Recorder"), tmp_path / "stopped", progress=stop)
    assert {call["summary"]["status"] for call in read(recorded) if "summary" in call} == {"stopped"}
    recorded.unlink()
    with pytest.raises(DivergedError):
        train(recipe("Recorder", changes=["optimizer.lr=1e30"]), tmp_path / "failed")
    assert {call["summary"]["status"] for call in read(recorded) if "summary" in call} == {"failed"}


def test_a_tracker_that_is_added_later_gets_the_epochs_before_once(tmp_path: Path, recorded: Path) -> None:
    train(recipe(), tmp_path / "run")
    assert not recorded.exists()
    for _ in range(2):
        run = train(recipe("Recorder"), tmp_path / "run")
        assert sent(recorded) == logged(run)


def test_a_tracker_that_begins_a_new_run_gets_all_epochs(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted):
        train(recipe("Recorder"), tmp_path / "run", progress=stop)
    recorded.unlink()

    def start_a_new_run(self: toy_trackers.Recorder, run: Any, config: Any) -> str:  # the old one was deleted
        self.member, self.id = run.member, "new"
        return self.id

    monkeypatch.setattr(toy_trackers.Recorder, "start", start_a_new_run)
    run = train(recipe("Recorder"), tmp_path / "run")
    assert sent(recorded) == logged(run)
