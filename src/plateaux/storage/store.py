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
    BLANK,
    FIELD,
    NAME,
    DigestError,
    check_digest,
    check_embedded_digest,
    check_json_digest,
    digest_bytes,
    digest_file,
    embed_digest,
    with_json_digest,
)
from plateaux.storage.json_shapes import parse_json
from plateaux.storage.remote_fs import Address

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray
    from torch import Tensor

    from plateaux.core.types import TensorTree

# Seconds to wait for a lock. A status query holds it for a moment, and a killed process releases it after a short time.
LOCK_TIMEOUT_S = 1.0

WriteFn = Callable[[IO[bytes]], object]


class Store(Protocol):
    """Objects below one root, by names such as `members/0/progress.json`.

    An implementation defines the abstract methods. The formats (JSON, tensors, arrays, states) are the same for all.
    """

    root: Path | Address

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
    def remove_partial(self, prefix: str) -> None:
        """Delete the incomplete files that killed writers left below `prefix`."""

    @abstractmethod
    def lock(self, name: str, *, timeout: float = LOCK_TIMEOUT_S) -> AbstractContextManager[None]:
        """Hold the lock of `name`. Raise `RunError` if another process still holds it after `timeout` seconds."""

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
        value = with_json_digest(value) if has_digest and isinstance(value, dict) else value
        content = (json.dumps(value, indent=2) + "\n").encode()
        if not skip_unchanged or not self.has(name) or self.get(name) != content:
            self.put(name, content)
        return digest_bytes(content)

    def get_json(self, name: str, digest: str | None = None, *, has_digest: bool = True) -> Any:
        """Read a JSON value that `put_json` wrote, or without `has_digest` one from elsewhere."""
        tree = parse_json(self.get(name, digest), self.root / name)
        try:
            return check_json_digest(tree) if has_digest and isinstance(tree, dict) else tree
        except DigestError as problem:
            raise self._damaged_error(name, problem) from None

    def put_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
        """Write tensors as safetensors, a format that other programs read and that cannot contain code."""
        from plateaux.storage.tensor_file import save_in_order

        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}

        def write(file: IO[bytes]) -> None:
            save_in_order(plain, path := Path(file.name), {**(metadata or {}), NAME: name, FIELD: BLANK})
            with path.open("r+b") as saved:
                embed_digest(saved)

        return self.put(name, write)

    def get_tensors(self, name: str, digest: str | None = None) -> TensorTree:
        """Read tensors from safetensors."""
        import safetensors.torch

        content = self.get(name, digest)
        try:
            if digest is None:
                check_embedded_digest(io.BytesIO(content), name)
            return safetensors.torch.load(content)
        except Exception as problem:
            raise self._damaged_error(name, problem) from None

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
            file.write(array_header(dtype, length, {**(metadata or {}), NAME: name, FIELD: BLANK}))
            yield write
            if written != length:
                raise StorageError(f"{self.root / name} was not written: got {written:,} values instead of {length:,}")
            file.flush()
            embed_digest(file)

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

        with self.open_reader(name) as file:
            try:
                check_embedded_digest(file, name)
                file.seek(0)
                metadata, dtype, length = read_array_header(file)
            except OSError as problem:
                raise self._os_error("read", name, problem) from None
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
                raise self._damaged_error(name, problem) from None
            metadata = {key: value for key, value in metadata.items() if key not in (NAME, FIELD)}
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
    """Return whether a part of the name starts with a dot: locks, leases, and partial files."""
    return any(part.startswith(".") for part in PurePosixPath(name).parts)
