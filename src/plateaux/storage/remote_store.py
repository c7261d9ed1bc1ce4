"""A store at a URL that fsspec supports, such as s3://bucket/runs/demo. Conditional writes replace the file locks.

`open_store` chooses between this store and a local one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import IO
from uuid import uuid4

from plateaux.core.errors import StorageError
from plateaux.storage.atomic import PARTIAL_PREFIX
from plateaux.storage.digests import digest_bytes
from plateaux.storage.local_store import LocalStore
from plateaux.storage.remote_fs import Address, RemoteFS, parse_address
from plateaux.storage.store import LOCK_TIMEOUT_S, Store, WriteFn, check_name, is_hidden


def open_store(root: str | Path) -> Store:
    """Return the store at a path, or at a URL such as s3://bucket/runs/demo."""
    address = parse_address(root)
    return LocalStore(root) if address is None else RemoteStore(address)


class RemoteStore(Store):
    """Objects in a bucket. Objects that are read as arrays are copied to a temporary folder first."""

    has_locks = False

    def __init__(self, address: Address) -> None:
        self.root: Address = address
        self._fs = RemoteFS(address)
        self._temporary = tempfile.TemporaryDirectory(prefix="plateaux-")
        self._folder = Path(self._temporary.name)

    def put(self, name: str, content: bytes | WriteFn, *, digest: bool = True) -> str:
        if callable(content):
            return super().put(name, content, digest=digest)
        self._upload(name, content)
        return digest_bytes(content) if digest else ""

    @contextmanager
    def open_writer(self, name: str) -> Iterator[IO[bytes]]:
        partial = self._folder / f"{PARTIAL_PREFIX}{uuid4().hex}"
        try:
            with partial.open("x+b") as file:
                yield file
            self._upload(name, partial)
        finally:
            partial.unlink(missing_ok=True)

    def _upload(self, name: str, content: bytes | Path) -> None:
        with self._convert_errors("write", name):
            self._fs.write(check_name(name), content)

    def _read(self, name: str) -> bytes:
        with self._convert_errors("read", name):
            return self._fs.read(check_name(name))

    def has(self, name: str) -> bool:
        with self._convert_errors("read", name):
            return self._fs.has(check_name(name))

    def names(self, prefix: str = "") -> list[str]:
        return sorted(self._sizes(prefix))

    def size(self, prefix: str = "") -> int:
        return sum(self._sizes(prefix).values())

    def _sizes(self, prefix: str) -> dict[str, int]:
        with self._convert_errors("list", prefix):
            sizes = self._fs.sizes(check_name(prefix) if prefix else "")
        return {name: size for name, size in sizes.items() if not is_hidden(name)}

    def delete(self, name: str) -> None:
        with self._convert_errors("delete", name):
            self._fs.remove(check_name(name))

    def remove_partial(self, prefix: str) -> None:
        """Do nothing: an interrupted upload does not create an object."""

    def swap(self, name: str, content: bytes, version: bytes | None) -> bool:
        with self._convert_errors("write", name):
            return self._fs.swap(check_name(name), content, version)

    def lock(self, name: str, *, timeout: float = LOCK_TIMEOUT_S) -> AbstractContextManager[None]:
        return nullcontext()

    def is_locked(self, name: str) -> bool:
        return False

    def scratch(self) -> AbstractContextManager[Store]:
        return LocalStore(self._folder).scratch()

    @contextmanager
    def open_reader(self, name: str) -> Iterator[IO[bytes]]:
        """Open a local copy of the object. It is downloaded at the first access and again when the object changed."""
        with self._convert_errors("read", name):
            file = self._folder / _copy_name(name, self._fs.version(check_name(name)))
            if not file.exists():
                partial = file.with_name(f"{PARTIAL_PREFIX}{uuid4().hex}")
                self._fs.fetch(name, partial)
                os.replace(partial, file)
        with file.open("rb") as opened:
            yield opened

    @contextmanager
    def _convert_errors(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as problem:
            raise self._os_error(verb, name, problem) from None


def _copy_name(name: str, version: str) -> str:
    return blake2b(f"{name}\n{version}".encode(), digest_size=16).hexdigest()
