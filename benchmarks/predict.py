"""Predictions on new inputs: what a predictor adds to the members' forward passes, and two processes against one.

Part `call`: CPU time of one warm call with one CIFAR image, relative to the bare forward passes of five resnet20 in one
thread, which is also measured against itself as the control. Part `processes`: wall-clock time of `plateaux
predict` with one process and with two, of one thread each, for 8,192 images, including the start of all processes. The
quick form has small networks and judges nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _common import Results, at_least, at_most, budget, paired, parse_flags, write_images

import plateaux
from plateaux.core.registry import model

PARTS = ("call", "processes")


def make_run(folder: Path, name: str, **options: Any) -> Path:
    """Make a run of five untrained members, with random images as its data."""
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 5,
            "data": {"name": "arrays", "path": str(write_images(folder, 256)), "root": str(folder)},
            "model": {"name": name, **options},
        }
    )
    files = []
    for number in range(5):
        torch.manual_seed(number)
        network = model.get(name)(classes=10, shape=(3, 32, 32), **options)
        files.append(folder / f"{number}.pt")
        torch.save(network.state_dict(), files[-1])
    plateaux.import_weights(folder / "run", recipe, [str(file) for file in files])
    return folder / "run"


def measure_call(results: Results, folder: Path, quick: bool) -> None:
    torch.set_num_threads(1)
    run = make_run(folder, "resnet8" if quick else "resnet20")
    predictor = plateaux.load_predictor(run, threads=1)
    members = list(predictor.ensemble.members)
    image = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    x = torch.from_numpy(image)[None].float() / 255
    calls = 5 if quick else 20

    @torch.no_grad()
    def bare(_: int) -> None:
        for _ in range(calls):
            for member in members:
                member(x)

    def call(_: int) -> None:
        for _ in range(calls):
            predictor(image)

    for side in (bare, call):
        side(0)
    sides = {"call": call, "bare": bare}
    times, ratios = paired(bare, sides, 5 if quick else 40, control="bare", within=budget(quick))
    results.add("CPU ms of the members' forward passes", 1000 * median(times) / calls)
    results.add("control: bare / bare", median(ratios["bare"]), is_control=True)
    results.add("predictor / bare", median(ratios["call"]), full=at_most(1.10), control="control: bare / bare")


def measure_processes(results: Results, folder: Path, quick: bool) -> None:
    run = make_run(folder, "resnet8" if quick else "resnet20")
    np.save(
        folder / "x.npy", np.random.default_rng(1).integers(0, 256, (16 if quick else 8192, 3, 32, 32), dtype=np.uint8)
    )

    def predict(processes: int) -> float:
        words = [str(run), str(folder / "x.npy"), "-o", str(folder / "out.csv"), "--processes", str(processes)]
        command = [sys.executable, "-m", "plateaux", "predict", *words, "--threads", "1"]
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin

    if quick:
        predict(1)
        return
    rounds = [(predict(1), predict(2)) for _ in range(3)]
    results.add("s of one process", median(one for one, _ in rounds))
    results.add("speed of two processes / one", median(one / two for one, two in rounds), full=at_least(1.6))


def main() -> None:
    args = parse_flags(__doc__ or "", PARTS)
    results = Results(args.quick, args.json)
    for part in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            measure = measure_call if part == "call" else measure_processes
            measure(results, Path(folder), args.quick)
    results.finish()


if __name__ == "__main__":
    main()
