"""Slow reader of the file of an offline W&B run: protocol buffers in the log format of LevelDB.

A header of seven bytes is followed by blocks of 32 KB. A block holds parts of records: checksum, length, and whether it
is a full record, or the first, a middle, or the last part of one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 1 << 15, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a file."""
    from wandb.proto import wandb_internal_pb2

    for content in _contents(file.read_bytes()):
        yield wandb_internal_pb2.Record.FromString(content)


def _contents(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    position, parts = HEADER, b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        assert kind in (FULL, FIRST, MIDDLE, LAST)
        part = data[position + HEADER : position + HEADER + length]
        parts = part if kind in (FULL, FIRST) else parts + part
        position += HEADER + length
        if kind in (FULL, LAST):
            yield parts
