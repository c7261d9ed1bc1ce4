"""The storage protocol: complete objects by name, written atomically.

An object is written and read as a whole. Nothing is appended, and only the implementations rename files, so that a
bucket can replace a folder. `open_store` in `remote_store.py` returns the implementation for a path or URL.

Methods that need torch or numpy import them themselves, so that commands that read only JSON start fast.
"""

from __future__ import annotations

import io
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Protocol

from plateaux.core.errors import StorageError
from plateaux.storage.atomic import explain_os_error
from plateaux.storage.digests import (
    DigestError,
    check_digest,
    check_json_digest,
    digest_bytes,
    digest_file,
    with_json_digest,
)
from plateaux.storage.json_shapes import parse_json
from plateaux.storage.remote_fs import Address

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray
    from torch import Tensor

    from plateaux.core.types import TensorTree

LOCK_TIMEOUT_S = 1.0  # seconds to wait for a lock, which a status query holds for a moment

WriteFn = Callable[[IO[bytes]], object]


class Store(Protocol):
    """Objects below one root, by names such as `members/0/progress.json`.

    An implementation defines the abstract methods. The formats (JSON, tensors, arrays, states) are the same for all.
    """

    root: Path | Address
    has_locks: bool  # whether `lock` excludes other processes; without locks, `swap` keeps writers apart

    @abstractmethod
    def open_writer(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file that becomes the object when the block ends, and is discarded if the block raises."""

    @abstractmethod
    def open_reader(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open an object for reading, as a file of this machine."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether the object exists."""

    @abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all objects below `prefix`, sorted. Hidden objects are omitted."""

    @abstractmethod
    def size(self, prefix: str = "") -> int:
        """Return the total size of all objects below `prefix`, in bytes."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object. It is no error if the object does not exist."""

    @abstractmethod
    def swap(self, name: str, content: bytes, version: bytes | None) -> bool:
        """Replace an object if its content is still `version`, or create it if that is None and it does not exist.

        Return whether it was replaced. In a store with locks, the caller holds the lock that protects the object.
        """

    @abstractmethod
    def remove_partial(self, prefix: str) -> None:
        """Delete the incomplete files that killed writers left below `prefix`."""

    @abstractmethod
    def lock(self, name: str, *, timeout: float = LOCK_TIMEOUT_S) -> AbstractContextManager[None]:
        """Hold the lock of `name`, if the store has locks.

        Raise `RunError` if another process still holds it after `timeout` seconds.
        """

    @abstractmethod
    def is_locked(self, name: str) -> bool:
        """Return whether a process holds the lock of `name`."""

    @abstractmethod
    def scratch(self) -> AbstractContextManager[Store]:
        """Open a temporary local store that is deleted at the end of the block."""

    def get(self, name: str, digest: str | None = None) -> bytes:
        """Read an object. With a digest, raise `StorageError` if the content is not the one with that digest."""
        content = self._read(name)
        if digest is not None:
            try:
                check_digest(content, digest)
            except DigestError as problem:
                raise self._damaged_error(name, problem) from None
        return content

    def put(self, name: str, content: bytes | WriteFn, *, digest: bool = True) -> str:
        """Write an object, or keep the old one if this fails. A function writes without a copy in memory.

        Return its digest, or an empty text without `digest`.
        """
        with self.open_writer(name) as file:
            content(file) if callable(content) else file.write(content)
            file.flush()
            if not digest:
                return ""
            with Path(file.name).open("rb") as written:  # the safetensors library replaces the file by another one
                return digest_file(written)

    def put_json(self, name: str, value: Any, *, skip_unchanged: bool = False, has_digest: bool = True) -> str:
        """Write a value as JSON and return its digest. With `skip_unchanged`, equal content is not written again.

        Without `has_digest`, an object does not carry its digest: for published files, which people edit.
        """
        content = encode_json(value, has_digest=has_digest)
        if not skip_unchanged or not self.has(name) or self.get(name) != content:
            self.put(name, content)
        return digest_bytes(content)

    def get_json(self, name: str, digest: str | None = None, *, has_digest: bool = True) -> Any:
        """Read a JSON value that `put_json` wrote, or without `has_digest` one from elsewhere."""
        return self.parse(name, self.get(name, digest), has_digest=has_digest)

    def parse(self, name: str, content: bytes, *, has_digest: bool = True) -> Any:
        """Return the JSON value of an object that was read."""
        tree = parse_json(content, self.root / name)
        try:
            return check_json_digest(tree) if has_digest and isinstance(tree, dict) else tree
        except DigestError as problem:
            raise self._damaged_error(name, problem) from None

    def put_tensors(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None = None,
        *,
        record: bool = True,
    ) -> str:
        """Write tensors as safetensors, a format that other programs read and that cannot contain code.

        Return the digest, which is recorded next to the file unless the caller does so elsewhere.
        """
        from plateaux.storage.tensor_file import save_in_order

        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        if record:
            self.delete(record_name(name))
        digest = self.put(name, lambda file: save_in_order(plain, Path(file.name), dict(metadata or {}) or None))
        if record:
            self.put_json(record_name(name), {"object": name, "content": digest})
        return digest

    def get_tensors(self, name: str, digest: str | None = None) -> TensorTree:
        """Read tensors from safetensors, with a digest of the caller or the one that is recorded next to the file."""
        import safetensors.torch

        content = self.get(name, digest or self.recorded_digest(name))
        try:
            return safetensors.torch.load(content)
        except Exception as problem:
            raise self._damaged_error(name, problem) from None

    def has_recorded(self, name: str) -> bool:
        """Return whether a file was written completely, with the digest that is recorded next to it."""
        return self.has(record_name(name)) and self.has(name)

    def recorded_digest(self, name: str) -> str:
        """Return the digest that is recorded next to a file."""
        record = self.get_json(record_name(name)) if self.has(record_name(name)) else self._read(name)
        if not isinstance(record, dict) or record.get("object") != name:
            raise self._damaged_error(name, f"{record_name(name)} does not have its digest")
        return str(record.get("content"))

    def get_tensor(self, name: str, key: str, *, dims: int, integers: bool = False) -> Tensor:
        """Read one tensor of a file, and check its number of dimensions and whether it contains integers."""
        tensor = self.get_tensors(name).get(key)
        if tensor is None or tensor.dim() != dims or tensor.is_floating_point() is integers:
            kind = "of integers " if integers else ""
            raise self._damaged_error(name, f"it has no tensor {key!r} {kind}with {dims} dimensions")
        return tensor

    @contextmanager
    def array_writer(
        self, name: str, dtype: DTypeLike, length: int, metadata: Mapping[str, str] | None = None
    ) -> Iterator[Callable[[NDArray[Any]], None]]:
        """Yield a function that writes an array chunk by chunk, as safetensors with one tensor."""
        import numpy as np

        from plateaux.storage.tensor_file import array_header

        dtype, written = np.dtype(dtype), 0

        def write(chunk: NDArray[Any]) -> None:
            nonlocal written
            assert (chunk.dtype, chunk.ndim) == (dtype, 1), (chunk.dtype, chunk.shape)
            written += len(chunk)
            file.write(np.ascontiguousarray(chunk).data)

        with self.open_writer(name) as file:
            file.write(array_header(dtype, length, metadata or {}))
            yield write
            if written != length:
                raise StorageError(f"{self.root / name} was not written: got {written:,} values instead of {length:,}")
            digest = digest_file(file)
            self.delete(record_name(name))
        self.put_json(record_name(name), {"object": name, "content": digest})

    def get_array(self, name: str) -> tuple[dict[str, str], NDArray[Any]]:
        """Return the metadata of an array, and the array as a read-only memory map."""
        import numpy as np

        with self._open_array(name) as (file, metadata, dtype, length):
            mapped = np.memmap(file, dtype, "r", file.tell(), (length,))
        return metadata, mapped.view(np.ndarray)  # indexing np.memmap itself is slower

    def iter_array(self, name: str, size: int) -> Iterator[NDArray[Any]]:
        """Yield chunks of `size` values. The file is not mapped, because mapped pages count as memory in use."""
        import numpy as np

        with self._open_array(name) as (file, _, dtype, length):
            for start in range(0, length, size):
                chunk = np.empty(min(size, length - start), dtype)
                if file.readinto(chunk.data) != chunk.nbytes:
                    raise self._damaged_error(name, "it ends early")
                yield chunk

    @contextmanager
    def _open_array(self, name: str) -> Iterator[tuple[Any, dict[str, str], np.dtype[Any], int]]:
        from plateaux.storage.tensor_file import read_array_header

        digest = self.recorded_digest(name)
        with self.open_reader(name) as file:
            try:
                check_digest(file, digest)
                file.seek(0)
                metadata, dtype, length = read_array_header(file)
            except OSError as problem:
                raise self._os_error("read", name, problem) from None
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
                raise self._damaged_error(name, problem) from None
            yield file, metadata, dtype, length

    def put_state(self, name: str, state: Mapping[str, Any], *, digest: bool = True) -> str:
        """Write nested tensors and plain values with `torch.save`."""
        return self.put(name, lambda file: _save_state(dict(state), file), digest=digest)

    def get_state(self, name: str, digest: str | None = None) -> dict[str, Any]:
        """Read nested tensors and plain values. Code in the file is not executed (`weights_only=True`)."""
        import torch

        content = self.get(name, digest)
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
        except Exception:  # the message of torch explains how to load the file unsafely
            raise StorageError(
                f"{self.root / name} is damaged, or contains other objects than tensors and plain values. Such objects "
                "are never loaded. Restore the file, or delete its folder to train that member again"
            ) from None

    def _read(self, name: str) -> bytes:
        with self.open_reader(name) as file:
            try:
                return file.read()
            except OSError as problem:
                raise self._os_error("read", name, problem) from None

    def _damaged_error(self, name: str, problem: object) -> StorageError:
        return StorageError(f"{self.root / name} is damaged: {problem}. {recovery(name)}")

    def _os_error(self, verb: str, name: str, problem: OSError) -> StorageError:
        return StorageError(explain_os_error(verb, self.root / name, problem))


def encode_json(value: Any, *, has_digest: bool = True) -> bytes:
    """Return a value as the JSON of a stored object; an object carries its digest, unless it is published as it is."""
    value = with_json_digest(value) if has_digest and isinstance(value, dict) else value
    return (json.dumps(value, indent=2) + "\n").encode()


def record_name(name: str) -> str:
    """Return the name of the JSON object with the digest of a file that no commit names."""
    return f"{name.removesuffix('.safetensors')}.json"


def _save_state(state: dict[str, Any], file: IO[bytes]) -> None:
    import torch

    try:
        torch.save(state, file)
    except RuntimeError as problem:
        # torch reports a failed write as an internal error, raised while it handles the actual one.
        if isinstance(problem.__context__, OSError):
            raise problem.__context__ from None
        raise


def recovery(name: str) -> str:
    """Return what to do about a damaged object."""
    top, *rest = name.split("/")
    if top == "members" and len(rest) > 1:
        folder = f"{top}/{rest[0]}"
        return f"Restore it from a backup, or delete {folder} and run the same `plateaux train` again"
    if top in ("predictions", "landscape", "features"):
        return f"Delete {'/'.join(name.split('/')[:2])}; it is computed again when it is needed"
    if top == "metrics":
        return "Delete it and evaluate again"
    if top.startswith("calibration"):
        return "Run `plateaux calibrate` again"
    return "Restore it from a backup, or start a new run with another --out"


def split_name(name: str) -> tuple[str, ...]:
    """Return the parts of an object name. Reject names that lead outside the root."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise StorageError(f"{name!r} is not a valid object name: use a relative path without '..'")
    return parts


def check_name(name: str) -> str:
    """Return an object name in its normal form. Reject names that lead outside the root."""
    return "/".join(split_name(name))


def is_hidden(name: str) -> bool:
    """Return whether a part of the name starts with a dot: locks and partial files."""
    return any(part.startswith(".") for part in PurePosixPath(name).parts)
