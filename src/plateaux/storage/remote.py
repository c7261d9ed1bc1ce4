"""Objects in a bucket, or wherever else fsspec reaches: whole ones only, tried again when the network stumbles.

Only `store.py` uses this. Credentials come from the environment, as the store's own client finds them (for S3:
AWS_ACCESS_KEY_ID and its kin, AWS_ENDPOINT_URL for a server that is not Amazon's), never from an address or a recipe.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from plateaux.core.errors import RecipeError, StorageError

URL = re.compile(r"^([a-z][a-z0-9+.-]+):/{1,3}([^/].*)$")  # one slash is what a Path leaves of two
MAX_TRIES = 6  # of one request, on top of what the store's own client tries
FIRST_WAIT_S = 0.1  # seconds; doubled each time
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError)

Found = TypeVar("Found")


class Address(str):
    """The address of a run folder elsewhere; `/` goes into it, as in a path."""

    __slots__ = ()

    def __truediv__(self, name: object) -> Address:
        return Address(f"{self}/{name}")


def parse_address(root: str | Path) -> Address | None:
    """Return the address that `root` is, or None: a path on this machine."""
    found = URL.match(str(root))
    if found is None:
        return None
    if found[1] in ("file", "local"):
        raise RecipeError(f"{root} is on this machine: give the path itself, without {found[1]}://")
    if "@" in found[2].split("/")[0]:
        raise RecipeError(f"Credentials have no place in an address: {found[1]}://... takes them from the environment")
    return Address(f"{found[1]}://{found[2].rstrip('/')}")


class RemoteFS:
    """Objects under one address."""

    def __init__(self, address: Address) -> None:
        protocol = address.partition(":")[0]
        package = PACKAGES.get(protocol, "fsspec")
        for needed in ("fsspec", package):
            if find_spec(needed) is None:
                raise RecipeError(
                    f"{address} needs {needed}: pip install {needed}" + ', or "plateaux[cloud]"' * (package == "s3fs")
                )
        self.address = address
        # A listing or a page that was true a minute ago is not: others write here too.
        options = {"use_listings_cache": False, "default_cache_type": "none"} if package == "s3fs" else {}
        self._files, self._root = import_module("fsspec.core").url_to_fs(str(address), **options)
        self.swaps = package == "s3fs"  # it can replace an object on the condition that nobody has meanwhile
        self.creates = self.swaps or protocol == "memory"  # it can make an object on the condition that there is none

    def read(self, name: str) -> bytes:
        return bytes(self._again("read", name, lambda path: self._files.cat_file(path)))

    def write(self, name: str, content: bytes | Path) -> None:
        """Put an object whole: from memory, or from a file on this machine."""
        if isinstance(content, Path):
            self._again("write", name, lambda path: self._files.put_file(str(content), path))
        else:
            self._again("write", name, lambda path: self._files.pipe_file(path, content))

    def fetch(self, name: str, target: Path) -> None:
        """Copy an object into a file on this machine."""
        self._again("read", name, lambda path: self._files.get_file(path, str(target)))

    def mark(self, name: str) -> str:
        """Return what changes whenever the object does."""
        return str(self._again("read", name, lambda path: self._files.ukey(path)))

    def has(self, name: str) -> bool:
        return bool(self._again("read", name, lambda path: self._files.isfile(path)))

    def remove(self, name: str) -> None:
        """Remove an object; one that is not there is no mistake."""
        try:
            self._again("delete", name, lambda path: self._files.rm_file(path))
        except FileNotFoundError:
            return

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return every object below a prefix, and its bytes."""
        try:
            found = self._again("list", prefix, lambda path: self._files.find(path, detail=True))
        except FileNotFoundError:
            return {}
        return {name.removeprefix(self._root).lstrip("/"): int(facts["size"]) for name, facts in found.items()}

    def create(self, name: str, content: bytes) -> bool:
        """Put an object if there is none of that name; say whether it was put."""
        if not self.creates:
            if self.has(name):
                return False
            self.write(name, content)
            return True
        try:
            self._again("write", name, lambda path: self._files.pipe_file(path, content, mode="create"))
            return True
        except FileExistsError:
            return False

    def swap(self, name: str, content: bytes, tag: str) -> bool:
        """Replace an object if it is still the one with this tag; say whether it was replaced."""
        try:
            self._again("write", name, lambda path: self._files.pipe_file(path, content, IfMatch=tag))
            return True
        except (FileExistsError, FileNotFoundError):
            return False

    def tag(self, name: str) -> str:
        """Return the tag that `swap` takes."""
        return str(self._again("read", name, lambda path: self._files.info(path))["ETag"])

    def _again(self, verb: str, name: str, call: Callable[[str], Found]) -> Found:
        """Make a request until it is answered; what no repetition mends is raised at once."""
        path, left = f"{self._root}/{name}".rstrip("/"), MAX_TRIES
        while True:
            left -= 1
            try:
                return call(path)
            except FINAL:
                raise
            except Exception as problem:  # each client has a tree of errors of its own
                if _refused(problem):
                    raise FileExistsError(f"{self.address}/{name}") from None
                if not left:
                    raise StorageError(f"Cannot {verb} {self.address}/{name}: {problem}") from problem
            time.sleep(FIRST_WAIT_S * 2 ** (MAX_TRIES - 1 - left))


def _refused(problem: BaseException) -> bool:
    """Say whether a store's answer was that the condition does not hold."""
    words = ("PreconditionFailed", "ConditionalRequestConflict", "pre-conditions")
    causes = [each for each in (problem, problem.__cause__, problem.__context__) if each is not None]
    return any(_status(each) == "412" or any(word in str(each) for word in words) for each in causes)


def _status(problem: BaseException) -> str:
    """Return the HTTP status that an error of some client tells; in its words any number may stand, as a name."""
    response = getattr(problem, "response", None)
    about = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    told = (about.get("HTTPStatusCode"), *(getattr(problem, name, None) for name in ("code", "status", "status_code")))
    return next((str(each) for each in told if each is not None), "")
