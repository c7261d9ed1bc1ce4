"""Atomic writes: a file has its old or its complete new content, and no partial file remains."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from plateaux.core.errors import StorageError
from plateaux.storage.atomic import open_atomic, write_atomic


@pytest.mark.parametrize(("content", "expected"), [("é\n", b"\xc3\xa9\n"), (b"\x00", b"\x00")])
def test_a_file_is_written_and_its_folders_are_created(tmp_path: Path, content: str | bytes, expected: bytes) -> None:
    write_atomic(tmp_path / "a" / "b.txt", content)
    assert (tmp_path / "a" / "b.txt").read_bytes() == expected
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.txt"]


def test_an_error_keeps_the_old_file_and_leaves_no_partial_file(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"old")

    def fail() -> None:
        with open_atomic(file) as opened:
            opened.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_and_a_folder_in_the_way_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match=r"Cannot write .*folder: Is a directory; choose another output path"):
        write_atomic(tmp_path / "folder", "x")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"The disk is full: cannot write .*file\. Free some space"):
        write_atomic(tmp_path / "file", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
