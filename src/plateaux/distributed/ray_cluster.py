"""Connections to a Ray cluster, its capacity, and map-reduce tasks on it."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationMode, Config, get_authentication_mode  # type: ignore[attr-defined]
from ray.exceptions import RayTaskError
from ray.job_config import JobConfig

from plateaux.core.errors import PlateauxError, RunError, first_line
from plateaux.distributed.subprocesses import protected_children

AUTH_MODE = "RAY_AUTH_MODE"
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
    """Join a cluster, or start one on this machine; return False if this process was connected already.

    A cluster without token authentication is refused: whoever can reach its ports can run code on it. A cluster that
    is started here listens on the loopback interface only.
    """
    require_token_authentication()
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = cluster_address(address)
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if not address:
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    if not (address or "").startswith("ray://"):  # a client of another driver, which adds no folders to the path
        options["job_config"] = _job_config()
    try:
        with protected_children(), nullcontext() if address else _loopback_only():
            ray.init(address or "local", **options)
    except Exception as error:  # Ray raises built-in exceptions too
        problem = f"Cannot connect to the Ray cluster at {address}" if address else "Cannot start a Ray cluster here"
        raise RunError(f"{problem}: {first_line(error)}. Check `ray status`, or set another executor.address") from None
    return True


def require_token_authentication() -> None:
    """Turn on token authentication in this process; raise RunError if the environment or the caller turned it off."""
    mode = os.environ.get(AUTH_MODE, "token")
    if mode.lower() != "token":
        raise RunError(
            f"{AUTH_MODE}={mode}: a Ray cluster without token authentication runs the code of anyone who can reach its "
            f"ports. Set {AUTH_MODE}=token, on all nodes of the cluster, and run this again"
        )
    if not ray.is_initialized():
        os.environ[AUTH_MODE] = "token"
        Config.initialize("")  # Ray reads the variable once, when it is imported
    elif get_authentication_mode() != AuthenticationMode.TOKEN:
        raise RunError(
            "This process is connected to a Ray cluster without token authentication, which runs the code of anyone "
            f"who can reach its ports. Call ray.shutdown(), set {AUTH_MODE}=token on all nodes, and connect again"
        )


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Let a cluster that is started in this block listen on the loopback interface only.

    Ray does so by itself on macOS and Windows. On Linux it replaces a loopback address by that of the machine, unless
    clusters of several machines are turned off.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _job_config() -> JobConfig:
    """Return the settings of a job whose workers import from the current folder only if this process does.

    Ray puts the current folder first on the path of all workers, unless the job has a working directory.
    """
    if {"", os.getcwd()} & set(sys.path):
        return JobConfig()
    script_folder = os.path.dirname(os.path.realpath(sys.argv[0]))
    config = JobConfig(_py_driver_sys_path=[script_folder] if script_folder in sys.path else [])
    config._runtime_env_has_working_dir = lambda: True
    return config


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
