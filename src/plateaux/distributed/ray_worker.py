"""The actor of a Ray pool: it executes jobs in one thread and replies to the pool in others."""

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
from plateaux.core.process_info import num_cores
from plateaux.core.progress import ProgressEvent
from plateaux.distributed.process_pool import run_captured
from plateaux.distributed.stop_signal import stop_worker_threads

MAX_EVENTS = 10_000  # kept between two polls; older ones are dropped
GROUP_ERRORS = (
    "gloo", "NCCL", "TCPStore", "ProcessGroup", "Connection reset", "Broken pipe", "DistNetwork", "DistStore",
)  # fmt: skip


class RayWorker:
    """Executes jobs in a process of the cluster, and collects progress events until they are polled."""

    def __init__(self) -> None:
        self._events: deque[ProgressEvent] = deque(maxlen=MAX_EVENTS)
        self._condition = Condition()
        self._is_finished = False  # whether the last job is over, so that polls return at once
        self._is_frozen = False  # whether gc.freeze was called

    def describe(self) -> dict[str, Any]:
        """Return the node, process id, address, and a free port of this process."""
        import ray

        address = ray.util.get_node_ip_address()
        os.environ["PLATEAUX_NODE"] = ray.get_runtime_context().get_node_id()[:8]  # as in `ray list nodes`
        with socket.socket() as server:
            server.bind((address, 0))
            port = server.getsockname()[1]
        return {"node": os.environ["PLATEAUX_NODE"], "pid": os.getpid(), "address": address, "port": port}

    def run_job(
        self, run_job: JobFn, job: Any, cpus: float, environment: Mapping[str, Any] | None = None
    ) -> tuple[str, Any, list[ProgressEvent]]:
        """Execute a job; return its status, its error, and the events that were not polled yet.

        The status is `done`, `failed`, or `broken` if another process of the group failed. `environment` holds the
        variables of torchrun for a job with several processes.
        """
        os.environ |= {name: str(value) for name, value in (environment or {}).items()}
        processes = max(1, num_cores() // max(1, int(cpus)))  # actors of this size that the machine has room for
        if not self._is_frozen:  # Ray runs garbage collection in every process while an actor waits for resources
            gc.freeze()  # imported modules are then left out, which saves milliseconds each time
            self._is_frozen = True
        self._is_finished = False
        status, error = run_captured(partial(run_job, job, self._add_event, processes=processes))
        if status == "failed" and environment and any(word in ": ".join(error) for word in GROUP_ERRORS):
            status = "broken"
        with self._condition:
            self._is_finished = True
            self._condition.notify_all()
        return status, error, self.poll_events(0)

    def poll_events(self, timeout: float) -> list[ProgressEvent]:
        """Return the events since the last poll, collected for `timeout` seconds or until the job is over.

        Events are collected because every reply costs both sides some milliseconds.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._is_finished, timeout)
            events = list(self._events)
            self._events.clear()
        return events

    def stop(self) -> None:
        """Ask the job to stop with a checkpoint."""
        stop_worker_threads()

    def _add_event(self, event: ProgressEvent) -> None:
        with self._condition:
            self._events.append(event)
