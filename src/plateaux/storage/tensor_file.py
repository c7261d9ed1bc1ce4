"""Tensor files: safetensors with a sorted header, and one-dimensional arrays that are read in chunks."""

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

MAX_HEADER_BYTES = 1 << 20  # of an array
DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "U8": "u1"}
DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def save_in_order(tensors: TensorTree, path: Path, metadata: dict[str, str] | None) -> None:
    """Write safetensors without a copy in memory. The header is sorted, so that equal tensors make equal files."""
    mode = path.stat().st_mode  # the library replaces the file by one that ignores the umask
    try:
        safetensors.torch.save_file(tensors, path, metadata=metadata)
        path.chmod(mode)
    except safetensors.SafetensorError as problem:
        is_full = f"os error {errno.ENOSPC}" in str(problem)
        raise OSError(errno.ENOSPC if is_full else errno.EIO, str(problem)) from None
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        file.seek(8)
        file.write(json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def array_header(dtype: np.dtype[Any], length: int, metadata: Mapping[str, str]) -> bytes:
    """Return the safetensors header of a one-dimensional array."""
    entry = {"dtype": DTYPE_NAMES[dtype], "shape": [length], "data_offsets": [0, length * dtype.itemsize]}
    header = {"__metadata__": dict(metadata), "array": entry}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # align the values to 8 bytes
    return len(text).to_bytes(8, "little") + text


def read_array_header(file: IO[bytes]) -> tuple[dict[str, str], np.dtype[Any], int]:
    """Read and validate the header of a safetensors file with a single one-dimensional tensor."""
    file_size = os.fstat(file.fileno()).st_size
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= min(file_size - 8, MAX_HEADER_BYTES):
        raise ValueError("the length of its header is invalid")
    header = json.loads(file.read(size))
    metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
    (entry,) = header.values()
    (length,) = entry["shape"]
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    if entry["dtype"] not in dtypes:
        raise ValueError(f"its dtype is {str(entry['dtype'])[:20]!r}, not one of {', '.join(dtypes)}")
    dtype = dtypes[entry["dtype"]]
    if type(length) is not int or length < 0 or entry["data_offsets"] != [0, length * dtype.itemsize]:
        raise ValueError("its header is inconsistent")
    if 8 + size + length * dtype.itemsize != file_size:
        raise ValueError(f"its header declares {length:,} values, which does not match the size of the file")
    return metadata, dtype, length
