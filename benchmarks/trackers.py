"""What trackers cost the process that trains: its CPU time with a tracker, relative to none.

Training with a tracker that works, with one that raises at every call, and with one that sleeps 30 s, each between two
trainings without a tracker; `again` is a further training without one. The time that training waits for a tracker at
the end costs no CPU time.
"""

from __future__ import annotations

import logging
import statistics
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from _common import Results, Side, at_most, budget, paired, parse_flags, write_images

import plateaux
from plateaux.core.runtime import configure_runtime

CONTROL = "no tracker / no tracker, CPU time"
LIMITS = {"full": at_most(1.02), "quick": at_most(2.0)}


def main() -> None:
    args = parse_flags(__doc__ or "")
    results = Results(args.quick, args.json)
    configure_runtime(threads=1)
    logging.getLogger("plateaux").setLevel(logging.ERROR)  # the trackers that fail are reported
    images, epochs, rounds = (256, 2, 2) if args.quick else (512, 4, 5)
    with TemporaryDirectory() as folder:
        file, numbers = write_images(Path(folder), images), count()

        def side(*trackers: str) -> Side:
            recipe = plateaux.Recipe.from_dict({
                "members": 2,
                "data": {"name": "arrays", "path": file.name, "root": folder, "batch_size": 64},
                "model": {"name": "cnn", "channels": [16, 32]},
                "method": {"name": "sam"},
                "optimizer": {"lr": 0.01},
                "train": {"epochs": epochs},
                "executor": {"threads": 1},
                "run": {"trackers": trackers},
            })  # fmt: skip
            return lambda _: plateaux.train(recipe, Path(folder) / f"run{next(numbers)}", trust=["_trackers"])

        sleeps = "SleepsBriefly" if args.quick else "Sleeps"
        sides = {
            "again": side(),
            "works": side("_trackers:Works"),
            "raises": side("_trackers:Raises"),
            "sleeps": side(f"_trackers:{sleeps}"),
        }
        side()(0)  # warm-up
        times, found = paired(side(), sides, rounds, within=budget(args.quick), control="again")
    results.add(CONTROL, statistics.median(found.pop("again")), is_control=True)
    for name, ratios in found.items():
        figure = f"tracker that {name} / no tracker, CPU time"
        results.add(figure, statistics.median(ratios), **LIMITS, control=CONTROL)
    results.add("CPU seconds of a training", statistics.median(times))
    results.finish(rounds=len(found["works"]))


if __name__ == "__main__":
    main()
