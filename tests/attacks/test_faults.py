"""Faults of the machine: a full disk at every write, a read-only folder, two writers, clock jumps, a killed worker."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner
from waiting import wait_until

from plateaux import Recipe, train
from plateaux.cli.main import app
from plateaux.core.errors import RunError, StorageError
from plateaux.data.datasets.digits import digits
from plateaux.storage import atomic
from plateaux.storage.run import Run

LONG = bool(os.environ.get("PLATEAUX_LONG"))
RECIPE = {
    "members": 2,
    "data": {"name": "digits", "batch_size": 512},
    "model": {"name": "mlp", "hidden_sizes": [4]},
    "train": {"epochs": 2},
}
HOLD_LOCK = """
import sys, time
from plateaux.storage.local_store import LocalStore
with LocalStore(sys.argv[1]).lock("members/0"):
    print("locked", flush=True)
    time.sleep(600)
"""


def weights(root: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(root.glob("members/*/weights-*.safetensors"))]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    root = tmp_path_factory.mktemp("expected")
    train(Recipe.from_dict(RECIPE), root)
    return weights(root)


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Let the write of this number fail as on a full disk; count the writes."""
    flush, count = atomic._flush_to_disk, [0]

    def full(*args: Any) -> None:
        count[0] += 1
        if count[0] == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(*args)

    monkeypatch.setattr(atomic, "_flush_to_disk", full)
    return count


def test_a_full_disk_at_any_write_is_reported_and_training_resumes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[bytes]
) -> None:
    with monkeypatch.context() as patch:
        writes = fail_at(patch, -1)
        train(Recipe.from_dict(RECIPE), tmp_path / "complete")
    numbers = range(1, writes[0] + 1) if LONG else range(1, writes[0] + 1, 3)
    assert writes[0] > 10
    for number in numbers:
        root = tmp_path / str(number)
        with monkeypatch.context() as patch:
            fail_at(patch, number)
            with pytest.raises((StorageError, RunError), match="The disk is full"):
                train(Recipe.from_dict(RECIPE), root)
        train(Recipe.from_dict(RECIPE), root)
        assert weights(root) == expected, number


def test_two_writers_end_with_one_set_of_weights(tmp_path: Path, expected: list[bytes]) -> None:
    recipe, root = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(Recipe.from_dict(RECIPE).to_toml())
    command = [sys.executable, "-m", "plateaux", "train", str(recipe), "--out", str(root), "--no-evaluate"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    codes = sorted(process.returncode for process in processes)
    assert codes in ([0, 0], [0, 4]), outputs
    assert all(b"Traceback" not in stderr for _, stderr in outputs)
    assert weights(root) == expected


def test_a_stopped_lock_holder_is_reported_and_not_waited_for(tmp_path: Path) -> None:
    root = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(root)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(RunError, match="locked by another process"):
            train(Recipe.from_dict(RECIPE), root)
        result = CliRunner().invoke(app, ["status", str(root)])
        assert result.exit_code == 0
        assert "training" in result.stdout
    finally:
        holder.kill()
        holder.communicate()  # also closes the pipe; an open one would be reported in a later test
    train(Recipe.from_dict(RECIPE), root)  # the kernel has released the lock


@pytest.mark.parametrize("jump", [-1e8, 1e8])
def test_a_clock_jump_does_not_change_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[bytes], jump: float
) -> None:
    real, calls = time.time, [0]

    def clock() -> float:
        calls[0] += 1
        return real() + (jump if calls[0] % 2 else 0)

    monkeypatch.setattr(time, "time", clock)
    train(Recipe.from_dict(RECIPE), tmp_path / "run")
    assert weights(tmp_path / "run") == expected


def test_a_read_only_run_folder_is_reported(tmp_path: Path, expected: list[bytes]) -> None:
    root = tmp_path / "run"
    root.mkdir(mode=0o555)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)  # another user must be able to reach it
    data = digits()  # read before: another user may not reach the environment of the tests
    with _unprivileged(), pytest.raises(StorageError, match="Permission denied"):
        train(Recipe.from_dict(RECIPE), root, data=data)
    assert list(root.iterdir()) == []


@contextmanager
def _unprivileged() -> Iterator[None]:
    """Act as a user who is not root: root writes to read-only folders. All modules must have been imported."""
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_mesh_whose_worker_is_killed_ends_and_resumes_to_the_same_weights(tmp_path: Path) -> None:
    long = Recipe.from_dict({**RECIPE, "train": {"epochs": 50}, "run": {"checkpoint_every_minutes": 1e-9}})
    recipe, root, mark = tmp_path / "recipe.toml", tmp_path / "run", uuid4().hex
    recipe.write_text(long.to_toml())
    command = [sys.executable, "-m", "plateaux", "train", str(recipe), "--out", str(root), "--no-evaluate"]
    command += ["--executor", "mesh", "--processes", "2"]
    env = {**os.environ, "PLATEAUX_MARK": mark}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True) as process:
        wait_until(lambda: _has_checkpoints(root) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        os.kill(_workers(mark)[0], signal.SIGKILL)
        _, text = process.communicate(timeout=300)
    assert process.returncode not in (0, None), text
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    train(long, tmp_path / "whole")
    assert weights(root) == weights(tmp_path / "whole")


def _has_checkpoints(root: Path) -> bool:
    with suppress(RunError, StorageError):
        return all(progress.checkpoints for progress in Run.open(root).all_progress())
    return False


def _workers(mark: str) -> list[int]:
    """Return the processes of the mesh that a command with this mark has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            env = (folder / "environ").read_bytes().split(b"\0")
            if f"PLATEAUX_MARK={mark}".encode() in env and any(entry.startswith(b"LOCAL_RANK=") for entry in env):
                found.append(int(folder.name))
    return sorted(found)
