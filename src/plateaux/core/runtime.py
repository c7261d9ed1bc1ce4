"""What this machine is told before work begins: devices, threads, the memory allocator, random state and precision."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from plateaux.core.errors import RecipeError

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def get_device(name: str | None) -> torch.device:
    """Return the device called `name` ("cpu", "cuda:1", or "1"), or the best one there is."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(f"cuda:{name}" if name.isdigit() else name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RecipeError(f"device {name!r} is not here: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def num_cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_rank_zero() -> bool:
    """Say whether this is the first process of a mesh, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's place in the mesh, and how many processes there are."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def local_processes() -> int:
    """Return the processes of a mesh on this machine, this one included."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def node_name() -> str:
    """Return the name of the machine this process works on, as its cluster calls it."""
    return os.environ.get("PLATEAUX_NODE") or platform.node()


def configure_runtime(*, processes: int = 1, threads: int | None = None) -> None:
    """Set the threads of this process, one of so many, and tell the allocator to keep what it has.

    Two processes of two threads each on two cores run many times slower than two of one thread, so the number is set
    here and not left to chance. OMP_NUM_THREADS may lower it: somebody else may need the other cores.
    """
    fair = max(1, num_cores() // processes)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(threads or min(fair, int(limit) if limit.isdigit() and int(limit) else fair))
    _keep_memory()


def _keep_memory() -> None:
    """Stop glibc from giving every large tensor back to the system: training asks for the same sizes again at once."""
    if not sys.platform.startswith("linux"):
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, the largest glibc takes
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        return  # another C library: nothing to tell it


@contextmanager
def fork_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Fork torch's generators and seed them with `key`; what ran before is not disturbed."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:  # cuda-only
            torch.cuda.manual_seed(seed)  # cuda-only
        yield


def autocast(precision: str, device: torch.device) -> Any:
    """Open the precision of ONE forward pass.

    A context of its own for every forward: inside one context a weight perturbed in place would still be used from
    autocast's cached copy, and SAM would silently become plain descent.
    """
    if precision not in ("bf16", "fp16"):
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def param_dtype(precision: str) -> torch.dtype:
    """Return the type weights are held in."""
    return torch.float64 if precision == "fp64" else torch.float32
