"""SharpBalance against a deep ensemble and SAM: CIFAR-10, resnet8, 20,000 training images, three members, 20 epochs.

    python studies/sharpbalance_cifar10.py runs/study            # about two hours on two cores; run it again to go on
    python studies/sharpbalance_cifar10.py runs/study --table    # the table of what is there so far

rho is chosen for SAM on validation images with one member and then fixed for all. SAM and both rules of SharpBalance
begin from one span before the meeting. Two runs at a time, one thread each. Accuracies are of the test set and of the
test set with seeded Gaussian noise; mean over the repetitions with a 95 % t interval.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import plateaux
from plateaux.build import data_of
from plateaux.tables import log_probabilities

RHOS = (0.02, 0.05, 0.1, 0.2)
SIGMAS = (0.0, 0.04, 0.06, 0.08, 0.09, 0.10)
REPETITIONS = 3
METHODS = {
    "deep ensemble": {"name": "deep_ensemble"},
    "SAM": {"name": "sam"},
    "SharpBalance, paper": {"name": "sharpbalance", "rule": "paper", "top": 0.4},
    "SharpBalance, released": {"name": "sharpbalance", "rule": "released", "top": 0.4},
}
SPAN = "SharpBalance, paper"  # trains the span before the meeting that SAM and the other rule begin from
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95 % quantiles of Student's t, by repetitions


def recipe_for(
    method: dict[str, object], *, rho: float | None, seed: int, members: int, quick: bool
) -> plateaux.Recipe:
    climbs = method["name"] != "deep_ensemble"
    return plateaux.Recipe.from_dict(
        {
            "members": members,
            "seed": seed,
            "data": {
                "name": "cifar10",
                "limit": 1_100 if quick else 22_000,
                "validation": 100 if quick else 2_000,
                "batch": 128,
                "crop": 2,
                "flip": True,
            },
            "model": {"name": "resnet8", "width": 16},
            "method": {**method, **({"rho": rho} if climbs else {})},
            "optimizer": {"name": "SGD", "lr": 0.2, "momentum": 0.9, "weight_decay": 2e-4, "nesterov": True},
            "schedule": [
                {"name": "linear", "epochs": 0.5 if quick else 2, "start_factor": 0.1, "per": "step"},
                {"name": "cosine", "per": "step"},
            ],
            "train": {
                "epochs": 2 if quick else 20,
                "validate_every": 2 if quick else 5,
                "precision": "bf16",
                "memory_format": "channels_last",
            },
            "executor": {"manner": "parked", "threads": 1},
            "run": {"keep_resume": "last"},
        }
    )


class Study:
    """All runs below one folder."""

    def __init__(self, root: Path, quick: bool) -> None:
        self.root, self.quick = root, quick
        self.rhos = RHOS[:2] if quick else RHOS
        self.seeds = range(1 if quick else REPETITIONS)

    def go(self) -> None:
        """Train what is missing, two runs at a time."""
        self._all([f"rho/{rho}" for rho in self.rhos])
        print(f"rho = {self.rho()} is best for SAM on validation images", flush=True)
        first = [f"{name}/{seed}" for seed in self.seeds for name in (SPAN, "deep ensemble")]
        self._all(first)
        self._all([f"{name}/{seed}" for seed in self.seeds for name in METHODS if f"{name}/{seed}" not in first])

    def _all(self, names: list[str]) -> None:
        with ThreadPoolExecutor(2) as lanes:
            work = [lanes.submit(self._train, name) for name in names]
            try:
                for each in work:
                    each.result()
            except BaseException:
                lanes.shutdown(cancel_futures=True)
                raise

    def _train(self, name: str) -> None:
        """Train one run in a process of its own."""
        if (self.root / name / "done").exists():
            return
        call = [sys.executable, __file__, str(self.root), "--one", name, *(["--quick"] if self.quick else [])]
        subprocess.run(call, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        (self.root / name / "done").touch()
        print(f"{name} done", flush=True)

    def one(self, name: str) -> None:
        """Train one run in this process."""
        kind, _, which = name.partition("/")
        if kind == "rho":
            recipe = recipe_for(METHODS["SAM"], rho=float(which), seed=100, members=1, quick=self.quick)
            plateaux.train(recipe, self.root / name)
            return
        recipe = recipe_for(METHODS[kind], rho=self.rho(), seed=int(which), members=3, quick=self.quick)
        shares = kind not in (SPAN, "deep ensemble")
        plateaux.train(recipe, self.root / name, span=self.root / SPAN / which if shares else None)

    def rho(self) -> float:
        """Return the radius with the best validation accuracy of one SAM member; the smaller of equals."""
        found = {}
        for rho in self.rhos:
            log = plateaux.Run.open(self.root / f"rho/{rho}").log(0)
            found[rho] = [line["validation accuracy"] for line in log if "validation accuracy" in line][-1]
        return max(self.rhos, key=lambda rho: (found[rho], -rho))

    def table(self) -> str:
        """Return what was measured as Markdown."""
        lines = [
            f"rho chosen on validation images: {self.rho()}",
            "",
            "| method | of | " + " | ".join("clean" if not s else f"noise {s:.2f}" for s in SIGMAS) + " |",
            "|---|---|" + "---:|" * len(SIGMAS),
        ]
        costs = [
            "",
            "| method | careful share | passes over the data, a member | seconds, a member |",
            "|---|---:|---:|---:|",
        ]
        for name in METHODS:
            seeds = [seed for seed in self.seeds if (self.root / name / str(seed) / "done").exists()]
            if not seeds:
                continue
            found = [self._accuracies(self.root / name / str(seed)) for seed in seeds]
            for row in ("members", "ensemble"):
                cells = [_interval([each[row][str(sigma)] for each in found]) for sigma in SIGMAS]
                lines.append(f"| {name} ({len(seeds)}) | {row} | " + " | ".join(cells) + " |")
            costs.append(self._cost(name, seeds))
        return "\n".join(lines + costs)

    def _cost(self, name: str, seeds: list[int]) -> str:
        runs = [plateaux.Run.open(self.root / name / str(seed)) for seed in seeds]
        epochs = runs[0].recipe.train.epochs
        seconds = statistics.mean(run.progress(i).seconds for run in runs for i in range(3))
        shares = [share for run in runs for share in _careful(run)]
        if shares:
            meet = epochs // 2
            passes = 2 * meet + (epochs - meet) * (1 + statistics.mean(shares))
        else:
            passes = epochs * (2 if name == "SAM" else 1)
        share = f"{100 * statistics.mean(shares):.1f} %" if shares else ""
        return f"| {name} | {share} | {passes:.1f} | {seconds:.0f} |"

    def _accuracies(self, root: Path) -> dict[str, dict[str, float]]:
        """Return the accuracy of the members' mean and of the ensemble by mean probability, at every noise."""
        file = root / "accuracies.json"
        if not file.exists():
            run = plateaux.Run.open(root)
            test = data_of(run.recipe).test
            samples = 500 if self.quick else len(test)
            ensemble = plateaux.load(root).to(memory_format=torch.channels_last)
            found: dict[str, dict[str, float]] = {"members": {}, "ensemble": {}}
            for sigma in SIGMAS:
                right = torch.zeros(len(ensemble) + 1)
                for ids, noise in _noises(samples):
                    x, y = test.fetch(ids)
                    noisy = (x.float() / 255 + sigma * noise).clamp(0, 1).contiguous(memory_format=torch.channels_last)
                    with torch.autocast("cpu", dtype=torch.bfloat16):  # as trained, and four times as fast
                        table = ensemble.logits(noisy)
                    log_p = log_probabilities(table)[: len(ensemble) + 1]
                    right += (log_p.argmax(-1) == y).sum(-1)
                right = 100 * right / samples
                found["members"][str(sigma)] = float(right[:-1].mean())
                found["ensemble"][str(sigma)] = float(right[-1])
            file.write_text(json.dumps(found))
        return json.loads(file.read_text())


def _careful(run: plateaux.Run) -> list[float]:
    names = [name for name in run.store.names() if name.startswith("notes/") and name.endswith("summary.json")]
    return [share for name in names for share in run.store.get_json(name)["share"]]


def _noises(samples: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and standard normal noise for them: the same for every network and sigma."""
    generator = torch.Generator().manual_seed(2024)
    for ids in torch.arange(samples).split(500):
        yield ids, torch.randn(len(ids), 3, 32, 32, generator=generator)


def _interval(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    half = T_975[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.2f} ± {half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", action="store_true", help="print the table of what is there so far")
    parser.add_argument("--quick", action="store_true", help="a minute instead of hours: to see that it works")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    study = Study(args.folder, args.quick)
    if args.one:
        study.one(args.one)
        return
    if not args.table:
        study.go()
    print(study.table())


if __name__ == "__main__":
    main()
