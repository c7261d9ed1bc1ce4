"""Atomic file writes: a file holds either its old content or the complete new content, even after a kill."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

from plateaux.core.errors import StorageError

PARTIAL_PREFIX = ".part-"  # file names of writes in progress
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replace_when_complete(partial: Path, name: str, folder: int, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a new file that becomes `name` in an open folder when the block ends, and is deleted if the block raises.

    With `durable`, the content is on disk before the rename, so that it survives a power failure.
    """

    def open_here(_: str, flags: int) -> int:
        return os.open(partial.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)

    try:
        with open(partial, "x+b", opener=open_here) as file:
            yield file
        if durable:
            _flush_to_disk(partial.name, folder)
        os.replace(partial.name, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial.name, dir_fd=folder)
        raise


def _flush_to_disk(name: str, folder: int) -> None:
    """Flush a file by name, because a library may have replaced the file that was opened by another one."""
    file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `path` when the block ends, and is deleted if the block raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Not mkstemp: its files ignore the umask.
        with replace_when_complete(path.with_name(f"{PARTIAL_PREFIX}{uuid4().hex}"), path.name, folder) as file:
            yield file
    finally:
        os.close(folder)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file that the user named atomically, and create its parent folders."""
    try:
        with open_atomic(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as problem:
        raise StorageError(f"{explain_os_error('write', path, problem)}; choose another output path") from None


def explain_os_error(verb: str, path: object, problem: OSError) -> str:
    """Return the text of an error that the operating system reported for a file."""
    if problem.errno in DISK_FULL:
        return f"The disk is full: cannot {verb} {path}. Free some space and run the same command again"
    return f"Cannot {verb} {path}: {problem.strerror or problem}"
