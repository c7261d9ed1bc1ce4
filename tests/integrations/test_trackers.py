"""Built-in trackers with the real packages: numbers are read back, and a killed run is continued."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.wandb_file import records

import plateaux
from plateaux.config.recipe import Recipe
from plateaux.storage.run import Run

TESTS = Path(__file__).parents[1]
MLFLOW_PYTHON = os.environ.get("PLATEAUX_MLFLOW_PYTHON", "")
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
name = "SGD"
lr = 0.1
[train]
epochs = 3
[executor]
threads = 1
[probe]
probes = ["average_l2(samples=4)"]
every = 3
samples = 8
[run]
group = "demo"
"""
# Trains, and gets a signal when member 1 has finished its second epoch, if one is given. Before, it waits until all
# numbers are recorded as sent (W&B: at close), because a kill between sending and recording sends them twice.
SCRIPT = """
import json, os, pathlib, signal, sys, plateaux
from waiting import wait_until

def has(member, step):
    file = pathlib.Path(sys.argv[2], "trackers", sys.argv[3], f"{member}.json")
    return file.exists() and json.loads(file.read_text())["step"] >= step * (sys.argv[3] != "wandb")

def send_signal(event):
    at = getattr(event, "member", None), getattr(event, "completed_epoch", None)
    if sys.argv[4] and at == (1, 2):
        wait_until(lambda: has(0, 2) and has(1, 1))
        os.kill(os.getpid(), signal.Signals[sys.argv[4]])

if __name__ == "__main__":
    recipe = plateaux.Recipe.load(sys.argv[1], [f"run.trackers=['{sys.argv[3]}']"])
    try:
        plateaux.train(recipe, sys.argv[2], trust=[sys.argv[3]], progress=send_signal)
    except plateaux.core.errors.Interrupted:
        sys.exit(-signal.SIGTERM)
"""


def ended_and_resumed(
    folder: Path, tracker: str, env: Mapping[str, str], python: str = sys.executable, number: str = "SIGKILL"
) -> tuple[Run, list[dict[str, Any]]]:
    """Train with a tracker, ended once by a signal; return the run, and what its trackers stored before and after."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "recipe.toml").write_text(TEXT)
    path = os.pathsep.join([str(Path(plateaux.__file__).parents[1]), str(TESTS)])
    stored = []
    for how in (number, ""):
        command = [python, str(folder / "script.py"), str(folder / "recipe.toml"), str(folder / "run"), tracker, how]
        ended = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path, **env}, cwd=folder, capture_output=True, text=True
        )
        code = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 256 - signal.SIGTERM, "": 0}[how]
        assert ended.returncode == code, ended.stderr
        assert "tracker" not in ended.stderr, ended.stderr
        files = sorted((folder / "run/trackers" / tracker).glob("*.json"))
        stored.append({file.stem: json.loads(file.read_text()) for file in files})
    run = Run.open(folder / "run")
    assert stored[1].keys() == {"0", "1", "ensemble"}
    assert {name: stored[1][name]["step"] for name in ("0", "1")} == {"0": 3, "1": 3}
    return run, stored


def logged(run: Run, member: int) -> dict[str, dict[int, float]]:
    """Return the numbers in the log of a member, by the name that trackers get."""
    numbers: dict[str, dict[int, float]] = {}
    for line in run.log(member):
        if "probe" in line:
            values = {f"probe/{line['probe']}": line["rows"][""]["value"]}
        else:
            values = {name.replace(" ", "/", 1): value for name, value in line.items() if name != "epoch"}
        for name, value in values.items() if "step" not in line else ():
            numbers.setdefault(name, {})[line["epoch"]] = value
    assert set(numbers["train/loss"]) == {1, 2, 3}
    assert numbers.keys() >= {"validation/nll", "validation/accuracy", "probe/average_l2(samples=4)"}
    return numbers


@pytest.fixture
def wandb_environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which W&B is offline and writes to the folder of the test only."""
    pytest.importorskip("wandb", reason='W&B is not installed: pip install "plateaux[wandb]"')
    names = ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "HOME")
    for name in names:
        (tmp_path / name).mkdir()
    return {"WANDB_MODE": "offline", **{name: str(tmp_path / name) for name in names}}


def wandb_runs(folder: Path) -> list[dict[str, list[Any]]]:
    """Return the records of every offline run by their kind, in the order of the files."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.parent.name):
        kinds: dict[str, list[Any]] = {}
        for record in records(file):
            kind = record.WhichOneof("record_type")
            kinds.setdefault(kind, []).append(getattr(record, kind))
        found.append(kinds)
    return [kinds for kinds in found if "run" in kinds]  # W&B writes after seconds, which a kill prevents


def items(values: Sequence[Any]) -> dict[str, Any]:
    return {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in values}


@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_wandb_has_the_numbers_of_a_run_that_was_ended(
    tmp_path: Path, wandb_environment: dict[str, str], number: str
) -> None:
    run, stored = ended_and_resumed(tmp_path, "wandb", wandb_environment, number=number)
    found = wandb_runs(tmp_path / "WANDB_DIR")
    for member in ("0", "1"):
        known = stored[1][member]["id"]
        own = [kinds for kinds in found if kinds["run"][0].run_id == known]
        assert stored[0].get(member, {"id": known})["id"] == known
        if number == "SIGKILL":  # all epochs are sent again
            own = own[-1:]
        rows = [items(row.item) for kinds in own for row in kinds.get("history", ())]
        numbers: dict[str, dict[int, float]] = {}
        for row in rows:
            for name in row.keys() - {"epoch", "_step", "_timestamp", "_runtime"}:
                assert row["epoch"] not in numbers.setdefault(name, {}), "logged twice"
                numbers[name][row["epoch"]] = row[name]
        assert numbers == logged(run, int(member))
        assert [row["_step"] for row in rows] == [1, 2, 3]
        config = items(own[-1]["run"][0].config.update)
        assert (config["member"], config["optimizer.lr"], config["group"]) == (int(member), 0.1, "demo")
    assert {kinds["run"][0].run_group for kinds in found} == {"demo"}
    assert {kinds["run"][0].project for kinds in found} == {"plateaux"}
    last = [kinds for kinds in found if kinds["run"][0].run_id == stored[1]["ensemble"]["id"]][-1]
    (artifact,) = last["artifact"]
    assert {each.path for each in artifact.manifest.contents} == {"recipe.toml", "environment.json"}
    summary = items([update for each in last["summary"] for update in each.update])
    assert (summary["summary/status"], summary["summary/members/finished"]) == ("finished", 2)


def test_tensorboard_has_the_numbers_of_a_run_that_was_killed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason='TensorBoard is not installed: pip install "plateaux[tensorboard]"')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = ended_and_resumed(tmp_path, "tensorboard", {})
    for member in (0, 1):
        events = EventAccumulator(str(tmp_path / f"run/tensorboard/{member}")).Reload()
        written = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
        expected = logged(run, member)  # TensorBoard stores float32
        assert written == {
            name: [(step, float(np.float32(value))) for step, value in sorted(by_step.items())]
            for name, by_step in expected.items()
        }
    ensemble = EventAccumulator(str(tmp_path / "run/tensorboard/ensemble")).Reload()
    assert [event.value for event in ensemble.Scalars("summary/members/finished")][-1] == 2.0
    files = list((tmp_path / "run/tensorboard").rglob("events.*"))
    assert files
    assert not any(socket.gethostname() in file.name for file in files)


@pytest.mark.slow
@pytest.mark.skipif(
    not MLFLOW_PYTHON,
    reason="set PLATEAUX_MLFLOW_PYTHON to a Python with plateaux[mlflow], in a venv of its own: it needs 620 MB",
)
def test_mlflow_has_the_numbers_of_a_run_that_was_killed(tmp_path: Path) -> None:
    env = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    run, stored = ended_and_resumed(tmp_path, "mlflow", env, python=MLFLOW_PYTHON)
    store = sqlite3.connect(tmp_path / "mlflow.db")
    runs = {
        row[0]: row for row in store.execute("select run_uuid, name, status, artifact_uri, experiment_id from runs")
    }
    ids = {name: each["id"] for name, each in stored[1].items()}
    assert set(ids.values()) == set(runs)
    assert {name: stored[0][name]["id"] for name in stored[0]} == {name: ids[name] for name in stored[0]}
    for member in (0, 1):
        numbers: dict[str, dict[int, float]] = {}
        query = "select key, value, step from metrics where run_uuid = ? order by step"
        for name, value, step in store.execute(query, (ids[str(member)],)):
            assert step not in numbers.setdefault(name, {}), "logged twice"
            numbers[name][step] = value
        expected = logged(run, member)
        expected["probe/average_l2_samples_4_"] = expected.pop("probe/average_l2(samples=4)")
        assert numbers == expected
        tags = dict(store.execute("select key, value from tags where run_uuid = ?", (ids[str(member)],)))
        assert (tags["mlflow.parentRunId"], tags["plateaux.group"]) == (ids["ensemble"], "demo")
        params = dict(store.execute("select key, value from params where run_uuid = ?", (ids[str(member)],)))
        assert (params["optimizer.lr"], params["train.epochs"]) == ("0.1", "3")
    assert {row[2] for row in runs.values()} == {"FINISHED"}
    (experiment,) = {row[4] for row in runs.values()}
    assert dict(store.execute("select experiment_id, name from experiments"))[experiment] == "demo"
    artifacts = Path(runs[ids["ensemble"]][3])
    assert Recipe.parse((artifacts / "recipe.toml").read_text()).run.group == "demo"
