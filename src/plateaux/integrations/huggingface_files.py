"""Folders of Hugging Face models and data sets: local ones, and those of the hub, which are downloaded if allowed.

A folder is data: configurations, weights as safetensors, tokenizers, and tables are read, and no code in it is run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, Literal

from plateaux.core.errors import DataError, RecipeError, first_line
from plateaux.core.imports import optional_import
from plateaux.core.registry import HUB_PREFIX
from plateaux.data.files import data_root

EXTRA = "hf"
RUN_FILE = "run.json"  # marks the root of a run
MAX_JSON_BYTES = 1 << 25  # of a configuration
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[\w./-]+))?", re.ASCII)
# Files of these kinds are data. Weights that are pickled, and modules of Python, are not downloaded.
MODEL_FILES = ("*.json", "*.safetensors", "vocab.txt", "merges.txt", "*.model")
DATA_FILES = ("*.json", "*.arrow", "*.parquet")

Kind = Literal["model", "dataset"]
_offline_lock = RLock()  # the setting of the client is one for all threads


def find_folder(name: str, kind: Kind, *, download: bool, root: str | None = None) -> Path:
    """Return the folder of `PATH_OR_ID`: below the current folder or the data root, or the copy of a hub's repository.

    Without `download`, no connection is made, and a repository is found only if it was downloaded before.
    """
    folder = local_folder(name, root)
    if folder is not None:
        _check_links(folder)
        return folder
    match = HUB_ID.fullmatch(name)
    if match is None:
        section, writer = ("model", "save_pretrained") if kind == "model" else ("data", "save_to_disk")
        raise DataError(
            f"{section}.name = {HUB_PREFIX + name!r}: there is no such folder, in the current folder or in "
            f"{str(data_root(root).absolute())!r}. Expected: a folder that {writer} wrote, or an id of the hub"
        )
    return _hub_folder(name, match["repo"], match["revision"], kind, download=download)


def local_folder(name: str, root: str | None = None) -> Path | None:
    """Return the folder that a name means on this machine, or None."""
    path = Path(name).expanduser()
    return next((place for place in (path, data_root(root) / path) if place.is_dir()), None)


def read_json(file: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_JSON_BYTES + 1)
        tree = json.loads(content) if len(content) <= MAX_JSON_BYTES else None
    except FileNotFoundError:
        raise DataError(f"{file.parent} has no {file.name}. Expected: a folder that save_pretrained wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read as JSON ({first_line(error)}). Save the model again") from None
    if not isinstance(tree, dict):
        raise DataError(f"{file} is not a JSON object of at most {MAX_JSON_BYTES:,} bytes. Save the model again")
    return tree


def is_plain_name(name: Any) -> bool:
    """Return whether a value names a file or a folder inside of another folder, and nothing else."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..")


@contextmanager
def offline() -> Iterator[None]:
    """Let the client of the hub raise an error instead of connecting: a folder may name what it would fetch."""
    constants: Any = optional_import("huggingface_hub.constants", extra=EXTRA)
    with _offline_lock:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


def _hub_folder(name: str, repo: str, revision: str | None, kind: Kind, *, download: bool) -> Path:
    hub = optional_import("huggingface_hub", extra=EXTRA)
    section = "model" if kind == "model" else "data"
    options = {
        "repo_type": kind,
        "revision": revision,
        "allow_patterns": list(MODEL_FILES if kind == "model" else DATA_FILES),
    }
    try:
        return Path(hub.snapshot_download(repo, **options, local_files_only=not download))
    except Exception as error:  # of the client, of HTTP, or of the network: they have no common base class
        if download:
            raise RecipeError(
                f"{section}.name = {HUB_PREFIX + name!r} cannot be downloaded: {type(error).__name__}: "
                f"{first_line(error)[:300]}. Check the name, your connection, and HF_TOKEN for private repositories"
            ) from None
        raise RecipeError(
            f"{section}.name = {HUB_PREFIX + name!r} is neither a local folder nor a repository that was downloaded "
            "before: allow the download with --download (in Python: download=True), or give the path of a local folder"
        ) from None


def _check_links(folder: Path) -> None:
    """Raise an error for links in a folder below a run: an untrusted run must not lead to other files."""
    path = folder.absolute()
    root = next((each for each in reversed((path, *path.parents)) if (each / RUN_FILE).is_file()), None)
    if root is None:
        return
    parts = [path, *path.parents]
    links = [part for part in parts[: parts.index(root)] if part.is_symlink()]
    for place, folders, files in os.walk(path):
        links += [Path(place) / each for each in (*folders, *files) if (Path(place) / each).is_symlink()]
    if links:
        raise DataError(f"{links[0]} is a link in the folder of a run, which is not followed. Copy the file instead")
