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
def open_atomic(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the block ends, and is deleted if the block raises.

    With `durable`, the content is on disk before the rename, so that it survives a power failure.
    """
    partial = path.with_name(f"{PARTIAL_PREFIX}{uuid4().hex}")  # not mkstemp: its files ignore the umask
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


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
