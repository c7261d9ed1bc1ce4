"""Dynamic batching: requests that arrive while a batch is computed form the next one. No request waits for others.

One thread computes; the event loop only moves arrays. The queue is bounded in rows: more are refused at once. A request
that was cancelled, because its deadline passed or its client has gone, is dropped before it is computed. If a batch
fails, its halves are computed, and so on, so that only the request at fault gets an error.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.prediction.inputs import PreparedInputs, concatenate_inputs
from plateaux.prediction.predictions import Predictions
from plateaux.prediction.predictor import Predictor
from plateaux.serving.limits import BusyError

SIZES = (1, 2, 4, 8, 16, 32, 64)  # batch sizes that are measured
SECONDS_PER_SIZE = 0.5  # at most, unless one call takes longer
WORTH = 0.95  # a smaller batch with this fraction of the best speed is preferred: its latency is lower


@dataclass(slots=True)
class _Waiting:
    inputs: PreparedInputs
    result: asyncio.Future[Predictions]


class Batcher:
    """Computes the predictions of concurrent requests in shared batches."""

    def __init__(
        self,
        predictor: Predictor,
        *,
        max_batch: int,
        max_queue: int,
        observe: Callable[[Predictions, float, int], None] = lambda found, seconds, queued: None,
    ) -> None:
        self.predictor, self.max_batch, self.max_queue, self.observe = predictor, max_batch, max_queue, observe
        self.rows = 0  # that wait or are computed
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="predict")
        self._task: asyncio.Task[None] | None = None
        self._seconds_per_row = 0.0

    def start(self) -> None:
        """Start to compute, in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop after the current batch; all requests must have been answered before."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()

    async def predict(self, inputs: PreparedInputs) -> Predictions:
        """Return the predictions for some inputs. Raise BusyError if the queue is full."""
        rows = len(inputs)
        if self.rows and self.rows + rows > self.max_queue:
            raise BusyError(max(1.0, self.rows * self._seconds_per_row))
        self.rows += rows
        waiting = _Waiting(inputs, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        try:
            return await waiting.result
        finally:
            self.rows -= rows

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            batches = [self._take()]
            if not self._waiting:
                self._arrived.clear()
            while batches:
                batch = [item for item in batches.pop() if not item.result.done()]
                try:
                    await self._compute(batch)
                except Exception as error:  # whatever it is, other requests must still be answered
                    if len(batch) > 1:
                        batches += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
                    elif not batch[0].result.done():
                        batch[0].result.set_exception(error)

    async def _compute(self, batch: list[_Waiting]) -> None:
        if not batch:
            return
        begin = time.perf_counter()
        inputs = concatenate_inputs([item.inputs for item in batch])
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self.predictor.predict_prepared, inputs)
        seconds = time.perf_counter() - begin
        self._seconds_per_row = 0.9 * self._seconds_per_row + 0.1 * seconds / len(inputs)
        self.observe(found, seconds, self.rows - len(inputs))
        start = 0
        for item in batch:
            if not item.result.done():
                item.result.set_result(found.take(slice(start, start + len(item.inputs))))
            start += len(item.inputs)

    def _take(self) -> list[_Waiting]:
        """Return the next requests: as many as fit into a batch, and at least one."""
        batch, rows = list[_Waiting](), 0
        while self._waiting:
            item = self._waiting[0]
            if item.result.done():  # cancelled
                self._waiting.popleft()
                continue
            if batch and rows + len(item.inputs) > self.max_batch:
                break
            batch.append(self._waiting.popleft())
            rows += len(item.inputs)
        return batch


def measure_batch_size(
    backend: Callable[[Mapping[str, NDArray[Any]]], Any],
    example: Mapping[str, NDArray[Any]],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, dict[int, float]]:
    """Return the batch size with the most rows per second, and the measured speeds by size.

    Larger batches are slower on some processors, whose caches do not hold their activations.
    """
    speeds: dict[int, float] = {}
    for size in SIZES:
        arrays = {name: np.repeat(values[:1], size, axis=0) for name, values in example.items()}
        backend(arrays)  # the first call allocates memory
        times: list[float] = []
        while len(times) < 5 and (len(times) < 1 or sum(times) < SECONDS_PER_SIZE):
            begin = clock()
            backend(arrays)
            times.append(clock() - begin)
        speeds[size] = size / max(median(times), 1e-9)
        if speeds[size] < 0.5 * max(speeds.values()):
            break  # far beyond the best size
    best = max(speeds.values())
    return min(size for size, speed in speeds.items() if speed >= WORTH * best), speeds
