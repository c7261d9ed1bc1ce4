"""Overhead of a local Ray cluster compared with the process pool: work and time after start-up, and job throughput.

Three resnet8 members on two cores: a pool of two processes and two workers of a cluster train the same recipe and
alternate in intervals of three seconds; a second pool is the control. Work is the CPU time of a side's process and all
processes that it started, including Ray's own. Start-up, until two members have reported progress, is reported
separately. A thousand jobs that do nothing measure the cost of dispatching one. The quick form compares weights only,
unless a part is given: its training takes less than the start of the processes. After the time limit (150 s for the
quick form), everything is stopped, and "ok" is null.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _alternating import INTERVAL, ROLES, AlternatingSide, alternate
from _common import (
    Budget,
    OutOfTime,
    Results,
    at_most,
    native_precision,
    parse_flags,
    write_images,
)

import plateaux
from plateaux.core.process_info import num_cores
from plateaux.core.progress import MemberUpdate, ProgressEvent
from plateaux.training.jobs import Job

PARTS = ("work", "jobs")
SECONDS = {True: 150.0, False: 570.0}  # of one part, by `quick`
MEMBERS, WORKERS = 3, 2
CORES = max(1, num_cores() // WORKERS)  # of a worker, so that there are two on any machine
CONTROL = "local / local, work after start-up"
Send = Callable[[Any], None]


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


def train(send: Send, recipe: plateaux.Recipe, out: Path) -> dict[str, float]:
    """Train, and report progress from the time when all workers are at work."""
    started: set[int] = set()

    def listen(event: ProgressEvent) -> None:
        if isinstance(event, MemberUpdate):
            started.add(event.member)
            if len(started) >= WORKERS:
                send("progress")

    plateaux.train(recipe, out, progress=listen)
    send("done")
    return {}


def dispatch(send: Send, jobs: int) -> dict[str, float]:
    """Start a cluster and run jobs that do nothing on it."""
    from plateaux.distributed import ray_cluster

    begin = time.perf_counter()
    ray_cluster.connect(None)
    facts = {"start-up of the cluster, seconds": time.perf_counter() - begin}
    send("progress")
    facts["seconds for trivial jobs"] = dispatch_seconds(jobs)
    send("done")
    ray_cluster.disconnect()
    return facts


def dispatch_seconds(jobs: int) -> float:
    """Return the seconds that jobs which do nothing take on two workers of a running cluster."""
    from plateaux.distributed.ray_cluster import Resources
    from plateaux.distributed.ray_pool import RayWorkerPool

    def nothing(job: Any, progress: Any, *, device: str | None = None, processes: int = 1) -> None:
        """Do nothing; defined here because workers cannot import a script by its name."""

    pool = RayWorkerPool(Resources(num_cpus=CORES), max_processes=WORKERS)
    begin = time.perf_counter()
    failed = pool.run_jobs([Job((n,), (0, 0), 1) for n in range(jobs)], nothing, lambda _: None)
    pool.close()
    assert not failed
    return time.perf_counter() - begin


def largest_difference(one: plateaux.Run, other: plateaux.Run) -> float:
    """Return the largest difference of any weight of two runs."""
    pairs = [(one.weights(n)[name], other.weights(n)[name]) for n in range(MEMBERS) for name in one.weights(n)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def measure_work(results: Results, folder: Path) -> None:
    """Compare the work and the weights of a pool and of a cluster."""
    epochs, count = (2, 256) if results.quick else (3, 25_600)
    file, precision = write_images(folder, count), native_precision()
    pool = recipe_for(file, epochs, precision, processes=WORKERS)
    recipes = {"ray": recipe_for(file, epochs, precision, name="ray", num_cpus=CORES), "local": pool}
    if not results.quick:
        recipes["local, again"] = pool
    starts = [partial(AlternatingSide, train, recipe, folder / name) for name, recipe in recipes.items()]
    sides = alternate(starts, Budget(SECONDS[results.quick]), 0.5 if results.quick else INTERVAL)
    found = {name: side.measured() for name, side in zip(recipes, sides, strict=True)}
    if not results.quick:
        results.add(CONTROL, found["local"]["work"] / found["local, again"]["work"], is_control=True)
    work = found["local"]["work"]
    over = found["ray"]["work"] / work
    results.add("ray / local, work after start-up", over, full=at_most(1.05), control=CONTROL)
    results.add("ray / local, time after start-up", found["ray"]["seconds"] / found["local"]["seconds"])
    for side in ("local", "ray"):
        for role in ROLES:
            results.add(f"{role} of {side} / work of local", found[side][role] / work)
    results.add("start-up of cluster and jobs, ray, seconds", found["ray"]["start-up seconds"])
    results.add("start-up of the jobs, local, seconds", found["local"]["start-up seconds"])
    apart = largest_difference(*(plateaux.open_run(folder / name) for name in ("local", "ray")))
    results.add("largest difference of a weight", apart, full=at_most(0.0), quick=at_most(0.0))


def measure_jobs(results: Results) -> None:
    """Measure how fast a cluster dispatches jobs."""
    jobs = 30 if results.quick else 1000
    (side,) = alternate([partial(AlternatingSide, dispatch, jobs)], Budget(SECONDS[results.quick]))
    results.add("trivial jobs", jobs)
    for name, value in side.facts.items():
        results.add(name, value, full=at_most(60.0) if name == "seconds for trivial jobs" else None)


def main() -> None:
    args = parse_flags(__doc__ or "", PARTS)
    results = Results(args.quick, args.json)
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts if not args.quick or args.part else ("work",):
            try:
                measure_work(results, Path(folder)) if part == "work" else measure_jobs(results)
            except OutOfTime as error:
                results.cannot_tell(f"{part}: {error}")
    results.finish(parts=args.parts, torch=torch.__version__, precision=native_precision())


if __name__ == "__main__":
    main()
