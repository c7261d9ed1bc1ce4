"""A run folder from someone else: nothing outside it is read, written, or deleted, and nothing blocks."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import weights_path
from typer.testing import CliRunner

from plateaux import Recipe, Run, train
from plateaux.cli.main import app
from plateaux.config.experiment import Experiment
from plateaux.core.errors import RunError, StorageError
from plateaux.errors import PlateauxError
from plateaux.storage.local_store import LocalStore

RECIPE = {
    "members": 2,
    "data": {"name": "digits", "batch_size": 256},
    "model": {"name": "mlp", "hidden_sizes": [4]},
    "train": {"epochs": 1},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs") / "run"
    train(Recipe.from_dict(RECIPE), root)
    return root


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("thesis.txt", "weights-0123abcd.safetensors", "resume-0-0-0123abcd.pt"):
        (folder / name).write_text("precious")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def status_of(*words: str) -> int:
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code


def test_training_in_a_folder_with_a_linked_member_deletes_nothing_outside(run: Path, outside: Path) -> None:
    before = content(outside)
    shutil.rmtree(run / "members" / "1")
    (run / "members" / "1").symlink_to(outside)
    with pytest.raises(StorageError, match="1 is a symbolic link, which is not followed here; remove it"):
        train(Recipe.from_dict(RECIPE), run)
    assert content(outside) == before


@pytest.mark.parametrize("name", ["run.json", "recipe.toml", "members", "members/0/progress.json", "weights"])
def test_a_linked_file_or_folder_is_refused_by_training_and_evaluation(run: Path, outside: Path, name: str) -> None:
    target = outside / "target"
    name = str(weights_path(run, 0).relative_to(run)) if name == "weights" else name
    (run / name).rename(target)
    (run / name).symlink_to(target)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    assert status_of("train", "quickstart", "--out", str(run)) == 4
    assert status_of("evaluate", str(run)) == 4
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before


def test_a_run_folder_may_itself_be_a_symbolic_link(run: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(run)
    assert status_of("status", str(link)) == 0
    train(Recipe.from_dict(RECIPE), link)


def test_status_does_not_truncate_the_target_of_a_linked_lock(run: Path, outside: Path) -> None:
    before = content(outside)
    (run / "members" / "0" / "progress.json").unlink()  # unfinished, so that its lock matters
    (run / "members" / "0" / ".lock").unlink(missing_ok=True)
    (run / "members" / "0" / ".lock").symlink_to(outside / "thesis.txt")
    assert status_of("status", str(run)) == 4
    assert content(outside) == before


@pytest.mark.parametrize("name", ["members/0/.lock", "members/0/progress.json", "run.json"])
@pytest.mark.timeout(60)
def test_a_fifo_does_not_block(run: Path, name: str) -> None:
    (run / "members" / "0" / "progress.json").unlink()  # unfinished, so that its lock matters
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert status_of("status", str(run)) == 4


def test_status_writes_nothing_and_works_in_a_read_only_folder(run: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for path in [run, *run.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert status_of("status", str(run)) == 0
    finally:
        for path in [run, *run.rglob("*")]:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_files_that_plateaux_did_not_write_are_not_deleted(run: Path) -> None:
    notes = [run / "members" / "0" / name for name in ("notes.md", "resume.txt", "log/notes.jsonl")]
    for file in notes:
        file.write_text("mine")
    stale = run / "members" / "0" / "resume-0-3-0123abcd.pt"
    stale.write_text("from an older attempt")
    train(Recipe.from_dict(RECIPE), run)
    assert all(file.read_text() == "mine" for file in notes)
    assert not stale.exists()


def _begin(root: str, seed: int, start: Any, results: Any) -> None:
    recipe = Recipe.from_dict({**RECIPE, "seed": seed})
    info = Run.open(f"{root}-info").info
    start.wait()
    try:
        Run.begin(root, Experiment(recipe), info)
        results.put(seed)
    except RunError:
        results.put(None)


@pytest.mark.process
def test_of_two_processes_with_different_recipes_one_is_refused(run: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(10):
        root = tmp_path / f"new{attempt}"
        (tmp_path / f"new{attempt}-info").symlink_to(run)
        start, results = context.Event(), context.Queue()
        processes = [context.Process(target=_begin, args=(str(root), seed, start, results)) for seed in (1, 2)]
        for process in processes:
            process.start()
        start.set()
        accepted = [seed for seed in (results.get(timeout=120) for _ in processes) if seed is not None]
        for process in processes:
            process.join()
        assert len(accepted) == 1
        assert Run.open(root).recipe.seed == accepted[0]


@pytest.mark.parametrize("when", [1, 2])
def test_a_run_folder_that_is_deleted_during_training_is_reported(tmp_path: Path, when: int) -> None:
    root, events = tmp_path / "run", []

    def delete(event: object) -> None:
        events.append(event)
        if len(events) == when:
            shutil.rmtree(root)

    with pytest.raises(PlateauxError, match="was deleted, moved, or replaced while it was in use"):
        train(Recipe.from_dict({**RECIPE, "train": {"epochs": 3}}), root, progress=delete)
    assert not root.exists()


def test_a_store_does_not_recreate_its_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    store.put("a", b"1")
    shutil.rmtree(tmp_path / "run")
    actions: list[Callable[[], object]] = [lambda: store.put("b", b"2"), lambda: store.get("a"), store.names]
    for action in actions:
        with pytest.raises(StorageError, match="was deleted"):
            action()
