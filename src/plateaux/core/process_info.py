"""What a process knows about itself without torch: its cores, its rank in a mesh, and its node."""

from __future__ import annotations

import os
import platform
from hashlib import blake2b


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_rank_zero() -> bool:
    """Return whether this is the first process of a mesh, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process in the mesh and the number of processes."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def local_processes() -> int:
    """Return the number of processes of the mesh on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_id() -> str:
    """Return an id of this machine without its name: run folders are published."""
    return blake2b(platform.node().encode(), digest_size=4).hexdigest()


def node_id() -> str:
    """Return an id of the node of this process: that of the cluster, or of this machine."""
    return os.environ.get("PLATEAUX_NODE") or host_id()
