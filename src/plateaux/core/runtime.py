"""Runtime settings: devices, threads, the memory allocator, random state, and precision."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from plateaux.core.errors import RecipeError
from plateaux.core.process_info import num_cores

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def get_device(name: str | None) -> torch.device:
    """Return the device called `name` ("cpu", "cuda:1", or "1"); with None, CUDA if available, else the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = torch.cuda.device_count()
    try:
        full_name = f"cuda:{name}" if name.isdigit() else name
        device = torch.device(full_name)
        is_cuda = str(device) == full_name and 0 <= (device.index or 0) < count  # large numbers wrap around
        exists = is_cuda if device.type == "cuda" else _can_compute(device)
    except RuntimeError:  # not the name of a device
        exists = False
    if not exists:
        raise RecipeError(
            f"There is no device {name!r}: this machine has {count} CUDA devices. Use cpu, cuda, or cuda:<number>"
        )
    return device


def _can_compute(device: torch.device) -> bool:
    """Return whether torch has this type of device here; it accepts the names of all types."""
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        return False
    return True


@contextmanager
def num_threads(threads: int | None) -> Iterator[None]:
    """Use this number of threads for the work of the calling thread; None: do not change it."""
    before = torch.get_num_threads()
    if threads is None or threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def configure_runtime(*, processes: int = 1, threads: int | None = None) -> None:
    """Set the number of threads of this process, one of `processes` on this machine, and configure the allocator.

    Two processes with two threads each on two cores are many times slower than with one thread each, so the default is
    the number of cores per process. OMP_NUM_THREADS can lower it.
    """
    cores = max(1, num_cores() // processes)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(threads or min(cores, int(limit) if limit.isdigit() and int(limit) else cores))
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Keep glibc from returning freed tensors to the system: training allocates the same sizes again at once."""
    if not sys.platform.startswith("linux"):
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, the largest glibc takes
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        return  # another C library


@contextmanager
def fork_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random generators of torch inside a with block, and restore their state on exit."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:  # cuda-only
            torch.cuda.manual_seed(seed)  # cuda-only
        yield


def autocast(precision: str, device: torch.device) -> Any:
    """Return the autocast context of ONE forward pass.

    Every forward pass needs a context of its own: within one context, autocast caches the converted weights. SAM, which
    changes weights in place, would use the cached weights and silently become plain gradient descent.
    """
    if precision not in ("bf16", "fp16"):
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def param_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the weights."""
    return torch.float64 if precision == "fp64" else torch.float32
