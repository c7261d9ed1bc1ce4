"""Settings of the service: plain values that are passed to worker processes."""

from __future__ import annotations

from dataclasses import dataclass

from plateaux.core.errors import RecipeError

API_KEY_VARIABLE = "PLATEAUX_API_KEY"  # not an option: the options of a process are visible to all users


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What a worker process serves, and its limits.

    Args:
        bundle: Folder of the bundle.
        name: Name of the model in URLs.
        threads: Threads of onnxruntime in each worker.
        max_batch: Largest number of rows of one call. None: the fastest, measured at the start.
        max_queue: Rows that wait or are computed, and requests that are decoded; more are refused with 429.
        max_rows: Rows of one request.
        max_bytes: Bytes of the body of a request.
        max_memory: Bytes of bodies, parsed JSON, and decoded images of all requests; more are refused with 429.
        max_pixels: Pixels of all images of a request.
        deadline_s: Seconds from the head of a request to its answer, after which it gets 504.
        read_timeout_s: Seconds in which the head of a request must arrive; a slower client is disconnected.
        log_requests: Log one JSON line per request.
        sha256: The digest that the bundle must have. None: any.
    """

    bundle: str
    name: str = "model"
    threads: int = 1
    max_batch: int | None = None
    max_queue: int = 256
    max_rows: int = 128
    max_bytes: int = 32 << 20
    max_memory: int = 256 << 20
    max_pixels: int = 25_000_000
    deadline_s: float = 10.0
    read_timeout_s: float = 30.0
    log_requests: bool = False
    sha256: str | None = None

    def __post_init__(self) -> None:
        for name in ("threads", "max_queue", "max_rows", "max_bytes", "max_memory", "max_pixels"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name} = {getattr(self, name)}: give a number of at least 1")
        if self.max_batch is not None and self.max_batch < 1:
            raise RecipeError(f"max_batch = {self.max_batch}: give a number of at least 1")
        for name in ("deadline_s", "read_timeout_s"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"{name} = {getattr(self, name)}: give a number of seconds above 0")
        if not self.name or not all(letter.isalnum() or letter in "-_." for letter in self.name):
            raise RecipeError(
                f"name = {self.name!r}: use letters, digits, '-', '_' and '.', because it is part of URLs"
            )
