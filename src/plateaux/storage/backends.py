"""The choice between a local and a remote store."""

from __future__ import annotations

from pathlib import Path

from plateaux.storage.local_store import LocalStore
from plateaux.storage.remote_fs import parse_address
from plateaux.storage.remote_store import RemoteStore
from plateaux.storage.store import Store


def open_store(root: str | Path) -> Store:
    """Return the store at a path, or at a URL such as s3://bucket/runs/demo."""
    address = parse_address(root)
    return LocalStore(root) if address is None else RemoteStore(address)
