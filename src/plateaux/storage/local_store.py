"""A store in a folder of this machine. The kernel holds the locks and releases them when a process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4
from weakref import WeakSet

from plateaux.core.errors import RunError, StorageError
from plateaux.storage.atomic import PARTIAL_PREFIX, replace_when_complete
from plateaux.storage.safe_files import is_regular_file, open_file, open_folder, walk_files
from plateaux.storage.store import LOCK_TIMEOUT_S, Store, split_name

SCRATCH_PREFIX = ".scratch-"  # folder names of scratch stores
PARTIAL_NAME = re.compile(rf"{re.escape(PARTIAL_PREFIX)}[0-9a-f]{{32}}")
LOCK_POLL_S = 0.05
MISSING = (errno.ENOENT, errno.ENOTDIR)


class LocalStore(Store):
    """Objects as files in a folder. No symbolic link below the folder is followed."""

    has_locks = True

    def __init__(self, root: str | Path, *, durable: bool = True) -> None:
        self.root: Path = Path(root)
        self._durable = durable  # objects survive a power failure
        self._root_id: tuple[int, int] | None = None  # device and inode, once the folder was used

    @contextmanager
    def open_writer(self, name: str) -> Iterator[IO[bytes]]:
        *parents, base = split_name(name)
        try:
            with self._folder(parents, create=True) as folder:
                is_regular_file(base, folder)  # a link is refused, and not replaced
                partial = f"{PARTIAL_PREFIX}{uuid4().hex}"  # not mkstemp: its files ignore the umask
                path = self.root.joinpath(*parents, partial)
                with replace_when_complete(path, base, folder, durable=self._durable) as file:
                    yield file
        except StorageError:
            raise
        except OSError as problem:
            raise self._os_error("write", name, problem) from None

    @contextmanager
    def open_reader(self, name: str) -> Iterator[IO[bytes]]:
        *parents, base = split_name(name)
        try:
            with self._folder(parents) as folder:
                file = os.fdopen(open_file(base, folder, os.O_RDONLY), "rb")
        except StorageError:
            raise
        except OSError as problem:
            raise self._os_error("read", name, problem) from None
        with file:
            yield file

    def has(self, name: str) -> bool:
        *parents, base = split_name(name)
        try:
            with self._folder(parents) as folder:
                return is_regular_file(base, folder)
        except StorageError:
            raise
        except OSError as problem:
            if problem.errno in MISSING:
                return False
            raise self._os_error("read", name, problem) from None

    def names(self, prefix: str = "") -> list[str]:
        return sorted(self._sizes(prefix))

    def size(self, prefix: str = "") -> int:
        return sum(self._sizes(prefix).values())

    def _sizes(self, prefix: str, *, hidden: bool = False) -> dict[str, int]:
        parts = split_name(prefix) if prefix else ()
        try:
            with self._folder(parts) as folder:
                return {"/".join((*parts, name)): size for name, size in walk_files(folder, hidden=hidden)}
        except StorageError:
            raise
        except OSError as problem:
            if problem.errno in MISSING:
                return {}
            raise self._os_error("list", prefix or ".", problem) from None

    def delete(self, name: str) -> None:
        *parents, base = split_name(name)
        try:
            with self._folder(parents) as folder:
                os.unlink(base, dir_fd=folder)
        except StorageError:
            raise
        except OSError as problem:
            if problem.errno not in MISSING:
                raise self._os_error("delete", name, problem) from None

    def swap(self, name: str, content: bytes, version: bytes | None) -> bool:
        if (self.get(name) if self.has(name) else None) != version:
            return False
        self.put(name, content)
        return True

    def remove_partial(self, prefix: str) -> None:
        for name in self._sizes(prefix, hidden=True):
            if PARTIAL_NAME.fullmatch(name.rpartition("/")[2]):
                self.delete(name)

    @contextmanager
    def lock(self, name: str, *, timeout: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        parts = split_name(f"{name}/.lock")[:-1]
        try:
            with self._folder(parts, create=True) as folder:
                # The content of the file does not matter: it is never written, and above all never truncated.
                file = os.fdopen(open_file(".lock", folder, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
        except StorageError:
            raise
        except OSError as problem:
            raise self._os_error("lock", name, problem) from None
        with file:
            if not _acquire(file, time.monotonic() + timeout):
                where = self.root.joinpath(*parts)
                raise RunError(f"{where} is locked by another process; wait for it to finish, or stop it and retry")
            _lock_files.add(file)
            yield

    def is_locked(self, name: str) -> bool:
        """Return whether a process holds the lock. Nothing is written, so this works in a read-only folder."""
        *parents, base = split_name(f"{name}/.lock")
        try:
            with self._folder(parents) as folder:
                file = os.fdopen(open_file(base, folder, os.O_RDONLY), "rb", buffering=0)
        except StorageError:
            raise
        except OSError as problem:
            if problem.errno in MISSING:
                return False
            raise self._os_error("lock", name, problem) from None
        with file:
            return not _acquire(file, time.monotonic(), fcntl.LOCK_SH)

    @contextmanager
    def scratch(self) -> Iterator[Store]:
        """Open a temporary store in a folder below this one. Folders that killed processes left are deleted first."""
        with self._folder((), create=True):
            pass
        for old in self.root.glob(f"{SCRATCH_PREFIX}*"):
            if not old.is_symlink() and (old / ".lock").exists() and not LocalStore(old).is_locked("."):
                shutil.rmtree(old, ignore_errors=True)  # follows no symbolic link
        folder = tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=self.root)
        store = LocalStore(folder, durable=False)
        try:
            with store.lock("."):
                yield store
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _folder(self, parts: tuple[str, ...] | list[str], *, create: bool = False) -> Iterator[int]:
        """Open a folder of the store. The root is created for the first write only: it may not vanish later."""
        if create and self._root_id is None:
            self.root.mkdir(parents=True, exist_ok=True)
        try:
            found = self.root.stat()
        except FileNotFoundError:
            found = None
        if self._root_id is not None and (found is None or (found.st_dev, found.st_ino) != self._root_id):
            raise StorageError(
                f"{self.root} was deleted, moved, or replaced while it was in use, so nothing more is written to it. "
                "Restore the folder, or run the same command again to start anew"
            )
        if found is not None and stat.S_ISDIR(found.st_mode):
            self._root_id = found.st_dev, found.st_ino
        with open_folder(self.root, parts, create=create) as folder:
            yield folder


_lock_files: WeakSet[IO[bytes]] = WeakSet()


def _acquire(file: IO[bytes], deadline: float, kind: int = fcntl.LOCK_EX) -> bool:
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOCK_POLL_S)


def _close_inherited_locks() -> None:
    """Close a forked child's copies of the lock files: loader workers outlive a killed parent by seconds."""
    for file in list(_lock_files):
        file.close()


os.register_at_fork(after_in_child=_close_inherited_locks)
