"""Locks of the runs of a study: several processes can work on one study, and each run has one process at a time.

Without `keep_weights`, a process deletes the weights of a run when all results are stored. No other process may then be
reading them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from plateaux.storage.store import Store
from plateaux.studies.trials import RunSpec


def next_free(store: Store, specs: Sequence[RunSpec]) -> int:
    """Return the position of the first run that no other process is working on, nor on the run to branch from.

    If there is none, return the first position.
    """
    busy = {folder for spec in specs for folder in (spec.folder, spec.prefix) if folder and is_busy(store, folder)}
    return next((at for at, spec in enumerate(specs) if not busy & {spec.folder, spec.prefix}), 0)


def is_busy(store: Store, folder: str) -> bool:
    """Return whether a process is working on a run."""
    return store.is_locked(f"runs/{folder}")


@contextmanager
def locked(store: Store, spec: RunSpec, log: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run; wait for the process that holds it."""
    if is_busy(store, spec.folder):
        log("Waiting for another process of this study, which is working on this run")
    with store.lock(f"runs/{spec.folder}", timeout=math.inf):
        yield
