"""Storage: whole objects by name, written once, never half.

The only file that touches storage. An object is put whole and read whole; nothing is appended and nothing outside this
file is renamed, so that an object store can take the place of the folder. The local back end writes to a temporary file
beside the target and renames it. Locks are held by the kernel and die with their process.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import IO, Any
from uuid import uuid4
from weakref import WeakSet

import numpy as np
import safetensors.torch
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from plateaux.core.errors import RunError, StorageError
from plateaux.core.types import TensorTree
from plateaux.storage.lease import Lease, is_held, read_owner
from plateaux.storage.remote import Address, RemoteFS, parse_address
from plateaux.storage.tensor_file import array_header, read_array_header, save_in_order

PART = ".part-"  # names of files still being written
SCRATCH = ".scratch-"  # names of folders that nobody needs afterwards
FULL = (errno.ENOSPC, errno.EDQUOT)
LOCK_TIMEOUT_S = (
    1.0  # seconds to wait for a lock: who only looks holds it for a moment, who was killed for a little longer
)


class Store:
    """Objects under one root, by names such as `members/0/progress.json`."""

    def __init__(self, root: str | Path, *, durable: bool = True) -> None:
        self.root: Path | Address = Path(root)  # for words
        self._folder = Path(root)
        self._durable = durable  # what is put outlives a power cut

    def put(self, name: str, content: bytes | Callable[[IO[bytes]], object]) -> None:
        """Write an object whole, or leave the old one as it was; a function writes it without a copy in memory."""
        with self.writing(name) as file:
            content(file) if callable(content) else file.write(content)

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Lend a file whose content becomes the object when all went well, and vanishes when not."""
        path = self._path(name)
        part = path.with_name(f"{PART}{uuid4().hex}")  # not mkstemp, whose files nobody else may read
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("xb") as file:
                yield file
                file.flush()
                if self._durable:
                    os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException as problem:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            if isinstance(problem, OSError) and not isinstance(problem, StorageError):
                raise self._explain("write", name, problem) from None
            raise

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
        top = self._path(prefix) if prefix else self._folder
        files = (path.relative_to(self._folder) for path in top.rglob("*") if path.is_file())
        return sorted(path.as_posix() for path in files if not any(part.startswith(".") for part in path.parts))

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no mistake."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as problem:
            raise self._explain("delete", name, problem) from None

    def size(self, prefix: str = "") -> int:
        """Return the bytes of all objects below `prefix`."""
        return sum(self._path(name).stat().st_size for name in self.names(prefix))

    def remove_partial(self, prefix: str) -> None:
        """Remove what a killed writer left half-written below `prefix`."""
        for path in self._path(prefix).rglob(f"{PART}*"):
            self.delete(path.relative_to(self._folder).as_posix())

    def put_json(self, name: str, value: Any, *, again: bool = True) -> None:
        """Write plain values; with `again=False` not where the very same are written already, which is sooner done."""
        content = (json.dumps(value, indent=2) + "\n").encode()
        if again or not self.has(name) or self.get(name) != content:
            self.put(name, content)

    def get_json(self, name: str) -> Any:
        content = self.get(name)
        try:
            return json.loads(content)
        except ValueError as problem:
            raise StorageError(
                f"{self.root / name} is not valid JSON ({problem}); restore it or start a new run"
            ) from None

    def put_tensors(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
        """Write tensors as safetensors, which any program can read and which can run nothing."""
        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        self.put(name, lambda file: save_in_order(plain, Path(file.name), dict(about or {})))

    def get_tensors(self, name: str) -> TensorTree:
        content = self.get(name)
        try:
            return safetensors.torch.load(content)
        except Exception as problem:
            raise self._damaged(name, problem) from None

    @contextmanager
    def array_writer(
        self, name: str, dtype: DTypeLike, length: int, about: Mapping[str, str] | None = None
    ) -> Iterator[Callable[[NDArray[Any]], None]]:
        """Lend a function that takes an array chunk by chunk and writes it as safetensors with one tensor."""
        kind, came = np.dtype(dtype), 0

        def write(chunk: NDArray[Any]) -> None:
            nonlocal came
            assert (chunk.dtype, chunk.ndim) == (kind, 1), (chunk.dtype, chunk.shape)
            came += len(chunk)
            file.write(np.ascontiguousarray(chunk).data)

        with self.writing(name) as file:
            file.write(array_header(kind, length, about or {}))
            yield write
            if came != length:
                raise StorageError(f"{self.root / name} was not written: {came:,} numbers came instead of {length:,}")

    def array(self, name: str) -> tuple[dict[str, str], NDArray[Any]]:
        """Return what an array's header says about it, and the array, read-only and read where it is looked at."""
        with self._reading_array(name) as (file, about, kind, length):
            mapped = np.memmap(file, kind, "r", file.tell(), (length,))
        return about, mapped.view(np.ndarray)  # a plain array is looked up sooner

    def array_chunks(self, name: str, size: int) -> Iterator[NDArray[Any]]:
        """Read an array in order, `size` numbers at a time; not through a map, whose pages count as memory."""
        with self._reading_array(name) as (file, _, kind, length):
            for start in range(0, length, size):
                chunk = np.empty(min(size, length - start), kind)
                if file.readinto(chunk.data) != chunk.nbytes:
                    raise self._damaged(name, "it ends early")
                yield chunk

    @contextmanager
    def _reading_array(self, name: str) -> Iterator[tuple[Any, dict[str, str], np.dtype[Any], int]]:
        try:
            file = self._file(name).open("rb")
        except OSError as problem:
            raise self._explain("read", name, problem) from None
        with file:
            try:
                about, kind, length = read_array_header(file)
            except OSError as problem:
                raise self._explain("read", name, problem) from None
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
                raise self._damaged(name, problem) from None
            yield file, about, kind, length

    def put_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Write nested tensors and plain values."""
        self.put(name, lambda file: torch.save(dict(state), file))

    def get_state(self, name: str) -> dict[str, Any]:
        """Read nested tensors and plain values; nothing in the object is executed."""
        content = self.get(name)
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
        except Exception:  # what torch says here ends with how to load it unsafely
            raise StorageError(
                f"{self.root / name} is damaged, or holds more than tensors and plain values, which is never loaded. "
                "Restore it, or delete its folder to train that member again"
            ) from None

    @contextmanager
    def lock(self, name: str, *, patience: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Hold `name` alone; the kernel lets go when the process ends, however it ends."""
        path = self._path(f"{name}/.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        except OSError as problem:
            raise self._explain("lock", name, problem) from None
        with file:
            if not _locked(file, time.monotonic() + patience):
                raise RunError(
                    f"{path.parent} is in the hands of another process; wait for it, or stop it and run this again"
                )
            _held.add(file)
            yield

    def held(self, name: str) -> bool:
        """Say whether somebody holds `name` now."""
        if not self._path(f"{name}/.lock").exists():
            return False
        try:
            with self.lock(name, patience=0):
                return False
        except StorageError:
            raise
        except RunError:
            return True

    @contextmanager
    def scratch(self) -> Iterator[Store]:
        """Lend a store for things that nobody needs afterwards; those of killed processes are cleared away."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(f"{SCRATCH}*"):
            if (left / ".lock").exists() and not Store(left).held("."):
                shutil.rmtree(left, ignore_errors=True)
        folder = tempfile.mkdtemp(prefix=SCRATCH, dir=self._folder)
        lent = Store(folder, durable=False)
        try:
            with lent.lock("."):
                yield lent
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._folder.joinpath(*_parts(name))

    def _file(self, name: str) -> Path:
        """Return a file on this machine that holds the object."""
        return self._path(name)

    def _damaged(self, name: str, problem: object) -> StorageError:
        return StorageError(f"{self.root / name} is damaged ({problem}); restore it or train that member again")

    def _explain(self, verb: str, name: str, problem: OSError) -> StorageError:
        path = self.root / name
        if problem.errno in FULL:
            return StorageError(
                f"The disk is full: could not write {path}. Free some space and run the same command again"
            )
        return StorageError(f"Cannot {verb} {path}: {problem.strerror or problem}")


class RemoteStore(Store):
    """Objects at an address that fsspec reaches; a lease does what the kernel's lock does in a folder."""

    def __init__(self, address: Address) -> None:
        self.root = address
        self._bucket = RemoteFS(address)
        self._leases: list[Lease] = []
        self._room = tempfile.TemporaryDirectory(prefix="plateaux-")  # what is read by parts, or being written
        self._folder = Path(self._room.name)

    def put(self, name: str, content: bytes | Callable[[IO[bytes]], object]) -> None:
        if callable(content):
            super().put(name, content)
        else:
            self._upload(name, content)

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        part = self._folder / f"{PART}{uuid4().hex}"
        try:
            with part.open("xb") as file:
                yield file
            self._upload(name, part)
        finally:
            part.unlink(missing_ok=True)

    def _upload(self, name: str, content: bytes | Path) -> None:
        for lease in self._leases:
            if name.startswith(lease.prefix):
                lease.check()
        with self._explained("write", name):
            self._bucket.write(_checked(name), content)

    def get(self, name: str) -> bytes:
        with self._explained("read", name):
            return self._bucket.read(_checked(name))

    def has(self, name: str) -> bool:
        with self._explained("read", name):
            return self._bucket.has(_checked(name))

    def names(self, prefix: str = "") -> list[str]:
        return sorted(self._sizes(prefix))

    def size(self, prefix: str = "") -> int:
        return sum(self._sizes(prefix).values())

    def _sizes(self, prefix: str) -> dict[str, int]:
        with self._explained("list", prefix):
            found = self._bucket.sizes(_checked(prefix) if prefix else "")
        return {name: size for name, size in found.items() if not any(p.startswith(".") for p in _parts(name))}

    def delete(self, name: str) -> None:
        with self._explained("delete", name):
            self._bucket.remove(_checked(name))

    def remove_partial(self, prefix: str) -> None:
        """Do nothing: an object appears whole, and what was being sent when its writer was killed is no object."""

    @contextmanager
    def lock(self, name: str, *, patience: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        with Lease(self._bucket, _checked(name)).held(patience) as lease:
            self._leases.append(lease)
            try:
                yield
            finally:
                self._leases.remove(lease)

    def held(self, name: str) -> bool:
        try:
            return is_held(read_owner(self._bucket, f"{_checked(name)}/.lease"))
        except FileNotFoundError:
            return False

    def _file(self, name: str) -> Path:
        """Return a copy on this machine, made when the object is first looked at, and anew when it has changed."""
        with self._explained("read", name):
            file = self._folder / _cached_name(name, self._bucket.mark(_checked(name)))
            if not file.exists():
                part = file.with_name(f"{PART}{uuid4().hex}")
                self._bucket.fetch(name, part)
                os.replace(part, file)
        return file

    @contextmanager
    def _explained(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as problem:
            raise self._explain(verb, name, problem) from None


def store_at(root: str | Path) -> Store:
    """Return the store at a path, or at an address such as s3://bucket/runs/demo."""
    address = parse_address(root)
    return Store(root) if address is None else RemoteStore(address)


def _cached_name(*words: str) -> str:
    return blake2b("\n".join(words).encode(), digest_size=16).hexdigest()


def _parts(name: str) -> tuple[str, ...]:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise StorageError(f"{name!r} does not name an object of this run")
    return parts


def _checked(name: str) -> str:
    return "/".join(_parts(name))


_held: WeakSet[IO[str]] = WeakSet()


def _locked(file: IO[str], until: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)


def _release_all() -> None:
    """Close a forked child's copies of the locks: a loader's workers outlive their killed parent by seconds."""
    for file in list(_held):
        file.close()


os.register_at_fork(after_in_child=_release_all)
