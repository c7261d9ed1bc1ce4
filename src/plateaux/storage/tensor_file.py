"""Files of tensors as they lie on disk: safetensors, written in order, and arrays of one axis read piece by piece."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors
import safetensors.torch

from plateaux.core.types import TensorTree

LONGEST_HEADER = 1 << 20  # bytes of an array's header
KINDS = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "U8": "u1"}
NAMES = {np.dtype(kind): name for name, kind in KINDS.items()}


def save_in_order(tensors: TensorTree, path: Path, about: dict[str, str]) -> None:
    """Write safetensors without a copy in memory, the header sorted: equal tensors make equal files."""
    try:
        safetensors.torch.save_file(tensors, path, metadata=about)
    except safetensors.SafetensorError as problem:
        full = f"os error {errno.ENOSPC}" in str(problem)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(problem)) from None
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        file.seek(8)
        file.write(json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def array_header(kind: np.dtype[Any], length: int, about: Mapping[str, str]) -> bytes:
    """Return what stands before the numbers of an array."""
    entry = {"dtype": NAMES[kind], "shape": [length], "data_offsets": [0, length * kind.itemsize]}
    header = {"__metadata__": dict(about), "array": entry}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # so that the numbers lie where a processor likes them
    return len(text).to_bytes(8, "little") + text


def read_array_header(file: IO[bytes]) -> tuple[dict[str, str], np.dtype[Any], int]:
    """Read the header of a safetensors file with one tensor of one axis, and believe nothing in it."""
    whole = os.fstat(file.fileno()).st_size
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= min(whole - 8, LONGEST_HEADER):
        raise ValueError("its header has no sensible length")
    header = json.loads(file.read(size))
    about = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
    (entry,) = header.values()
    (length,) = entry["shape"]
    kinds = {name: kind for kind, name in NAMES.items()}
    if entry["dtype"] not in kinds:
        raise ValueError(f"its numbers are {str(entry['dtype'])[:20]!r}, not one of {', '.join(kinds)}")
    kind = kinds[entry["dtype"]]
    if type(length) is not int or length < 0 or entry["data_offsets"] != [0, length * kind.itemsize]:
        raise ValueError("its header contradicts itself")
    if 8 + size + length * kind.itemsize != whole:
        raise ValueError(f"its header promises {length:,} numbers, its size does not fit")
    return about, kind, length
