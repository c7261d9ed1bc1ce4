"""A full disk gives exit code 4 and one message, whichever file is written."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch
from typer.testing import CliRunner

from plateaux.cli.main import app
from plateaux.core.errors import StorageError
from plateaux.storage import atomic, local_store
from plateaux.storage.local_store import LocalStore

SMALL = ["train", "quickstart", "--set", "train.epochs=1", "--set", "members=1", "--set", "run.keep_checkpoints='last'"]


class FullFile(io.FileIO):
    """A file whose disk is full after some bytes."""

    left = 100

    def write(self, content: bytes) -> int:  # type: ignore[override]
        self.left -= len(content)
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def fill_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> list[str]:
    """Fail all writes after the given number of files; return the names of the written files."""
    written: list[str] = []
    original = atomic.replace_when_complete

    @contextmanager
    def open_full(partial: Path, name: str, folder: int, *, durable: bool = True) -> Iterator[IO[bytes]]:
        written.append(name)
        if len(written) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with original(partial, name, folder, durable=durable) as file:
            yield file

    monkeypatch.setattr(atomic, "replace_when_complete", open_full)
    monkeypatch.setattr(local_store, "replace_when_complete", open_full)
    return written


def test_a_full_disk_during_training_gives_exit_code_4_at_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for after in range(100):
        with monkeypatch.context() as patch:
            written = fill_disk(patch, after)
            result = CliRunner().invoke(app, [*SMALL, "--no-evaluate", "--out", str(tmp_path / str(after))])
        if result.exit_code == 0:
            break
        assert (result.exit_code, type(result.exception)) == (4, SystemExit), (after, result.exception)
        assert "The disk is full: cannot write" in result.stderr
        assert written[after] in result.stderr
    assert {"run.json", "recipe.toml", "progress.json"} <= set(written)
    assert any(name.startswith("weights-") for name in written)
    assert after == len(written)


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "{run}", "--metrics", "accuracy"],
        ["predict", "{run}", "--split", "test", "--out", "{out}/p.csv"],
        ["calibrate", "{run}", "--split", "test"],
        ["report", "{run}", "--out", "{out}/r.md"],
        ["soup", "{run}", "--split", "test", "--out", "{out}/soup"],
        ["select", "{run}", "--split", "test", "--out", "{out}/s.json"],
        ["claims", "1", "--out", "{out}/claims.md"],
    ],
)
def test_a_full_disk_gives_exit_code_4_in_every_command(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    fill_disk(monkeypatch, 0)
    result = CliRunner().invoke(app, [word.format(run=trained, out=tmp_path) for word in command])
    assert (result.exit_code, type(result.exception)) == (4, SystemExit), result.exception
    assert "The disk is full: cannot write" in result.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("full") / "run"
    assert CliRunner().invoke(app, [*SMALL, "--no-evaluate", "--out", str(root)]).exit_code == 0
    return root


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_full_disk_is_recognized_in_errors_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    @contextmanager
    def open_full(partial: Path, name: str, folder: int, *, durable: bool = True) -> Iterator[IO[bytes]]:
        with FullFile(tmp_path / "partial", "wb") as file:
            yield file  # type: ignore[misc]

    monkeypatch.setattr(local_store, "replace_when_complete", open_full)
    with pytest.raises(StorageError, match=r"The disk is full: cannot write .*state\.pt"):
        LocalStore(tmp_path).put_state("state.pt", {"weight": torch.zeros(size)})


def test_a_full_disk_behind_stdout_gives_exit_code_4(script: object) -> None:
    import subprocess
    import sys

    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "plateaux", "list", "methods", "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert ended.returncode == 4
    assert "The disk is full" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_other_os_errors_give_exit_code_4(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, [*SMALL, "--out", str(tmp_path / "file" / "run")])
    assert (result.exit_code, type(result.exception)) == (4, SystemExit)
    assert "Not a directory" in result.stderr
