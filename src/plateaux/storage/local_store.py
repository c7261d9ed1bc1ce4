"""A store in a folder of this machine. The kernel holds the locks and releases them when a process ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from weakref import WeakSet

from plateaux.core.errors import RunError, StorageError
from plateaux.storage.atomic import PARTIAL_PREFIX, open_atomic
from plateaux.storage.store import LOCK_TIMEOUT_S, Store, is_hidden, split_name

SCRATCH_PREFIX = ".scratch-"  # folder names of scratch stores
LOCK_POLL_S = 0.05


class LocalStore(Store):
    """Objects as files in a folder."""

    def __init__(self, root: str | Path, *, durable: bool = True) -> None:
        self.root: Path = Path(root)
        self._durable = durable  # objects survive a power failure

    @contextmanager
    def open_writer(self, name: str) -> Iterator[IO[bytes]]:
        path = self._path(name)
        try:
            with open_atomic(path, durable=self._durable) as file:
                yield file
        except StorageError:
            raise
        except OSError as problem:
            raise self._os_error("write", name, problem) from None

    def get(self, name: str) -> bytes:
        try:
            return self._path(name).read_bytes()
        except OSError as problem:
            raise self._os_error("read", name, problem) from None

    def has(self, name: str) -> bool:
        return self._path(name).is_file()

    def names(self, prefix: str = "") -> list[str]:
        top = self._path(prefix) if prefix else self.root
        names = (path.relative_to(self.root).as_posix() for path in top.rglob("*") if path.is_file())
        return sorted(name for name in names if not is_hidden(name))

    def size(self, prefix: str = "") -> int:
        return sum(self._path(name).stat().st_size for name in self.names(prefix))

    def delete(self, name: str) -> None:
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as problem:
            raise self._os_error("delete", name, problem) from None

    def remove_partial(self, prefix: str) -> None:
        for path in self._path(prefix).rglob(f"{PARTIAL_PREFIX}*"):
            self.delete(path.relative_to(self.root).as_posix())

    @contextmanager
    def lock(self, name: str, *, timeout: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        path = self._path(f"{name}/.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        except OSError as problem:
            raise self._os_error("lock", name, problem) from None
        with file:
            if not _acquire(file, time.monotonic() + timeout):
                raise RunError(
                    f"{path.parent} is locked by another process; wait for it to finish, or stop it and retry"
                )
            _lock_files.add(file)
            yield

    def is_locked(self, name: str) -> bool:
        if not self._path(f"{name}/.lock").exists():
            return False
        try:
            with self.lock(name, timeout=0):
                return False
        except StorageError:
            raise
        except RunError:
            return True

    @contextmanager
    def scratch(self) -> Iterator[Store]:
        """Open a temporary store in a folder below this one. Folders that killed processes left are deleted first."""
        self.root.mkdir(parents=True, exist_ok=True)
        for old in self.root.glob(f"{SCRATCH_PREFIX}*"):
            if (old / ".lock").exists() and not LocalStore(old).is_locked("."):
                shutil.rmtree(old, ignore_errors=True)
        folder = tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=self.root)
        store = LocalStore(folder, durable=False)
        try:
            with store.lock("."):
                yield store
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def local_file(self, name: str) -> Path:
        return self._path(name)

    def _path(self, name: str) -> Path:
        return self.root.joinpath(*split_name(name))


_lock_files: WeakSet[IO[str]] = WeakSet()


def _acquire(file: IO[str], deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
