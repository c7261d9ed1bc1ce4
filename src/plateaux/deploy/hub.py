"""Push a bundle to the Hugging Face Hub, a bucket, or a folder, and pull it from there.

What is pulled is untrusted: its manifest is read first, then only files that it names, which are data, with the size
and SHA-256 that it states.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from plateaux.core.errors import PlateauxError, RecipeError, RunError, StorageError, first_line
from plateaux.core.imports import optional_import
from plateaux.core.progress import Progress, WorkDone, log_messages
from plateaux.deploy.bundle import Bundle, check_pin, list_files
from plateaux.deploy.manifest import MANIFEST, MAX_BYTES, NAMES, SHARED, FileRecord, Manifest
from plateaux.storage.atomic import PARTIAL_PREFIX
from plateaux.storage.digests import hash_sha256
from plateaux.storage.remote_store import open_store
from plateaux.storage.run import RunLike
from plateaux.storage.store import Store

EXTRA = "hub"
HUB = re.compile(r"hf:/{1,3}(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?/?", re.ASCII)


def push(bundle: RunLike, target: str | Path, *, private: bool = False, progress: Progress = log_messages) -> str:
    """Copy a bundle to the Hugging Face Hub, a bucket, or a folder, and return where it is.

    Args:
        bundle: The folder or URL of a bundle. Its digests are checked first.
        target: "hf://user/name", a URL such as "s3://bucket/name", or a folder. A folder or bucket must be empty. On
            the hub, files of an older bundle are replaced in one commit.
        private: Make a new repository of the hub private. If it exists and is public, nothing is pushed.
        progress: Called with progress events.
    """
    opened = Bundle.open(bundle)
    files: dict[str, Callable[[], bytes]] = {name: partial(opened.read, name) for name in opened.manifest.files}
    files[MANIFEST] = opened.manifest.to_bytes  # last: a push that was interrupted leaves no bundle
    if hub := HUB.fullmatch(str(target)):
        if hub["revision"]:
            raise RecipeError(f"{target}: a bundle is pushed to the main branch. Leave out @{hub['revision']}")
        return _push_to_hub(hub["repo"], files, progress, private=private)
    _reject_unknown_hub(target)
    store = open_store(target)
    _clear_interrupted(store, files, f"{target} is not empty. Push to another folder, or delete it first")
    for number, (name, read) in enumerate(files.items()):
        store.put(name, read())
        progress(WorkDone(number + 1, len(files)))
    return str(target)


def pull(
    source: str | Path,
    out: str | Path,
    *,
    member: int | None = None,
    sha256: str | None = None,
    progress: Progress = log_messages,
) -> list[str]:
    """Copy a bundle from the Hugging Face Hub, a bucket, or a folder, check its digests, and return the file names.

    Args:
        source: "hf://user/name", "hf://user/name@revision", a URL such as "s3://bucket/name", or a folder.
        out: The folder to write to; it must be empty.
        member: Fetch only the weights of this member (and shared ones, if there are any), instead of the bundle.
        sha256: The digest that the bundle must have, as `export` and `push` print it. None: any.
        progress: Called with progress events.
    """
    if str(out).startswith("hf:"):
        raise RecipeError(f"{out} is on the hub. Pull into a folder; `plateaux push` copies a bundle to the hub")
    store = open_store(out)
    refusal = f"{out} is not empty. Pull into another folder, or delete it first"
    with _open_source(source) as remote:
        content = remote.read(MANIFEST, MAX_BYTES)
        check_pin(content, sha256, source)
        manifest = Manifest.from_bytes(content, f"{source}/{MANIFEST}")
        _clear_interrupted(store, manifest.files, refusal)
        names = list(manifest.files) if member is None else _member_files(manifest, member, source)
        for number, name in enumerate(names):
            store.put(name, _read_checked(remote, name, manifest.files[name], source))
            progress(WorkDone(number + 1, len(names)))
    if member is not None:
        return names
    store.put(MANIFEST, content)  # last: a pull that was interrupted leaves no bundle
    Bundle.open(out)
    return [*names, MANIFEST]


def _clear_interrupted(store: Store, names: Iterable[str], refusal: str) -> None:
    """Accept an empty folder, or what an interrupted copy of these files left: some of them without the manifest."""
    left = {name for name in list_files(store) if not name.rpartition("/")[2].startswith(PARTIAL_PREFIX)}
    if left - (set(names) - {MANIFEST}):
        raise RunError(refusal)
    store.remove_partial("")


def _push_to_hub(repo: str, files: Mapping[str, Callable[[], bytes]], progress: Progress, *, private: bool) -> str:
    hub = optional_import("huggingface_hub", extra=EXTRA)
    with _hub_errors(f"hf://{repo}"):
        api = hub.HfApi(library_name="plateaux")
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:  # the hub does not change a repository that exists
            raise RunError(f"hf://{repo} exists and is public. Make it private there first, or use another name")
        operations: list[Any] = [
            hub.CommitOperationDelete(name)
            for name in api.list_repo_files(repo)
            if NAMES.fullmatch(name) and name not in files
        ]
        for number, (name, read) in enumerate(files.items()):
            operation = hub.CommitOperationAdd(name, read())
            api.preupload_lfs_files(repo, additions=[operation])  # large files one by one, which frees their memory
            operations.append(operation)
            progress(WorkDone(number + 1, len(files)))
        done = api.create_commit(repo, operations, commit_message="Upload a bundle of Plateaux")
    return str(done.repo_url)


def _member_files(manifest: Manifest, member: int, source: object) -> list[str]:
    names = [f"members/{member}.safetensors", SHARED]
    if names[0] not in manifest.files:
        allowed = ", ".join(map(str, manifest.members))
        raise RecipeError(f"{source} has no member {member}. Its members are {allowed}")
    return [name for name in names if name in manifest.files]


def _read_checked(remote: _Source, name: str, record: FileRecord, source: object) -> bytes:
    content = remote.read(name, record.bytes)
    if FileRecord(*hash_sha256(io.BytesIO(content))) != record:
        raise StorageError(
            f"{source}/{name} is damaged or was exchanged: its size or its SHA-256 is not that of the manifest. "
            "Nothing of it was kept; pull again, or ask whoever pushed it"
        )
    return content


class _Source(Protocol):
    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of a file, or its first bytes if it has more than `max_bytes`."""


@dataclass(frozen=True, slots=True)
class _StoreSource:
    store: Store

    def read(self, name: str, max_bytes: int) -> bytes:
        with self.store.open_reader(name) as file:
            return file.read(max_bytes + 1)


@dataclass(frozen=True, slots=True)
class _HubSource:
    """The files of one commit of a repository."""

    api: Any
    repo: str
    commit: str
    sizes: Mapping[str, int]
    folder: str

    def read(self, name: str, max_bytes: int) -> bytes:
        size = self.sizes.get(name)
        if size is None:
            raise StorageError(f"hf://{self.repo} has no {name}. It is no complete bundle of Plateaux")
        if size > max_bytes:
            raise StorageError(f"hf://{self.repo}/{name} has {size:,} bytes instead of at most {max_bytes:,}")
        with _hub_errors(f"hf://{self.repo}/{name}"):
            path = self.api.hf_hub_download(self.repo, name, revision=self.commit, local_dir=self.folder)
        with Path(path).open("rb") as file:
            content = file.read(max_bytes + 1)
        Path(path).unlink()
        return content


@contextmanager
def _open_source(source: str | Path) -> Iterator[_Source]:
    match = HUB.fullmatch(str(source))
    if match is None:
        _reject_unknown_hub(source)
        store = open_store(source)
        if not store.has(MANIFEST):
            raise RunError(f"{source} is not a bundle: it has no {MANIFEST}")
        yield _StoreSource(store)
        return
    hub = optional_import("huggingface_hub", extra=EXTRA)
    with tempfile.TemporaryDirectory(prefix="plateaux-pull-") as folder:
        with _hub_errors(str(source)):
            api = hub.HfApi(library_name="plateaux")
            # All files come from one commit, also if another one is pushed meanwhile.
            info = api.model_info(match["repo"], revision=match["revision"], files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        yield _HubSource(api, match["repo"], info.sha, sizes, folder)


def _reject_unknown_hub(address: str | Path) -> None:
    if str(address).startswith("hf:"):
        raise RecipeError(f"{address}: give hf://user/name, or hf://user/name@revision to pull")


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Turn the errors of the client, and of the network below it, into one sentence."""
    try:
        yield
    except PlateauxError:
        raise
    except Exception as problem:  # of the client, of HTTP, or of the network: they have no common base class
        raise StorageError(
            f"{what}: {type(problem).__name__}: {first_line(problem)[:300]}. Check the name, your connection, and "
            "HF_TOKEN for private repositories"
        ) from None
