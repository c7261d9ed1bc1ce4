"""Storage: whole objects by name, written once, never half.

The only file that touches storage. An object is put whole and read whole; nothing is appended and nothing outside this
file is renamed, so that an object store can take the place of the folder. The local back end writes to a temporary file
beside the target and renames it. Locks are held by the kernel and die with their process.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from plateaux.errors import RunError, StorageError
from plateaux.types import Tree

PART = ".part-"  # names of files still being written


class Store:
    """Objects under one root, by names such as `members/0/progress.json`."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def put(self, name: str, content: bytes) -> None:
        """Write an object whole, or leave the old one as it was."""
        path = self._path(name)
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=PART, dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as problem:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            raise self._explain("write", name, problem) from None

    def get(self, name: str) -> bytes:
        """Read an object whole."""
        try:
            return self._path(name).read_bytes()
        except OSError as problem:
            raise self._explain("read", name, problem) from None

    def has(self, name: str) -> bool:
        return self._path(name).is_file()

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all objects below `prefix`, sorted."""
        top = self._path(prefix) if prefix else self.root
        files = (path for path in top.rglob("*") if path.is_file() and not path.name.startswith("."))
        return sorted(path.relative_to(self.root).as_posix() for path in files)

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no mistake."""
        self._path(name).unlink(missing_ok=True)

    def size(self, prefix: str = "") -> int:
        """Return the bytes of all objects below `prefix`."""
        return sum(self._path(name).stat().st_size for name in self.names(prefix))

    def sweep(self, prefix: str) -> None:
        """Remove what a killed writer left half-written below `prefix`."""
        for path in self._path(prefix).rglob(f"{PART}*"):
            path.unlink(missing_ok=True)

    def put_json(self, name: str, value: Any) -> None:
        self.put(name, (json.dumps(value, indent=2) + "\n").encode())

    def get_json(self, name: str) -> Any:
        content = self.get(name)
        try:
            return json.loads(content)
        except ValueError as problem:
            raise StorageError(
                f"{self._path(name)} is not valid JSON ({problem}); restore it or start a new run"
            ) from None

    def put_tensors(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
        """Write tensors as safetensors, which any program can read and which can run nothing."""
        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        self.put(name, safetensors.torch.save(plain, metadata=dict(about or {})))

    def get_tensors(self, name: str) -> Tree:
        content = self.get(name)
        try:
            return safetensors.torch.load(content)
        except Exception as problem:
            raise StorageError(
                f"{self._path(name)} is damaged ({problem}); restore it or train that member again"
            ) from None

    def put_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Write nested tensors and plain values."""
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        self.put(name, buffer.getvalue())

    def get_state(self, name: str) -> dict[str, Any]:
        """Read nested tensors and plain values; nothing in the object is executed."""
        content = self.get(name)
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
        except Exception as problem:
            raise StorageError(
                f"{self._path(name)} is damaged ({problem}); delete it to train from the one before"
            ) from None

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold `name` alone; the kernel lets go when the process ends, however it ends."""
        import fcntl

        path = self._path(f"{name}/.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(
                    f"{path.parent} is in the hands of another process; wait for it, or stop it and run this again"
                ) from None
            yield

    def held(self, name: str) -> bool:
        """Say whether somebody holds `name` now."""
        if not self._path(f"{name}/.lock").exists():
            return False
        try:
            with self.lock(name):
                return False
        except RunError:
            return True

    @contextmanager
    def scratch(self) -> Iterator[Store]:
        """Lend a store for things that nobody needs afterwards."""
        self.root.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=".scratch-", dir=self.root)
        try:
            yield Store(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts:
            raise StorageError(f"{name!r} does not name an object of this run")
        return self.root.joinpath(*parts)

    def _explain(self, verb: str, name: str, problem: OSError) -> StorageError:
        path = self._path(name)
        if problem.errno == errno.ENOSPC:
            return StorageError(
                f"The disk is full: could not write {path}. Free some space and run the same command again"
            )
        return StorageError(f"Cannot {verb} {path}: {problem.strerror or problem}")
