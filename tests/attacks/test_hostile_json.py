"""Every JSON file of a run, with wrong types, missing keys, huge numbers, and deep nesting, under every command."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attacking import attack, chosen

import plateaux
from plateaux.core.progress import MemberUpdate
from plateaux.training.job_records import JobRecorder
from plateaux.training.jobs import Job

RECIPE = """
members = 2
[data]
name = "moons"
samples = 80
test_samples = 40
validation_split = 0.2
[model]
name = "mlp"
hidden_sizes = [4]
[method]
name = "sharpbalance"
partition_epoch = 1
[train]
epochs = 2
[run]
keep_checkpoints = "last"
"""
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**400, 1e308, "", "x", "\u001b[2J", [], {}, [[]], [None], {"": None}, ["x"] * 3,
)  # fmt: skip
DEEP = '{"a":' * 1_000_000
COMMANDS = (
    ["status", "{run}", "--json"], ["plan", "{run}"],
    ["evaluate", "{run}", "--metrics", "accuracy"], ["evaluate", "{run}", "--calibrated", "--exclude-calibration-ids"],
    ["predict", "{run}", "--split", "test", "--out", "{out}/p.csv"], ["report", "{run}", "--out", "{out}/r.csv"],
    ["train", "{run}/recipe.toml", "--out", "{run}", "--no-evaluate"],
)  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with one of every JSON file."""
    root = tmp_path_factory.mktemp("json") / "run"
    run = plateaux.train(plateaux.Recipe.parse(RECIPE), root)
    plateaux.evaluate(run, metrics="accuracy")
    plateaux.calibrate(run)
    recorder = JobRecorder(run, Job((0, 1), (0, 0), 2), lambda _: None, enabled=True)
    recorder.progress(MemberUpdate(0, epochs=2, epoch=1, steps=3, step=1, metrics={"loss": 0.5}))
    recorder.finish("done")
    return root


def mutations(tree: Any) -> Iterator[Any]:
    """Yield the tree with each of its parts deleted, and replaced by each hostile value."""
    for path in paths(tree):
        yield changed(tree, path, None, delete=True)
        for value in HOSTILE:
            yield changed(tree, path, value)
    yield from HOSTILE


def paths(tree: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every part; of a long list, only the first two."""
    parts = (
        list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))[:2] if isinstance(tree, list) else []
    )
    for key, value in parts:
        yield (*prefix, key)
        yield from paths(value, (*prefix, key))


def changed(tree: Any, path: tuple[Any, ...], value: Any, *, delete: bool = False) -> Any:
    tree = part = copy.deepcopy(tree)
    for key in path[:-1]:
        part = part[key]
    if delete:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return tree


def test_no_json_file_of_a_run_causes_a_traceback(original: Path, tmp_path: Path) -> None:
    files = sorted(file.relative_to(original) for file in original.rglob("*.json"))
    assert {file.name for file in files} >= {"run.json", "progress.json", "summary.json", "calibration.json"}
    assert any(file.parts[0] == "jobs" for file in files)
    cases: list[tuple[Path, bytes]] = []
    for file in files:
        tree = json.loads((original / file).read_bytes())
        cases += [(file, json.dumps(value).encode()) for value in mutations(tree)]
        cases += [(file, content) for content in (b"", b"{", b"\xff", b"9" * 5000, DEEP.encode())]
    run, problems = tmp_path / "run", []
    for number, (file, content) in enumerate(chosen(cases, 60)):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(original, run)
        (run / file).write_bytes(content)
        command = COMMANDS[number % len(COMMANDS)]
        code, output, problem = attack([word.format(run=run, out=tmp_path) for word in command])
        if problem or (code == 1 and "Traceback" in output):
            problems.append((str(file), content[:200], command[0], problem))
    assert problems == []
