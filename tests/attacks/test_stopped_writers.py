"""A process is stopped at a call of the store, another one takes over and finishes, and the first one continues.

CI stops it at a sample of the calls; `PLATEAUX_LONG=1` stops it at every one.
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

from plateaux.storage.member_writer import unnamed_objects
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


def contents(out: str) -> dict[str, bytes]:
    """Return all objects of a run that it needs."""
    run = Run.open(out)
    unnamed = unnamed_objects(run.store, 0, run.progress(0))
    return {name: run.store.get(name) for name in run.store.names() if name not in unnamed}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("place", ["bucket", "disk"])
def test_a_process_that_was_stopped_at_any_call_loses_nothing(
    trainers: tuple[Trainer, Trainer], tmp_path: Path, place: str
) -> None:
    first, second = trainers
    root = f"s3://bucket/{tmp_path.name}" if place == "bucket" else str(tmp_path)
    done = first.train(RECIPE, f"{root}/whole")
    assert done["words"] == ""
    whole, refused, stopped = outcome(f"{root}/whole"), 0, 0
    for call in range(1, done["calls"] + 1, STRIDE):
        out = f"{root}/{call}"
        assert first.train(RECIPE, out, stop=call) == {"stopped": call}
        words = second.train(RECIPE, out)["words"]
        if place == "bucket":
            if words:  # the claim of a process that may be alive
                assert "is claimed by process" in words, (call, words)
                refused += 1
                assert second.train(RECIPE, out, take_over=True)["words"] == ""
            assert outcome(out) == whole, call  # whether the first process continues or was killed
        else:
            assert not words or "is locked by another process" in words, (call, words)
            refused += bool(words)
        words = first.resume()["words"]
        assert not words or (place == "bucket" and "Another process has taken over" in words), (call, words)
        stopped += bool(words)
        assert outcome(out) == whole, call
        before = contents(out)
        assert second.train(RECIPE, out)["words"] == ""
        assert contents(out) == before, call
        assert not unnamed_objects(Run.open(out).store, 0, Run.open(out).progress(0)), call
    assert refused > 0
    assert stopped > 0 or place == "disk"
