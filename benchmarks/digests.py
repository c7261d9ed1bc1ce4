"""CPU time in digest code: its fraction of an evaluation of five resnet18, and of training with a checkpoint per epoch.

The functions of `plateaux.storage.digests` that the stores call are timed in the process that evaluates or trains. The
figures are medians of five repetitions. Every evaluation computes its predictions and writes them to the cache; every
training run is one epoch of a resnet18 (width 64) of at least 60 s of CPU time, with checkpoint, log, and weights. The
quick form has smaller networks, in which files are large relative to the computation, and judges nothing.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from _common import Results, at_most, parse_flags, write_images
from safetensors.torch import save_file

import plateaux
from plateaux.core.registry import model
from plateaux.storage import digests, member_writer, store

TIMED = ("digest_bytes", "digest_file", "check_digest", "with_json_digest", "check_json_digest")
REPETITIONS = 5


class Timer:
    """CPU seconds in the functions of the digest module; calls among them count once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0
        for name in TIMED:
            timed = self._timed(getattr(digests, name))
            for module in (store, member_writer):
                if hasattr(module, name):
                    setattr(module, name, timed)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.process_time() - begin

        return call


def measure(timer: Timer, work: Callable[[], object]) -> tuple[float, float]:
    """Return the fraction of CPU time in digest code, and the CPU seconds of the work."""
    timer.seconds, begin = 0.0, time.process_time()
    work()
    total = time.process_time() - begin
    return timer.seconds / total, total


def recipe(images: Path, width: int, members: int) -> plateaux.Recipe:
    return plateaux.Recipe.from_dict(
        {
            "members": members,
            "data": {"name": "arrays", "path": str(images), "batch_size": 128},
            "model": {"name": "resnet18", "width": width},
            "train": {"epochs": 1, "precision": "fp32"},
        }
    )


def evaluation(timer: Timer, folder: Path, quick: bool) -> list[tuple[float, float]]:
    """Evaluate five resnet18 with random weights."""
    width, batches = (8, 1) if quick else (64, 8)
    images = write_images(folder, 128 * batches)
    files = []
    for number in range(5):
        torch.manual_seed(number)
        files.append(folder / f"{number}.safetensors")
        save_file(model.get("resnet18")(shape=(3, 32, 32), classes=10, width=width).state_dict(), files[-1])
    out = folder / "run"
    plateaux.import_weights(out, recipe(images, width, 5), [str(file) for file in files])
    results = []
    for _ in range(REPETITIONS):
        results.append(measure(timer, lambda: plateaux.evaluate(out, split="train", metrics=["accuracy", "nll"])))
        shutil.rmtree(out / "predictions")
    return results


def training(timer: Timer, folder: Path, quick: bool) -> list[tuple[float, float]]:
    """Train one resnet18 for one epoch, repeatedly."""
    width, batches = (8, 1) if quick else (64, 18)  # at least 60 s of CPU time
    made = recipe(write_images(folder, 128 * batches), width, 1)
    return [measure(timer, lambda i=i: plateaux.train(made, folder / str(i))) for i in range(REPETITIONS)]


PARTS = {"evaluation": (evaluation, 0.02), "training": (training, 0.01)}


def main() -> None:
    args = parse_flags(__doc__ or "", tuple(PARTS))
    results, timer = Results(args.quick, args.json), Timer()
    for part in args.parts:
        function, limit = PARTS[part]
        with tempfile.TemporaryDirectory() as folder:
            found = function(timer, Path(folder), args.quick)
        results.add(
            f"{part}: fraction of CPU time in digest code", statistics.median(f for f, _ in found), full=at_most(limit)
        )
        results.add(f"{part}: CPU seconds", statistics.median(seconds for _, seconds in found))
    results.finish(repetitions=REPETITIONS)


if __name__ == "__main__":
    main()
