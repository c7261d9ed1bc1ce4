"""Speedup of the process pool: four resnet8 members on two single-thread processes or in one two-thread process.

Both sides are whole runs of `plateaux.train` on the same images, including the start of processes, and alternate. A
second run of the two-thread process is the control. The quick form compares weights only, unless a part is given: its
runs consist of start-up.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _common import Results, at_least, at_most, budget, interleaved, native_precision, parse_flags, ratio, write_images

import plateaux

PARTS = ("time", "weights")
CONTROL = "queue / queue, time"


def recipe_for(file: Path, quick: bool, **executor: object) -> plateaux.Recipe:
    return plateaux.Recipe.from_dict(
        {
            "members": 4,
            "data": {"name": "arrays", "path": str(file), "classes": 10, "batch_size": 128, "crop": 4, "flip": True},
            "model": {"name": "resnet8", "width": 4 if quick else 16},
            "method": {"name": "deep_ensemble"},
            "optimizer": {"lr": 0.05, "momentum": 0.9},
            "train": {"epochs": 1 if quick else 2, "precision": native_precision(), "memory_format": "channels_last"},
            "executor": dict(executor),
        }
    )


def largest_difference(one: plateaux.Run, other: plateaux.Run) -> float:
    """Return the largest difference of any weight of two runs."""
    pairs = [(one.weights(i)[name], other.weights(i)[name]) for i in range(4) for name in one.weights(i)]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def measure_time(results: Results, train: Callable[[str, str], plateaux.Run], rounds: int) -> None:
    """Compare the time of whole runs."""
    sides = {
        "pool": lambda number: train("pool", f"pool-{number}"),
        "queue": lambda number: train("queue", f"queue-{number}"),
        "queue, again": lambda number: train("queue", f"again-{number}"),
    }
    if results.quick:
        del sides["queue, again"]
    pair = None if results.quick else ("queue", "queue, again")
    times = interleaved(sides, rounds, control=pair, within=budget(results.quick))
    if not results.quiet:
        for name, taken in times.items():
            print(f"{name:12} {' '.join(f'{t:6.1f}' for t in taken)} s")
    if not results.quick:
        results.add(CONTROL, ratio(times["queue"], times["queue, again"]), is_control=True)
    results.add("queue / pool, time", ratio(times["queue"], times["pool"]), full=at_least(1.2), control=CONTROL)


def compare_weights(results: Results, train: Callable[[str, str], plateaux.Run]) -> None:
    """Compare the weights of the pool with those of one process."""
    pool = train("pool", "pool")
    for words, side in (("one thread", "queue of one thread"), ("two threads", "queue")):
        same = at_most(0.0) if side == "queue of one thread" else None  # two threads round differently
        name = f"pool compared with {words}, sequentially, largest difference of a weight"
        results.add(name, largest_difference(pool, train(side, side)), full=same, quick=same)


def main() -> None:
    args = parse_flags(__doc__ or "", PARTS)
    results = Results(args.quick, args.json)
    with tempfile.TemporaryDirectory() as folder:
        file = write_images(Path(folder), 256 if args.quick else 25_600)
        recipe = partial(recipe_for, file, args.quick)
        recipes = {
            "pool": recipe(processes=2),
            "queue": recipe(mode="offload", threads=2),
            "queue of one thread": recipe(mode="offload", threads=1),
        }

        def train(side: str, run: str) -> plateaux.Run:
            return plateaux.train(recipes[side], Path(folder) / run)

        if "time" in args.parts and (not args.quick or args.part):
            measure_time(results, train, 1 if args.quick else 3)
        if "weights" in args.parts:
            compare_weights(results, train)
    results.finish(parts=args.parts, torch=torch.__version__, precision=native_precision())


if __name__ == "__main__":
    main()
