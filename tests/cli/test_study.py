"""A study trains nothing twice, its results file contains all results, and a dry run does nothing."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import GIVEN
from typer.testing import CliRunner

from plateaux.cli.main import app
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DivergedError, RecipeError, RunError
from plateaux.core.progress import MemberUpdate, Message, ProgressEvent
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run
from plateaux.studies.comparison import Comparison
from plateaux.studies.result_rows import ResultRow, read_results, results_from_study
from plateaux.studies.runner import AUTOTUNE, StudyRunner
from plateaux.studies.study import Study

BASE: dict[str, Any] = {
    "members": 2,
    "data": {"name": "blobs", "samples": 30, "test_samples": 12, "batch_size": 10},
    "model": {"name": "mlp", "hidden_sizes": [4]},
    "method": {"name": "sam", "rho": 0.1},
    "optimizer": {"name": "SGD", "lr": 0.1},
    "train": {"epochs": 4},
    "executor": {"threads": 1},
}
BALANCED = {"method": {"name": "sharpbalance", "rho": 0.1, "partition_epoch": 2}}
CONDITIONS = {"plain": {"method": {"rho": 0.0}}, "sam": {}, "paper": BALANCED}
MEASURE = {"metrics": ["accuracy", "nll"]}
SMALL = {"base": BASE, "grid": {"method": CONDITIONS}, "evaluate": MEASURE}


def study(**parts: Any) -> Study:
    return Study.from_dict({**SMALL, **parts})


class Events(list[Any]):
    """The progress events of a study, and the epochs it trained."""

    def epochs(self) -> Counter[tuple[int, int]]:
        return Counter(
            (event.member, event.completed_epoch)
            for event in self
            if isinstance(event, MemberUpdate) and event.completed_epoch is not None
        )

    def messages(self) -> list[str]:
        return [event.text for event in self if isinstance(event, Message)]


def run_study(what: Study, root: Path, **options: Any) -> tuple[dict[str, Any], Events]:
    events = Events()
    return StudyRunner(what, root, progress=events.append, **options).run(), events


def test_members_and_epochs_shared_by_conditions_are_trained_once(tmp_path: Path) -> None:
    conditions = {**CONDITIONS, "sam again": {"run": {"log_every": 1}}, "small": {"members": 1}}
    results, events = run_study(study(grid={"method": conditions}), tmp_path / "all")
    # Two members: four epochs of plain, four of sharpbalance that include the shared ones, and the last two of SAM.
    assert sum(events.epochs().values()) == 2 * (4 + 4 + 2)
    assert len(list((tmp_path / "all" / "runs").iterdir())) == 3 + 1  # and the lock
    assert len(results["conditions"]) == 5
    assert len(results["runs"]) == 4
    by = {each["condition"]["method"]: each["run"] for each in results["conditions"]}
    assert by["sam"] == by["sam again"] != by["small"]
    assert by["sam"].split("-")[0] == by["small"].split("-")[0]


def test_a_run_that_starts_from_shared_epochs_equals_a_full_run(tmp_path: Path) -> None:
    shared, _ = run_study(study(), tmp_path / "shared")
    alone, _ = run_study(study(), tmp_path / "alone", filter_pattern="method=sam #0")
    run = next(iter(alone["runs"]))
    for name in ("metrics", "log"):
        assert alone["runs"][run][name] == shared["runs"][run][name]


def test_a_repeated_call_trains_nothing_and_more_repetitions_train_only_new_runs(tmp_path: Path) -> None:
    before, _ = run_study(study(), tmp_path)
    again, events = run_study(study(), tmp_path)
    assert again == before
    assert not events.epochs()
    more, events = run_study(study(repetitions=2), tmp_path)
    assert sum(events.epochs().values()) == 2 * (4 + 4 + 2)
    assert {run: more["runs"][run] for run in before["runs"]} == before["runs"]


def test_runs_finished_by_another_process_are_not_repeated(tmp_path: Path) -> None:
    events, others = Events(), Events()

    def progress(event: ProgressEvent) -> None:
        events.append(event)
        if isinstance(event, Message) and event.text.startswith("run 1 of 3") and not others:
            others.append(Message("started"))
            StudyRunner(study(), tmp_path, progress=others.append, filter_pattern="*paper*").run()

    results = StudyRunner(study(), tmp_path, progress=progress).run()
    assert len(results["runs"]) == 3
    trained = Counter(events.epochs().values()) + Counter(others.epochs().values())
    assert sum(events.epochs().values()) == 2 * (
        4 + 2
    )  # of plain, and of SAM after the epochs it shares with the other
    assert sum(trained.values()) > 0


ANOTHER = """
import sys
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study

StudyRunner(Study.load(sys.argv[1]), sys.argv[2], progress=lambda event: print(event, flush=True)).run()
"""


def test_a_second_process_waits_for_a_run_and_reads_no_deleted_weights(tmp_path: Path) -> None:
    """Both serve an ensemble of one and of two members from one run, whose weights are deleted at its end."""
    recipe = Recipe.from_dict({**BASE, "train": {"epochs": 8}})
    (tmp_path / "base.toml").write_text(recipe.to_toml())
    lines = [
        'base = "base.toml"',
        "keep_weights = false",
        "grid = {members = [1, 2]}",
        "evaluate = {metrics = ['nll']}",
    ]
    (tmp_path / "study.toml").write_text("\n".join(lines))
    words = [sys.executable, "-c", ANOTHER, str(tmp_path / "study.toml"), str(tmp_path / "out")]
    others: list[subprocess.Popen[str]] = []
    events: list[str] = []

    def progress(event: ProgressEvent) -> None:
        if isinstance(event, MemberUpdate) and not others:  # training has begun
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            others.append(subprocess.Popen(words, env=environment, stdout=-1, text=True))
            for line in others[0].stdout or ():
                events.append(line)
                if "Waiting for another process" in line:
                    return

    results = StudyRunner(Study.load(tmp_path / "study.toml"), tmp_path / "out", progress=progress).run()
    rest, _ = others[0].communicate()
    assert others[0].returncode == 0
    assert "Waiting for another process" in events[-1]
    assert "MemberUpdate" not in "".join([*events, rest])
    assert len(results["runs"]) == 2
    assert read_results(tmp_path / "out") == results
    assert not list(tmp_path.glob("out/runs/*/members/*/*.safetensors"))


def test_results_of_other_evaluation_settings_are_excluded(tmp_path: Path) -> None:
    run_study(study(repetitions=2), tmp_path)
    assert {each.repetition for each in results_from_study(tmp_path)} == {0, 1}
    run_study(
        study(repetitions=2, evaluate={"metrics": ["accuracy"], "splits": ["test", "train"]}),
        tmp_path,
        filter_pattern="*#0",
    )
    assert {each.repetition for each in results_from_study(tmp_path)} == {0}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"evaluate": {**MEASURE, "splits": ["tset"]}}, "no split called 'tset'"),
        ({"evaluate": {**MEASURE, "corruptions": ["corupted@10"]}}, "no split called 'corupted'"),
        ({"evaluate": {**MEASURE, "ood": ["near=blops"]}}, "blops"),
        ({"landscape": {"probes": ["fisher_rao"], "split": "tarin"}}, "no split called 'tarin'"),
    ],
)
def test_missing_samples_are_reported_before_training(parts: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((RecipeError, RunError), match=message):
        run_study(study(**parts), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_first_repetition_of_all_conditions_runs_before_the_second(tmp_path: Path) -> None:
    _, events = run_study(study(repetitions=2, grid={"method.rho": [0.0, 0.1]}), tmp_path)
    runs = [text for text in events.messages() if text.startswith("run ")]
    assert [re.split("[:;]", each)[1] for each in runs] == [" rho=0.0 #0", " rho=0.1 #0", " rho=0.0 #1", " rho=0.1 #1"]
    assert "left" in runs[1]


def test_train_states_of_shared_epochs_are_deleted_after_their_last_use(tmp_path: Path) -> None:
    run_study(study(), tmp_path, filter_pattern="*paper*")
    assert list(tmp_path.glob("runs/*/members/0/resume-*"))
    run_study(study(), tmp_path)
    assert not list(tmp_path.glob("runs/*/members/*/resume-*"))


def test_results_json_contains_all_metrics_of_the_runs(tmp_path: Path) -> None:
    results, _ = run_study(study(), tmp_path / "study")
    file = tmp_path / "carried.json"
    (tmp_path / "study" / "results.json").rename(file)
    found = results_from_study(file)
    assert {each.condition["method"] for each in found} == {"plain", "sam", "paper"}
    (one,) = [e for e in found if (e.condition["method"], e.metric, e.row) == ("sam", "accuracy", "member 1")]
    folder = tmp_path / "study" / results["runs"][one.run]["folder"]
    (kept,) = [json.loads(path.read_text()) for path in (folder / "metrics").glob("accuracy-*.json")]
    assert kept["rows"]["member 1"]["value"] == one.value
    costs = {e.condition["method"]: e.value for e in found if (e.metric, e.row) == ("passes", "mean of members")}
    assert (costs["plain"], costs["sam"]) == (4, 8)
    assert 4 + 1 + 2 <= costs["paper"] <= 4 + 1 + 4


def test_without_keep_weights_only_metrics_are_kept(tmp_path: Path) -> None:
    kept, _ = run_study(study(), tmp_path / "kept")
    dropped, _ = run_study(study(keep_weights=False), tmp_path / "dropped")
    assert not list(tmp_path.glob("dropped/runs/*/members/*/*.safetensors"))
    assert not list(tmp_path.glob("dropped/runs/*/predictions/*/*"))
    for run in kept["runs"]:
        assert kept["runs"][run]["metrics"] == dropped["runs"][run]["metrics"]
    _, events = run_study(study(keep_weights=False), tmp_path / "dropped")
    assert not events.epochs()


def test_a_new_metric_of_deleted_weights_trains_them_again(tmp_path: Path) -> None:
    what = {"keep_weights": False, "grid": {"method.rho": [0.1]}}
    run_study(study(**what), tmp_path)
    results, events = run_study(study(**what, evaluate={"metrics": ["brier"]}), tmp_path)
    assert sum(events.epochs().values()) == 8
    assert any("trained again" in text for text in events.messages())
    assert [each["metric"] for each in next(iter(results["runs"].values()))["metrics"]] == ["brier"]


def test_a_new_metric_of_stored_weights_trains_nothing(tmp_path: Path) -> None:
    run_study(study(), tmp_path)
    _, events = run_study(study(evaluate={"metrics": ["brier"], "splits": ["test", "train"]}), tmp_path)
    assert not events.epochs()


def test_all_requested_metrics_are_evaluated(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    x, y = chance.integers(0, 256, (40, 3, 32, 32), dtype=np.uint8), np.arange(40) % 3
    np.savez(tmp_path / "images.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:])
    data = {"name": "arrays", "path": "images.npz", "root": str(tmp_path), "batch_size": 20}
    base = {**BASE, "data": data, "train": {"epochs": 1}}
    corrupted = ["corrupted:brightness:1@10", "corrupted:contrast:5@10"]
    parts = {
        "base": base,
        "grid": {},
        "evaluate": {
            "metrics": ["accuracy", "der"],
            "ood": ["near=digits"],
            "ensemble_sizes": True,
            "corruptions": corrupted,
        },
        "landscape": {"probes": ["fisher_trace"], "samples": 10},
    }
    results, _ = run_study(study(**parts), tmp_path / "out")
    (entry,) = results["runs"].values()
    names = [(each["metric"], each["split"]) for each in entry["metrics"]]
    assert ("accuracy by size", "test") in names
    assert ("ood", "digits (near)") in names
    assert ("accuracy under corruption", "corrupted") in names
    assert ("fisher_trace", "train") in names
    assert entry["metrics"][-1]["data"]["samples"] == 10


def test_autotuning_runs_once_per_study(tmp_path: Path) -> None:
    base = {**BASE, "train": {"epochs": 4, "precision": "auto"}}
    results, events = run_study(study(base=base, repetitions=2), tmp_path)
    assert sum("autotuned" in text for text in events.messages()) == 1
    (chosen,) = LocalStore(tmp_path).get_json(AUTOTUNE).values()
    assert {entry["recipe"]["train"]["precision"] for entry in results["runs"].values()} == {chosen["precision"]}


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"lr=1000000000"):
        run_study(study(grid={"optimizer.lr": [1e9, 0.1]}), tmp_path)
    assert {each.condition["lr"] for each in results_from_study(tmp_path)} == {0.1}


def test_invalid_studies_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    for parts, words in (
        ({"evaluate": {"metrics": ["acuracy"]}}, "accuracy"),
        ({"landscape": {"probes": ["worst"]}}, "worst_l2"),
        ({"grid": {"train.early_stopping_patience": [2]}}, "patience"),
    ):
        with pytest.raises(RecipeError, match=words):
            StudyRunner(study(**parts), tmp_path / "out").run()
    assert not (tmp_path / "out").exists()


# Forks a process that carries out the study for every line it reads, and says how each ended.
FORKING = """
import os, sys, traceback
from pathlib import Path
import torch
from plateaux.core import registry
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study

root, now = Path(sys.argv[1]), [""]

def train(self, recipe, folder, span, before=StudyRunner._train):
    now[0] = folder.name
    before(self, recipe, folder, span)

def life():
    torch.set_num_threads(1)
    log = open(root / "log", "a", buffering=1)

    def progress(event):
        if getattr(event, "completed_epoch", None) is not None:
            log.write(f"{now[0]} {event.completed_epoch} {event.member}\\n")

    StudyRunner(Study.load(root / "study.toml"), root / "out", progress=progress).run()

StudyRunner._train = train
for kind in (registry.method, registry.metric, registry.dataset, registry.model, registry.executor, registry.probe):
    kind.names()
for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            life()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_study_killed_at_random_and_restarted_trains_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(Recipe.from_dict({**BASE, "train": {"epochs": 8}}).to_toml())
    lines = ['base = "base.toml"', "[grid.method]", "plain = {method = {rho = 0.0}}", "sam = {}"]
    lines += [
        'paper = {method = {name = "sharpbalance", rho = 0.1, partition_epoch = 4}}',
        "[evaluate]",
        'metrics = ["nll"]',
    ]
    (tmp_path / "study.toml").write_text("\n".join(lines))
    log, chance, codes = tmp_path / "log", random.Random(1), [1]
    log.touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", FORKING, str(tmp_path)]
    with subprocess.Popen(words, env=environment, stdin=-1, stdout=-1, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        while codes[-1] != 0:
            server.stdin.write("\n")
            server.stdin.flush()
            pid, before = int(server.stdout.readline()), len(log.read_text().splitlines())
            more = chance.randint(2, 9) if len(codes) < 4 else 10**9
            while more < 10**9 and len(log.read_text().splitlines()) < before + more:
                time.sleep(0.001)
            if more < 10**9:
                time.sleep(chance.random() / 100)
                os.kill(pid, signal.SIGKILL)
            codes.append(int(server.stdout.readline()))
        server.stdin.close()
    assert codes[1:] == [-signal.SIGKILL] * 3 + [0]
    trained = Counter(log.read_text().splitlines())
    # A kill may fall between an epoch's end and its checkpoint: then that epoch is trained again, and no other.
    assert len({line.rsplit(" ", 1)[0] for line in trained if trained[line] > 1}) <= 3
    assert len(trained) == 2 * (8 + 8 + 4)  # members; SAM begins from the span
    assert sum(trained.values()) <= len(trained) + 3 * 2
    whole, _ = run_study(Study.load(tmp_path / "study.toml"), tmp_path / "whole")
    killed = read_results(tmp_path / "out")
    for run, entry in whole["runs"].items():
        assert killed["runs"][run]["metrics"] == entry["metrics"]
        assert killed["runs"][run]["log"] == entry["log"]


def test_a_mesh_is_started_for_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, list[str]]] = []
    monkeypatch.setattr("plateaux.studies.runner.run_torchrun", lambda *words, **_: calls.append(words) or 3)
    with pytest.raises(RunError, match="exit code 3"):
        run_study(study(), tmp_path, executor={"name": "mesh", "processes": 2}, components=GIVEN)
    ((processes, words),) = calls
    assert processes == 2
    assert words[-2:] == ["--trust", "cases"]
    recipe = Recipe.load(words[words.index("train") + 1])
    assert (recipe.executor.name, recipe.method.name) == ("mesh", "sam")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text(Recipe.from_dict(BASE).to_toml())
    lines = ['base = "base.toml"', "baseline = {rho = 0.0}", "[grid]", "method.rho = [0.0, 0.1]"]
    found = tmp_path / "small.toml"
    found.write_text("\n".join([*lines, "[evaluate]", 'metrics = ["accuracy", "nll"]']))
    return found


def call(*words: Any) -> Any:
    return CliRunner().invoke(app, ["study", *map(str, words)])


def test_a_dry_run_runs_nothing_and_writes_nothing(file: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = call(file, "--out", tmp_path / "out", "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert sorted(tmp_path.rglob("*")) == before
    plan = json.loads(done.stdout)
    assert plan["passes"] == 2 * 4 + 2 * 8
    assert [run["conditions"] for run in plan["runs"]] == [["rho=0.0 #0"], ["rho=0.1 #0"]]
    assert [run["passes"] for run in plan["runs"]] == [2 * 4, 2 * 8]


def test_a_dry_run_refuses_a_table_of_a_metric_that_is_not_measured(file: Path, tmp_path: Path) -> None:
    table = (
        '\n[[tables]]\ntitle = "T"\ncolumns = [{ title = "a", metric = "accuracy" }, { title = "b", metric = "%s" }]'
    )
    text = file.read_text()
    file.write_text(text + table % "acuracy")
    done = call(file, "--out", tmp_path / "out", "--dry-run")
    assert done.exit_code == 2
    assert "'T' has a column of 'acuracy', which this study does not measure; did you mean 'accuracy'?" in done.stderr
    file.write_text(text + table % "seconds")
    assert call(file, "--out", tmp_path / "out", "--dry-run").exit_code == 0


def test_an_address_needs_an_executor_with_a_cluster(file: Path, tmp_path: Path) -> None:
    for command in (["study", str(file)], ["train", "quickstart"]):
        words = [*command, "--address", "127.0.0.1:6379", "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2
        assert "the executor is 'local': add --executor ray" in done.stderr
        assert not (tmp_path / "out" / "runs").exists()


def test_an_address_is_checked_for_every_run(tmp_path: Path) -> None:
    file = tmp_path / "two_executors.toml"
    (tmp_path / "base.toml").write_text(Recipe.from_dict({**BASE, "executor": {"name": "ray"}}).to_toml())
    cluster, here = "cluster = {method = {rho = 0.0}}", 'here = {executor = {name = "local"}}'
    file.write_text("\n".join(['base = "base.toml"', "[grid.place]", cluster, here]))
    done = call(file, "--address", "127.0.0.1:6379", "--dry-run", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "--address 127.0.0.1:6379 is for a Ray cluster, but the executor is 'local'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_dry_run_prints_text_also_in_a_pipe(file: Path, tmp_path: Path) -> None:
    words = call(file, "--out", tmp_path / "out", "--dry-run").stdout
    assert "2 runs are pending: 24 passes over the training samples" in words


def test_the_command_trains_evaluates_and_compares(file: Path, tmp_path: Path) -> None:
    done = call(file, "--out", tmp_path / "out", "--processes", "1", "--executor", "local", "--json")
    assert done.exit_code == 0, done.output
    means, differences = json.loads(done.stdout)["tables"]
    assert means["header"][1] == "accuracy, test %"
    assert [row[0] for row in means["rows"]] == ["rho=0.0", "rho=0.1"]
    assert differences["title"] == "difference from rho=0.0"
    table = call(file, "--out", tmp_path / "out", "--results-only", "--json")
    assert json.loads(table.stdout) == json.loads(done.stdout)


def test_a_filter_that_matches_nothing_is_rejected_with_the_names_of_the_runs(file: Path, tmp_path: Path) -> None:
    done = call(file, "--out", tmp_path / "out", "--filter", "*width*")
    assert done.exit_code == 2
    assert "rho=0.1 #0" in done.stderr


def finding(number: float, repetition: int = 0, measure: str = "accuracy", **condition: Any) -> ResultRow:
    row = "mean of members" if measure in ("epochs", "passes", "seconds") else "ensemble (mean probability)"
    on = "training" if row == "mean of members" else "test"
    return ResultRow("r", condition, repetition, measure, on, row, number, None, None, True, measure == "accuracy")


def test_a_condition_is_compared_with_the_baseline_of_equal_other_factors() -> None:
    ways = [{"method": "plain"}, {"method": "sam", "rho": 0.1}, {"method": "sam", "rho": 0.2}]
    found = [
        finding(0.5 + (0.1 + 0.005 * (2 * r - 1)) * place + 0.2 * (w == 8), r, **way, width=w)
        for place, way in enumerate(ways) for w in (8, 16) for r in (0, 1)
    ]  # fmt: skip
    made = Comparison(found, {"method": "plain"})
    assert made.baseline_for({"method": "sam", "rho": 0.2, "width": 8}) == {"method": "plain", "width": 8}
    assert made.difference({"method": "sam", "rho": 0.2, "width": 8}, made.columns()[0]).value == pytest.approx(0.2)
    means, differences = made.tables()
    assert len(means.rows) == 6
    assert differences.text_rows()[0] == [
        "method=sam, rho=0.1, width=8",
        "10.0 ± 6.4",
    ]  # t of one degree times half a point
    assert Comparison(found, {"method": "none"}).tables() == [means]
    assert Comparison([finding(float("nan"))]).tables()[0].text_rows() == [["base", ""]]


def test_runs_of_several_lengths_are_compared_at_equal_cost() -> None:
    found = []
    for r in (0, 1):
        for rho, passes in ((0.0, 1), (0.1, 2)):
            for epochs in (10, 20):
                way = {"rho": rho, "epochs": epochs}
                found += [finding(0.5 + rho + epochs / 100, r, **way), finding(epochs, r, "epochs", **way)]
                found += [finding(epochs * passes, r, "passes", **way), finding(epochs * passes, r, "seconds", **way)]
    made = Comparison(found, {"rho": 0.0})
    *_, epochs, passes, seconds = made.tables()
    assert [grid.title for grid in (epochs, passes, seconds)] == [
        f"difference at equal {by}" for by in ("epochs", "passes", "seconds")
    ]
    assert epochs.text_rows() == [["rho=0.1", "20", "10.00"]]
    assert passes.text_rows() == [["rho=0.1", "20", "0.00"]]  # ten epochs of two passes against twenty of one
    assert len(made.at_equal_cost({"rho": 0.3}, made.columns()[0], "passes")) == 2


def test_a_run_folder_of_a_study_is_a_complete_run(tmp_path: Path) -> None:
    results, _ = run_study(study(grid={"method.rho": [0.1]}), tmp_path)
    (entry,) = results["runs"].values()
    run = Run.open(tmp_path / entry["folder"])
    assert all(each.finished for each in run.all_progress())
    assert Recipe.from_dict(entry["recipe"]).identity() == run.recipe.identity()
