"""Prometheus metrics of all workers of one service.

Workers write their values to files in a folder that they share, and each of them can answer `/metrics` for all. The
client library reads the name of the folder from the environment when it is imported, so it is imported late.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from plateaux.core.imports import optional_import
from plateaux.ensembles.ood_alarm import OodAlarm
from plateaux.prediction.predictions import Predictions

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
WINDOW = 0.999  # weight that a row keeps in the moving mean with every further row


class ServiceMetrics:
    """Counters and histograms of a worker; all workers of a service report together."""

    def __init__(self, reference: OodAlarm | None = None) -> None:
        client = optional_import("prometheus_client", extra="serve")
        self._client = client
        self._is_shared = FOLDER_VARIABLE in os.environ
        registry = client.CollectorRegistry()
        self._registry = registry
        self.requests = client.Counter(
            "plateaux_requests", "Requests by endpoint and status", ["endpoint", "status"], registry=registry
        )
        self.latency = client.Histogram(
            "plateaux_request_seconds", "Time to answer a request", ["endpoint"], buckets=SECONDS, registry=registry
        )
        self.queue = client.Gauge(
            "plateaux_queue_rows",
            "Rows that waited when the last batch ended",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.batch = client.Histogram("plateaux_batch_rows", "Rows of a batch", buckets=ROWS, registry=registry)
        self.compute = client.Histogram(
            "plateaux_batch_seconds", "Time to compute a batch", buckets=SECONDS, registry=registry
        )
        self.rows = client.Counter("plateaux_predictions", "Predicted rows", registry=registry)
        self.abstained = client.Counter("plateaux_abstained", "Rows with abstention", registry=registry)
        self.ood = client.Counter("plateaux_ood", "Rows with an OOD alarm", registry=registry)
        self.ood_mean = client.Gauge(
            "plateaux_ood_score_mean",
            "Moving mean of the OOD score",
            multiprocess_mode="livemostrecent",
            registry=registry,
        )
        self.members = client.Counter("plateaux_members_queried", "Members that were queried", registry=registry)
        self._mean: float | None = None
        self._by_endpoint: dict[tuple[str, int], tuple[Any, Any]] = {}
        if reference is not None:  # what the calibration samples had, to compare the moving mean with
            for name, value in (("mean", reference.mean), ("std", reference.std)):
                text = f"OOD score of the {reference.samples} samples of the calibration: {name}"
                client.Gauge(
                    f"plateaux_ood_score_reference_{name}", text, multiprocess_mode="livemostrecent", registry=registry
                ).set(value)

    def observe_request(self, endpoint: str, status: int, seconds: float) -> None:
        """Record one request."""
        key = endpoint, status
        if key not in self._by_endpoint:  # looking up labels takes longer than counting
            self._by_endpoint[key] = self.requests.labels(endpoint, str(status)), self.latency.labels(endpoint)
        count, latency = self._by_endpoint[key]
        count.inc()
        latency.observe(seconds)

    def observe_batch(self, found: Predictions, seconds: float, queued: int) -> None:
        """Record one computed batch, and how many rows wait or were computed with it."""
        self.queue.set(queued)
        self.batch.observe(len(found))
        self.compute.observe(seconds)
        self.rows.inc(len(found))
        if found.abstain is not None:
            self.abstained.inc(int(found.abstain.sum()))
        if found.is_ood is not None:
            self.ood.inc(int(found.is_ood.sum()))
        if found.members_queried is not None:
            self.members.inc(int(found.members_queried.sum()))
        kept = WINDOW ** len(found)
        mean = float(found.ood_score.mean())
        self._mean = mean if self._mean is None else kept * self._mean + (1 - kept) * mean
        self.ood_mean.set(self._mean)

    def render(self) -> tuple[bytes, str]:
        """Return the metrics of all workers, and their content type."""
        client, registry = self._client, self._registry
        if self._is_shared:
            registry = client.CollectorRegistry()
            shared = optional_import("prometheus_client.multiprocess", extra="serve")
            forget_ended_workers(Path(os.environ[FOLDER_VARIABLE]), shared.mark_process_dead)
            shared.MultiProcessCollector(registry)
        return client.generate_latest(registry), str(client.CONTENT_TYPE_LATEST)


def forget_ended_workers(folder: Path, forget: Callable[[int], None]) -> None:
    """Remove the current values (gauges) of workers that have ended; their counts remain."""
    for pid in {int(file.stem.rpartition("_")[2]) for file in folder.glob("gauge_live*_*.db")}:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            with suppress(FileNotFoundError):  # another worker does the same
                forget(pid)
