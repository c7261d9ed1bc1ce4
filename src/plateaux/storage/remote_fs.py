"""Access to the objects of a bucket, or of any other file system that fsspec supports, with retries.

Only the remote store uses this module. Credentials come from the environment in the way that the client
of the file system defines (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL for other servers
than Amazon's). They are never part of a URL or of a recipe.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from plateaux.core.errors import RecipeError, StorageError

URL = re.compile(r"^([a-z][a-z0-9+.-]+):/{1,3}([^/].*)$")  # a Path turns two slashes into one
MAX_ATTEMPTS = 6  # per request, in addition to the retries of the client
FIRST_DELAY_S = 0.1  # doubled after every attempt
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
PERMANENT_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError)
FAILED_CONDITION = ("PreconditionFailed", "ConditionalRequestConflict", "pre-conditions")

Result = TypeVar("Result")


class Address(str):
    """The URL of a remote run folder. The operator `/` appends to it, as for a path."""

    __slots__ = ()

    def __truediv__(self, name: object) -> Address:
        return Address(f"{self}/{name}")


def parse_address(root: str | Path) -> Address | None:
    """Return `root` as a URL, or None if it is a path on this machine."""
    match = URL.match(str(root))
    if match is None:
        return None
    if match[1] in ("file", "local"):
        raise RecipeError(f"{root} is on this machine: give the path itself, without {match[1]}://")
    if "@" in match[2].split("/")[0]:
        raise RecipeError(
            f"A URL must not contain credentials: set them in the environment and write {match[1]}://bucket/folder"
        )
    return Address(f"{match[1]}://{match[2].rstrip('/')}")


class RemoteFS:
    """The objects below one URL."""

    def __init__(self, address: Address) -> None:
        protocol = address.partition(":")[0]
        package = PACKAGES.get(protocol, "fsspec")
        for required in ("fsspec", package):
            if find_spec(required) is None:
                raise RecipeError(
                    f"{address} needs {required}: pip install {required}"
                    + ', or "plateaux[cloud]"' * (package == "s3fs")
                )
        self.address = address
        # Other processes write here too, so listings and pages must not be cached.
        options = {"use_listings_cache": False, "default_cache_type": "none"} if package == "s3fs" else {}
        self._files, self._root = import_module("fsspec.core").url_to_fs(str(address), **options)
        self._can_swap = package == "s3fs"  # the other clients pass no condition to the server

    def read(self, name: str) -> bytes:
        return bytes(self._retry("read", name, lambda path: self._files.cat_file(path)))

    def write(self, name: str, content: bytes | Path) -> None:
        """Write an object from memory, or from a file on this machine."""
        if isinstance(content, Path):
            self._retry("write", name, lambda path: self._files.put_file(str(content), path))
        else:
            self._retry("write", name, lambda path: self._files.pipe_file(path, content))

    def fetch(self, name: str, target: Path) -> None:
        """Download an object to a file on this machine."""
        self._retry("read", name, lambda path: self._files.get_file(path, str(target)))

    def version(self, name: str) -> str:
        """Return an identifier that changes whenever the object changes."""
        return str(self._retry("read", name, lambda path: self._files.ukey(path)))

    def has(self, name: str) -> bool:
        return bool(self._retry("read", name, lambda path: self._files.isfile(path)))

    def remove(self, name: str) -> None:
        """Delete an object. It is no error if the object does not exist."""
        try:
            self._retry("delete", name, lambda path: self._files.rm_file(path))
        except FileNotFoundError:
            return

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of every object below a prefix."""
        try:
            entries = self._retry("list", prefix, lambda path: self._files.find(path, detail=True))
        except FileNotFoundError:
            return {}
        return {name.removeprefix(self._root).lstrip("/"): int(info["size"]) for name, info in entries.items()}

    def swap(self, name: str, content: bytes, version: bytes | None) -> bool:
        """Replace an object if its content is still `version`; None: if there is none. Return whether it was replaced.

        A conditional request (If-Match, If-None-Match) makes this atomic.
        """
        if not self._can_swap:
            raise StorageError(
                f"{self.address}/{name} cannot be written: this kind of store has no conditional writes, without which "
                "a process that was stopped could overwrite the work of another one. Train and calibrate on a disk or "
                "in s3://; a copy of the run folder in this store can be read, evaluated, and exported"
            )
        for _ in range(MAX_ATTEMPTS):
            try:
                # The ETag is read first, so that it is not newer than the content.
                etag, current = (
                    str(self._retry("read", name, lambda path: self._files.info(path))["ETag"]),
                    self.read(name),
                )
            except FileNotFoundError:
                etag, current = None, None
            if current != version:
                return current == content  # of an earlier request whose response was lost
            condition = {"mode": "create"} if etag is None else {"IfMatch": etag}
            with suppress(FileExistsError, FileNotFoundError):
                self._retry("write", name, partial(self._replace, content, condition))
                return True
        return False

    def _replace(self, content: bytes, condition: dict[str, str], path: str) -> None:
        self._files.pipe_file(path, content, **condition)

    def _retry(self, verb: str, name: str, request: Callable[[str], Result]) -> Result:
        """Repeat a request until it succeeds. Errors that a retry cannot fix are raised at once."""
        path, left = f"{self._root}/{name}".rstrip("/"), MAX_ATTEMPTS
        while True:
            left -= 1
            try:
                return request(path)
            except PERMANENT_ERRORS:
                raise
            except Exception as problem:  # every client has its own exception classes
                if _is_failed_condition(problem):
                    raise FileExistsError(f"{self.address}/{name}") from None
                if not left:
                    raise StorageError(f"Cannot {verb} {self.address}/{name}: {problem}") from problem
            time.sleep(FIRST_DELAY_S * 2 ** (MAX_ATTEMPTS - 1 - left))


def _is_failed_condition(problem: BaseException) -> bool:
    """Return whether the server rejected a conditional request because its condition does not hold."""
    causes = [cause for cause in (problem, problem.__cause__, problem.__context__) if cause is not None]
    return any(_http_status(cause) == "412" or any(text in str(cause) for text in FAILED_CONDITION) for cause in causes)


def _http_status(problem: BaseException) -> str:
    """Return the HTTP status of a client's error. The message is no source: it may contain any number in a name."""
    response = getattr(problem, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    attributes = (getattr(problem, name, None) for name in ("code", "status", "status_code"))
    statuses = (metadata.get("HTTPStatusCode"), *attributes)
    return next((str(status) for status in statuses if status is not None), "")
