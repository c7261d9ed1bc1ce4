"""Overhead of a local Ray cluster over `local`: work and time after start-up, and job throughput.

Three resnet8 members on two cores: a pool of two processes against two places of a cluster, the same recipe, in turns
of three seconds: one side's processes are halted while the other's work. Work is CPU seconds of a side's process and
all it started, Ray's own included; what comes before there is news of both places is reported apart. A thousand jobs
that do nothing show what handing one over takes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = str(Path(__file__).resolve().parent)
sys.path.insert(0, HERE)
from _common import close, flags, images, precision_here, ratio  # noqa: E402
from _turns import PARTS, TURN, Side, in_turns  # noqa: E402

sys.path[:] = [path for path in sys.path if str(Path(path).resolve()) != HERE]  # or this file were taken for Ray itself

import plateaux  # noqa: E402
from plateaux.core.process_info import num_cores  # noqa: E402
from plateaux.core.progress import MemberUpdate, ProgressEvent  # noqa: E402
from plateaux.training.jobs import Job  # noqa: E402

MEMBERS, PLACES = 3, 2
SHARE = max(1, num_cores() // PLACES)  # of this machine's cores, for a place: so there are two, whatever it has


def recipe_for(file: Path, epochs: int, precision: str, **executor: object) -> plateaux.Recipe:
    return plateaux.Recipe.from_dict(
        {
            "members": MEMBERS,
            "data": {"name": "arrays", "path": str(file), "classes": 10, "batch_size": 128, "crop": 4, "flip": True},
            "model": {"name": "resnet8", "width": 16},
            "optimizer": {"lr": 0.05, "momentum": 0.9},
            "train": {"epochs": epochs, "precision": precision, "memory_format": "channels_last"},
            "executor": {"threads": 1, **executor},
        }
    )


def local(say: Callable[[Any], None], recipe: plateaux.Recipe, out: Path, jobs: int) -> dict[str, float]:
    """Train by a pool of two processes."""
    train(recipe, out, say)
    return {}


def on_a_cluster(say: Callable[[Any], None], recipe: plateaux.Recipe, out: Path, jobs: int) -> dict[str, float]:
    """Train on two places of a cluster of our own, and then hand out jobs that do nothing on another."""
    from plateaux.distributed import ray_cluster

    train(recipe, out, say)
    begun = time.perf_counter()
    ray_cluster.connect(None)
    started = time.perf_counter() - begun
    facts = {"start-up of the cluster, seconds": started, "seconds for trivial jobs": thousand(jobs)}
    ray_cluster.disconnect()
    return facts


def train(recipe: plateaux.Recipe, out: Path, say: Callable[[Any], None]) -> None:
    heard: set[int] = set()

    def listen(event: ProgressEvent) -> None:
        if isinstance(event, MemberUpdate):
            heard.add(event.member)
            if len(heard) >= PLACES:  # before that, one of them is still being started
                say("news")

    plateaux.train(recipe, out, progress=listen)
    say("done")


def thousand(jobs: int) -> float:
    """Return the seconds that so many jobs which do nothing take on two places of a cluster that runs."""
    from plateaux.distributed.ray_cluster import Resources
    from plateaux.distributed.ray_pool import RayWorkerPool

    def nothing(job: Any, progress: Any, *, device: str | None = None, processes: int = 1) -> None:
        """A job that does nothing; in here, since a file that was started is no module to a cluster."""

    people = RayWorkerPool(Resources(num_cpus=SHARE), max_processes=PLACES)
    begun = time.perf_counter()
    failed = people.run_jobs([Job((n,), (0, 0), 1) for n in range(jobs)], nothing, lambda _: None)
    people.close()
    assert not failed
    return time.perf_counter() - begun


def _share(each: Mapping[str, Mapping[str, list[float]]], side: str, part: str) -> float:
    return ratio(each[side][part], each["local"]["work"])


def main() -> None:
    args = flags(__doc__ or "")
    rounds, epochs, count, jobs = (1, 2, 256, 30) if args.quick else (2, 6, 25_600, 1000)  # ten minutes a run
    found: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    facts: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        file, precision = images(Path(folder), count), precision_here()
        pool = recipe_for(file, epochs, precision, processes=PLACES)
        cluster = recipe_for(file, epochs, precision, name="ray", num_cpus=SHARE)
        for number in range(rounds):
            kinds = [("local", local, pool), ("ray", on_a_cluster, cluster)][:: 1 if number % 2 else -1]
            starts = [
                partial(Side, work, recipe, Path(folder) / f"{name}-{number}", jobs) for name, work, recipe in kinds
            ]
            for (name, *_), side in zip(kinds, in_turns(starts, 0.5 if args.quick else TURN), strict=True):
                found[name].append(side.taken())
                facts += [side.facts] if side.facts else []
                if not args.json:
                    print(f"{name:6} " + ", ".join(f"{k} {v:.1f}" for k, v in side.taken().items()), flush=True)
        one, other = (plateaux.Run.open(Path(folder) / f"{side}-0") for side in found)
        apart = max(
            float((one.weights(n)[name] - other.weights(n)[name]).abs().max())
            for n in range(MEMBERS) for name in one.weights(n)
        )  # fmt: skip
    each = {side: {name: [run[name] for run in runs] for name in runs[0]} for side, runs in found.items()}
    figures = {
        "ray over local, work after start-up": ratio(each["ray"]["work"], each["local"]["work"]),
        "ray over local, time after start-up": ratio(each["ray"]["seconds"], each["local"]["seconds"]),
        **{f"{part} of {side}, share of local's work": _share(each, side, part) for side in found for part in PARTS},
        "start-up of cluster and jobs, ray, seconds": median(each["ray"]["start-up seconds"]),
        "start-up of the jobs, local, seconds": median(each["local"]["start-up seconds"]),
        "largest difference of a weight": apart,
        "trivial jobs": jobs,
        **{name: median(some[name] for some in facts) for name in facts[0]},
    }
    limits = {
        "ray over local, work after start-up": ("at most", 1.05),
        "largest difference of a weight": ("at most", 0.0),
        "seconds for trivial jobs": ("at most", 60.0),
    }
    close(figures, limits, args.quick, torch=torch.__version__, precision=precision)


if __name__ == "__main__":
    main()
