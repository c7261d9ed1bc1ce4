"""A process is stopped at a call of the store, another one takes over and finishes, and the first one continues.

CI stops it at a sample of the calls; `PLATEAUX_LONG=1` stops it at every one of a writer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from s3_server import serving
from stoppable import Trainer

from plateaux.storage.digests import digest_bytes
from plateaux.storage.remote_store import RemoteStore, open_store
from plateaux.storage.run import Run

STRIDE = 1 if os.environ.get("PLATEAUX_LONG") else 8
RECIPE = """
members = 1
[data]
name = "blobs"
samples = 32
test_samples = 8
batch_size = 16
validation_split = 8
[model]
name = "mlp"
hidden_sizes = [4]
[train]
epochs = 2
select = "best:accuracy"
[executor]
threads = 1
"""


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with serving():
        yield


@pytest.fixture(scope="module")
def trainers(server: None) -> Iterator[tuple[Trainer, Trainer]]:
    pair = Trainer(), Trainer()
    yield pair
    for trainer in pair:
        trainer.close()


def outcome(out: str) -> dict[str, Any]:
    """Return weights, progress, and log of a run, without the times and the names of the attempts."""
    run = Run.open(out)
    progress = {**asdict(run.progress(0)), "seconds": 0, "log_parts": 0, "digests": 0}
    plain = re.sub(r"-[0-9a-f]{8}\.", ".", json.dumps(progress))
    weights = run.store.get(str(run.progress(0).weights), run.progress(0).digests[str(run.progress(0).weights)])
    return {"progress": plain, "weights": weights, "log": run.log(0)}


def contents(out: str) -> dict[str, str]:
    """Return all objects of a run with hashes of their content."""
    store = open_store(out)
    if isinstance(store, RemoteStore):
        found = store._fs._files.find(out, detail=True)  # one request
        return {name.partition(out.removeprefix("s3://"))[2]: info["ETag"] for name, info in found.items()}
    return {f"/{name}": digest_bytes(store.get(name)) for name in store.names()}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("place", ["bucket", "disk"])
def test_a_process_that_was_stopped_at_any_call_loses_nothing(
    trainers: tuple[Trainer, Trainer], tmp_path: Path, place: str
) -> None:
    first, second = trainers
    root = f"s3://bucket/{tmp_path.name}" if place == "bucket" else str(tmp_path)
    done = first.train(RECIPE, f"{root}/whole")
    assert done["words"] == ""
    whole, refused, taken_over = outcome(f"{root}/whole"), 0, 0
    start = done["first_claim"]
    for call in [*range(1, start, 8), *range(start, done["calls"] + 1, STRIDE)]:
        out = f"{root}/{call}"
        assert first.train(RECIPE, out, stop=call) == {"stopped": call}
        if call % 4 == 0 or place == "disk":
            words = second.train(RECIPE, out)["words"]
            refused += bool(words)
            # The claim of a process that may be alive; on a disk, its lock.
            expected = "is claimed by process" if place == "bucket" else "is locked by another process"
            assert not words or expected in words, (call, words)
        if place == "bucket":
            assert second.train(RECIPE, out, take_over=call > start)["words"] == "", call
            before = contents(out)
            assert outcome(out) == whole, call  # whether the first process continues or was killed
        words = first.resume()["words"]
        assert not words or (place == "bucket" and "Another process has taken over" in words), (call, words)
        taken_over += bool(words)
        if place == "disk":
            before = contents(out)
            assert outcome(out) == whole, call
        assert before.items() <= contents(out).items(), call
        assert second.train(RECIPE, out)["words"] == ""
        assert contents(out) == before, call  # also without what the first process wrote after it had lost the member
    assert refused > 0
    assert taken_over > 0 or place == "disk"
