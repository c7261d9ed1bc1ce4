"""File access below a folder that follows no symbolic link and opens only regular files.

A run folder may come from anyone. A symbolic link in it could lead reads, writes, and deletions to files outside, and
opening a FIFO blocks. The folder itself may be reached through a symbolic link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def open_folder(root: Path, parts: Sequence[str] = (), *, create: bool = False) -> Iterator[int]:
    """Open a folder below `root` as a file descriptor, one part at a time; missing folders are created on request."""
    folder = os.open(root, FOLDER_FLAGS)
    try:
        for part in parts:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            parent, folder = folder, _open_child(part, folder)
            os.close(parent)
        yield folder
    finally:
        os.close(folder)


def _open_child(name: str, folder: int) -> int:
    try:
        return os.open(name, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        check_no_link(name, folder)
        raise


def open_file(name: str, folder: int, flags: int) -> int:
    """Open a regular file in an open folder. Symbolic links, FIFOs, and devices raise an `OSError` at once."""
    try:
        # Without O_NONBLOCK, opening a FIFO waits for the other end.
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except OSError:
        check_no_link(name, folder)
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file; remove it")
    return file


def check_no_link(name: str, folder: int) -> None:
    """Raise an `OSError` if the entry of an open folder is a symbolic link."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, f"{name} is a symbolic link, which is not followed here; remove it")


def is_regular_file(name: str, folder: int) -> bool:
    """Return whether an entry of an open folder is a regular file. Other entries than folders raise an `OSError`."""
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        check_no_link(name, folder)
        raise OSError(errno.EINVAL, "it is not a regular file; remove it")
    return stat.S_ISREG(mode)


def walk_files(folder: int, *, hidden: bool = False) -> Iterator[tuple[str, int]]:
    """Yield relative name and size of every file below an open folder, in any order.

    Names that start with a dot are skipped, unless `hidden`. Other entries than files and folders raise an `OSError`.
    """
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if hidden or not entry.name.startswith("."))
    for name in names:
        with suppress(FileNotFoundError):  # deleted by another process in between
            if is_regular_file(name, folder):
                yield name, os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
                continue
            child = _open_child(name, folder)
            try:
                for inner, size in walk_files(child, hidden=hidden):
                    yield f"{name}/{inner}", size
            finally:
                os.close(child)
