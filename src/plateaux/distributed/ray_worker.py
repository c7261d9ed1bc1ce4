"""A pair of hands on a Ray cluster: a process that carries out jobs in one thread and answers in others."""

from __future__ import annotations

import gc
import os
import socket
from collections import deque
from collections.abc import Mapping
from functools import partial
from threading import Condition
from typing import Any

from plateaux.core.executor import JobFn
from plateaux.core.runtime import num_cores
from plateaux.distributed.process_pool import run_captured
from plateaux.distributed.stop_signal import stop_worker_threads

BROKEN = ("gloo", "NCCL", "TCPStore", "ProcessGroup", "Connection reset", "Broken pipe", "DistNetwork", "DistStore")


class RayWorker:
    """Carries out jobs in a process of the cluster, and keeps what there is to tell until it is asked."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=10_000)
        self._condition = Condition()
        self._over = False  # whether the last job has ended, and there is nothing to wait for
        self._frozen = False  # whether what was imported is left out where garbage is looked for

    def describe(self) -> dict[str, Any]:
        """Say where this is: node, process, address, and a port that is free there."""
        import ray

        address = ray.util.get_node_ip_address()
        os.environ["PLATEAUX_NODE"] = f"{address} {ray.get_runtime_context().get_node_id()[:6]}"
        with socket.socket() as door:
            door.bind(("", 0))
            port = door.getsockname()[1]
        return {"node": os.environ["PLATEAUX_NODE"], "pid": os.getpid(), "address": address, "port": port}

    def run_job(
        self, carry_out: JobFn, job: Any, cpus: float, group: Mapping[str, Any] | None = None
    ) -> tuple[str, Any, list[dict[str, Any]]]:
        """Carry out a job; say `done`, `failed` and why, or `broken` where the fault is another process's.

        `group` is our place among the job's processes, by the names that torchrun sets and the mesh looks for. The
        third part of the answer is the news that nobody has asked for yet.
        """
        os.environ |= {name: str(value) for name, value in (group or {}).items()}
        fair = max(1, num_cores() // max(1, int(cpus)))  # so many of us the machine has room for
        if not self._frozen:  # Ray lets every process look for garbage while an actor waits for a place
            gc.freeze()  # so that it is not looked for among all that was imported; to count those takes milliseconds
            self._frozen = True
        self._over = False
        kind, content = run_captured(partial(carry_out, job, self._keep, processes=fair))
        if kind == "failed" and group and any(word in ": ".join(content) for word in BROKEN):
            kind = "broken"
        with self._condition:
            self._over = True
            self._condition.notify_all()
        return kind, content, self.poll_events(0)

    def poll_events(self, patience: float) -> list[dict[str, Any]]:
        """Return the news since the last time, gathered for a while, or until the job is over.

        Every answer costs both sides some milliseconds, so it does not come for each piece of news.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._over, patience)
            heard = list(self._events)
            self._events.clear()
        return heard

    def stop(self) -> None:
        """Ask the job to end with a checkpoint."""
        stop_worker_threads()

    def _keep(self, event: Any) -> None:
        with self._condition:
            self._events.append(event)
