"""What a Ray cluster of our own costs over `local`: work and time after start-up, and how fast jobs are handed out.

Three resnet8 members on two cores: a pool of two processes against two places of a cluster, the same recipe, in turns.
Work is CPU seconds of this process and all it started; what the cluster takes to start is reported apart. A thousand
jobs that do nothing show what handing one over takes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import Event, Lock, Thread
from typing import Any

import psutil
import torch

HERE = str(Path(__file__).resolve().parent)
sys.path.insert(0, HERE)
from _common import close, flags, images, precision_here, ratio  # noqa: E402

sys.path[:] = [path for path in sys.path if str(Path(path).resolve()) != HERE]  # or this file were taken for Ray itself

import plateaux  # noqa: E402

MEMBERS = 3


def recipe_for(file: Path, epochs: int, **executor: object) -> plateaux.Recipe:
    return plateaux.Recipe.from_dict(
        {
            "members": MEMBERS,
            "data": {"name": "arrays", "path": str(file), "classes": 10, "batch": 128, "crop": 4, "flip": True},
            "model": {"name": "resnet8", "width": 16},
            "optimizer": {"lr": 0.05, "momentum": 0.9},
            "train": {"epochs": epochs, "precision": precision_here(), "memory_format": "channels_last"},
            "executor": {"threads": 1, **executor},
        }
    )


class Work:
    """The CPU seconds of this process and of all that were ever seen below it, looked up every half second.

    What a process used is remembered by us: Ray dismisses an actor that has no more to do, and who asks for its time
    afterwards finds nothing.
    """

    def __init__(self) -> None:
        self.used: dict[tuple[int, float], float] = {}
        self.lock = Lock()

    def __call__(self) -> float:
        with self.lock:
            here = psutil.Process()
            for each in [here, *here.children(recursive=True)]:
                with suppress(psutil.Error):
                    self.used[each.pid, each.create_time()] = sum(each.cpu_times()[:2])
            return sum(self.used.values())

    def watch(self, over: Event) -> None:
        while not over.wait(0.5):
            self()


def measured(train: Callable[[Callable[[Mapping[str, Any]], None]], Any]) -> dict[str, float]:
    """Return a run's seconds and work between its first and its last news of a member, and what came before."""
    begun, seen, work, over = time.perf_counter(), list[tuple[float, float]](), Work(), Event()

    def tell(news: Mapping[str, Any]) -> None:
        if "member" in news:
            seen.append((time.perf_counter(), work()))

    watching = Thread(target=work.watch, args=(over,), daemon=True)
    watching.start()
    train(tell)
    over.set()
    watching.join()
    (first, before), (last, after) = seen[0], seen[-1]
    return {"start-up seconds": first - begun, "seconds": last - first, "work": after - before}


def nothing(job: Any, tell: Any, *, device: str | None = None, processes: int = 1) -> None:
    """A job that does nothing."""


def thousand(jobs: int) -> float:
    """Return the seconds that so many jobs which do nothing take on two places of a cluster that runs."""
    from plateaux import crew

    people = crew.Crew(crew.Needs())
    begun = time.perf_counter()
    failed = people.carry_out(list(range(jobs)), nothing, lambda _: None)
    people.dismiss()
    assert not failed
    return time.perf_counter() - begun


def main() -> None:
    args = flags(__doc__ or "")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    # Five runs of three minutes, not one of fifteen: a machine's mood lasts minutes, and so meets both sides alike.
    rounds, epochs, count, jobs = (1, 2, 256, 30) if args.quick else (5, 2, 25_600, 1000)
    found: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory() as folder:
        file = images(Path(folder), count)
        sides = {
            "local": recipe_for(file, epochs, processes=2),
            "ray": recipe_for(file, epochs, name="ray"),
        }
        starting = time.perf_counter()
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        started = time.perf_counter() - starting
        for number in range(rounds):
            for side, recipe in list(sides.items())[:: 1 if number % 2 else -1]:
                out = Path(folder) / f"{side}-{number}"
                found[side].append(measured(lambda tell, r=recipe, o=out: plateaux.train(r, o, tell=tell)))
                if not args.json:
                    took = ", ".join(f"{name} {value:.1f}" for name, value in found[side][-1].items())
                    print(f"{side:6} {took}", flush=True)
        one, other = (plateaux.Run.open(Path(folder) / f"{side}-0") for side in sides)
        apart = max(
            float((one.weights(n)[name] - other.weights(n)[name]).abs().max())
            for n in range(MEMBERS) for name in one.weights(n)
        )  # fmt: skip
        trivial = thousand(jobs)
        ray.shutdown()
    mean = {side: {name: median(each[name] for each in runs) for name in runs[0]} for side, runs in found.items()}
    ours, theirs = ({name: [each[name] for each in found[side]] for name in ("work", "seconds")} for side in sides)
    figures = {
        "ray over local, work after start-up": ratio(theirs["work"], ours["work"]),
        "ray over local, time after start-up": ratio(theirs["seconds"], ours["seconds"]),
        "start-up of the jobs, ray, seconds": mean["ray"]["start-up seconds"],
        "start-up of the jobs, local, seconds": mean["local"]["start-up seconds"],
        "largest difference of a weight": apart,
        "seconds for trivial jobs": trivial,
        "trivial jobs": jobs,
        "start-up of the cluster, seconds": started,
    }
    limits = {
        "ray over local, work after start-up": ("at most", 1.05),
        "largest difference of a weight": ("at most", 0.0),
        "seconds for trivial jobs": ("at most", 60.0),
    }
    close(figures, limits, args.quick, torch=torch.__version__, precision=precision_here())


if __name__ == "__main__":
    main()
