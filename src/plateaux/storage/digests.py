"""Digests of stored files: a damaged or exchanged file is refused, not used.

- The digest of a file is `sha256:<size>:<hex>`. A commit names it next to the file; for an array that no commit names,
  it is in the JSON next to it (`0.json` for `0.safetensors`), which is written last and makes the array valid.
- A bundle, which other programs check, has the SHA-256 of every file in its manifest.
- A JSON object carries the digest of its other fields in the field `digest`.

A digest detects damage. It is not a signature: whoever can write a file can also write its digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import IO, Any

CHUNK_BYTES = 1 << 20
FIELD = "digest"


class DigestError(ValueError):
    """The content of a file does not match its digest."""


def digest_bytes(content: bytes | memoryview) -> str:
    """Return the digest of some content."""
    return f"sha256:{len(content)}:{hashlib.sha256(content).hexdigest()}"


def digest_file(file: IO[bytes]) -> str:
    """Return the digest of an open file from its start, in constant memory."""
    size, digits = hash_sha256(file)
    return f"sha256:{size}:{digits}"


def hash_sha256(file: IO[bytes]) -> tuple[int, str]:
    """Return the size of an open file from its start and its SHA-256 as hexadecimal digits, in constant memory."""
    hasher, size = hashlib.sha256(), 0
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        hasher.update(chunk)
        size += len(chunk)
    return size, hasher.hexdigest()


def check_digest(content: bytes | IO[bytes], expected: str) -> None:
    """Raise `DigestError` if the content, or that of an open file, is not the one with this digest."""
    found = digest_bytes(content) if isinstance(content, bytes) else digest_file(content)
    sizes = [digest.split(":")[1] if digest.count(":") == 2 else "" for digest in (found, expected)]
    if sizes[0] != sizes[1]:
        raise DigestError(f"it has {sizes[0]} bytes instead of {sizes[1][:20] or 'a recorded number'}")
    if found != expected:
        raise DigestError("its content does not match its digest")


def with_json_digest(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its digest as the last field."""
    fields = {name: value for name, value in tree.items() if name != FIELD}
    return {**fields, FIELD: _json_digest(fields)}


def check_json_digest(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON object without its digest. Raise `DigestError` if the digest is missing or wrong."""
    fields = {name: value for name, value in tree.items() if name != FIELD}
    if FIELD not in tree:
        raise DigestError("it has no digest")
    if tree[FIELD] != _json_digest(fields):
        raise DigestError("its content does not match its digest")
    return fields


def _json_digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, separators=(",", ":"))  # spaces and line breaks of the file do not matter
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
