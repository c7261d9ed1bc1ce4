"""Digests of stored files: a damaged or exchanged file is refused, not used.

- A file that a commit names has its digest next to its name: `sha256:<size>:<hex>`, or `blake2b:<size>:<hex>` above one
  megabyte, where BLAKE2 is about twice as fast.
- A bundle, which other programs check, has the SHA-256 of every file in its manifest.
- A JSON object carries the digest of its other fields in the field `digest`.
- A safetensors file carries a digest in its metadata, computed while that digest is all zeros.

A digest detects damage. It is not a signature: whoever can write a file can also write its digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import IO, Any

LARGE_BYTES = 1 << 20
CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 24
FIELD = "digest"
NAME = "object"  # the metadata field with the name of the object, so that exchanged files are noticed
BLANK = "blake2b:" + 64 * "0"  # the digest in a safetensors header before it is known


class DigestError(ValueError):
    """The content of a file does not match its digest."""


def digest_bytes(content: bytes | memoryview) -> str:
    """Return the digest of some content."""
    algorithm = "sha256" if len(content) <= LARGE_BYTES else "blake2b"
    return f"{algorithm}:{len(content)}:{_new(algorithm, content).hexdigest()}"


def digest_file(file: IO[bytes]) -> str:
    """Return the digest of an open file from its start, in constant memory."""
    size = file.seek(0, os.SEEK_END)
    hasher = _new(algorithm := "sha256" if size <= LARGE_BYTES else "blake2b")
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        hasher.update(chunk)
    return f"{algorithm}:{size}:{hasher.hexdigest()}"


def hash_sha256(file: IO[bytes]) -> tuple[int, str]:
    """Return the size of an open file from its start and its SHA-256 as hexadecimal digits, in constant memory."""
    hasher, size = _new("sha256"), 0
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        hasher.update(chunk)
        size += len(chunk)
    return size, hasher.hexdigest()


def check_digest(content: bytes, expected: str) -> None:
    """Raise `DigestError` if the content is not the one with this digest."""
    size = expected.split(":")[1] if expected.count(":") == 2 else ""
    if str(len(content)) != size:
        raise DigestError(f"it has {len(content)} bytes instead of {size[:20] or 'a recorded number'}")
    if digest_bytes(content) != expected:
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
    return f"sha256:{_new('sha256', text.encode()).hexdigest()}"


def embed_digest(file: IO[bytes]) -> None:
    """Replace the blank digest in the header of an open safetensors file by the digest of the file."""
    header = _read_header(file)
    position = header.find(BLANK.encode())
    if position < 0:
        raise DigestError("its header has no place for a digest")
    digest = _hash_rest(file, header)
    file.seek(8 + position)
    file.write(digest.encode())
    file.flush()


def check_embedded_digest(file: IO[bytes], name: str) -> None:
    """Raise `DigestError` if an open safetensors file does not match the digest, or has another name in its header."""
    header = _read_header(file)
    metadata = json.loads(header).get("__metadata__", {})
    digest = metadata.get(FIELD)
    if not isinstance(digest, str) or len(digest) != len(BLANK) or header.count(digest.encode()) != 1:
        raise DigestError("it has no digest")
    if _hash_rest(file, header.replace(digest.encode(), BLANK.encode())) != digest:
        raise DigestError("its content does not match its digest")
    if metadata.get(NAME) != name:
        raise DigestError(f"it is the file {str(metadata.get(NAME))[:200]!r}")


def _read_header(file: IO[bytes]) -> bytes:
    """Return the header of a safetensors file, and leave the file at its first tensor."""
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= min(length - 8, MAX_HEADER_BYTES):
        raise DigestError("the length of its header is invalid")
    return file.read(size)


def _hash_rest(file: IO[bytes], header: bytes) -> str:
    """Return the digest of a header with a blank digest and of the tensors that follow."""
    hasher = _new("blake2b", header)
    while chunk := file.read(CHUNK_BYTES):
        hasher.update(chunk)
    return f"blake2b:{hasher.hexdigest()}"


def _new(algorithm: str, content: bytes | memoryview = b"") -> Any:
    return hashlib.blake2b(content, digest_size=32) if algorithm == "blake2b" else hashlib.sha256(content)
