"""Connections to a Ray cluster, its capacity, and map-reduce tasks on it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ray
from ray.exceptions import RayTaskError

from plateaux.core.errors import PlateauxError, RunError, first_line

OBJECT_STORE_BYTES = 256 << 20  # shared memory of a cluster that is started here


@dataclass(frozen=True, slots=True)
class Resources:
    """What one process of a job needs, and how often a job is retried."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_retries: int = 5


def cluster_address(address: str | None) -> str | None:
    """Return the address of the cluster to join, from the argument or RAY_ADDRESS; None: start one on this machine."""
    return address or os.environ.get("RAY_ADDRESS") or None


def connect(address: str | None) -> bool:
    """Join a cluster, or start one on this machine; return False if this process was connected already."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = cluster_address(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    local = {} if address else {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(address or "local", **local, **quiet)
    except Exception as error:  # Ray raises built-in exceptions too
        problem = f"Cannot connect to the Ray cluster at {address}" if address else "Cannot start a Ray cluster here"
        raise RunError(f"{problem}: {first_line(error)}. Check `ray status`, or set another executor.address") from None
    return True


def disconnect() -> None:
    """Leave the cluster; a cluster that was started by `connect` ends."""
    ray.shutdown()


def max_workers(resources: Resources) -> int:
    """Return how many processes with these resources the cluster has room for now; at least 1."""
    available = ray.cluster_resources()
    needed = {"CPU": resources.num_cpus, "GPU": resources.num_gpus}
    return max(1, int(min(available.get(name, 0) / amount for name, amount in needed.items() if amount)))


def map_reduce(
    resources: Resources,
    shards: Sequence[Sequence[Any]],
    map_fn: Callable[[Any, Any], Any],
    reduce_fn: Callable[..., Any],
    context: Any,
) -> Iterator[tuple[Any, Any]]:
    """Yield, in order, the first job of every list and `reduce_fn(context, job, *results)` of its results.

    Results are `map_fn(context, job)` of all jobs of a list. Both functions are Ray tasks: results stay on the cluster,
    and Ray repeats tasks that are lost with a node.
    """
    options = {
        "num_cpus": resources.num_cpus,
        "num_gpus": resources.num_gpus,
        "max_retries": resources.max_retries,
    }
    map_task, reduce_task = (ray.remote(fn).options(**options) for fn in (map_fn, reduce_fn))
    context_ref, waiting, running = ray.put(context), iter(shards), deque[tuple[Any, Any]]()
    while True:
        for jobs in islice(waiting, max(0, 2 * max_workers(resources) - len(running))):  # a cluster may shrink
            results = [map_task.remote(context_ref, job) for job in jobs]
            running.append((jobs[0], reduce_task.remote(context_ref, jobs[0], *results)))
        if not running:
            return
        job, ref = running.popleft()
        try:
            yield job, ray.get(ref)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, PlateauxError) else error from None
