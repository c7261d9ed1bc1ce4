"""Speedup of the process pool: four resnet8 members on two single-thread processes or one two-thread process.

Both sides are whole runs of `plateaux.train` on the same images, start-up of processes included, and take turns.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from _common import close, flags, images, interleaved, precision_here, ratio

import plateaux


def recipe_for(file: Path, quick: bool, **executor: object) -> plateaux.Recipe:
    return plateaux.Recipe.from_dict(
        {
            "members": 4,
            "data": {"name": "arrays", "path": str(file), "classes": 10, "batch_size": 128, "crop": 4, "flip": True},
            "model": {"name": "resnet8", "width": 4 if quick else 16},
            "method": {"name": "deep_ensemble"},
            "optimizer": {"lr": 0.05, "momentum": 0.9},
            "train": {"epochs": 1 if quick else 2, "precision": precision_here(), "memory_format": "channels_last"},
            "executor": dict(executor),
        }
    )


def difference(one: Path, other: Path) -> float:
    """Return the largest difference of any weight of two runs."""
    a, b = plateaux.Run.open(one), plateaux.Run.open(other)
    pairs = [(a.weights(i)[name], b.weights(i)[name]) for i in range(4) for name in a.weights(i)]
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


def main() -> None:
    args = flags(__doc__ or "")
    rounds = 1 if args.quick else 3
    with tempfile.TemporaryDirectory() as folder:
        file = images(Path(folder), 256 if args.quick else 25_600)
        recipe = partial(recipe_for, file, args.quick)
        sides = {
            "pool": recipe(processes=2),
            "queue": recipe(mode="offload", threads=2),
            "queue of one thread": recipe(mode="offload", threads=1),
        }
        runs = {name: Path(folder) / name for name in sides}

        def side(name: str) -> object:
            return lambda number: plateaux.train(sides[name], runs[name] / str(number))

        found = interleaved({name: side(name) for name in ("pool", "queue")}, rounds)
        plateaux.train(sides["queue of one thread"], runs["queue of one thread"] / "0")
        figures = {
            "queue / pool, time": ratio(found["queue"], found["pool"]),
            "pool against one thread in turn, largest difference of a weight": difference(
                runs["pool"] / "0", runs["queue of one thread"] / "0"
            ),
            "pool against two threads in turn, largest difference of a weight": difference(
                runs["pool"] / "0", runs["queue"] / "0"
            ),
        }
    if not args.json:
        for name, times in found.items():
            print(f"{name:6} {' '.join(f'{t:6.1f}' for t in times)} s")
    limits = {
        "queue / pool, time": ("at least", 1.2),
        "pool against one thread in turn, largest difference of a weight": ("at most", 0.0),
    }
    close(figures, limits, args.quick, torch=torch.__version__, precision=precision_here())


if __name__ == "__main__":
    main()
