# A record, not run at HEAD. It ran at commit 1cddc3da2a08: `git checkout 1cddc3da2a08`, then `python studies/sharpbalance_cifar10.py`.
"""SharpBalance compared with a deep ensemble and SAM: CIFAR-10, resnet8, 20,000 images, 3 members, 20 epochs.

    python studies/sharpbalance_cifar10.py runs/study            # about five hours on two cores; again to continue
    python studies/sharpbalance_cifar10.py runs/study --table    # the tables of the results so far

Results are written to `results.json` in that folder, run by run. Runs with results are not trained again, so this file
alone is enough to continue on another machine.

rho is chosen for SAM on validation images with one member and then fixed for all. SAM and both rules of SharpBalance
begin from one span before the meeting. Two runs at a time, one thread each: passes are the cost to compare, seconds are
as they were beside whatever else ran. Scoring counts as a pass. Accuracies are of the test set and of the test set with
seeded Gaussian noise; mean over the repetitions with a 95 % t interval. The methods of one repetition begin from the
same weights and see the same batches, so what one gains on another is the mean of differences within repetitions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import torch

import plateaux
from plateaux.config.builders.data import build_data
from plateaux.core.stats.intervals import paired_t_interval, t_interval
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.storage.local_store import LocalStore
from plateaux.training.cost import measured_cost

RHOS = (0.02, 0.05, 0.1, 0.2)
SIGMAS = (0.0, 0.04, 0.06, 0.08, 0.09, 0.10)
REPETITIONS = 3
METHODS = {
    "deep ensemble": {"name": "deep_ensemble"},
    "SAM": {"name": "sam"},
    "SharpBalance, paper": {"name": "sharpbalance", "rule": "paper", "top_k": 0.4},
    "SharpBalance, released": {"name": "sharpbalance", "rule": "released", "top_k": 0.4},
}
SPAN = "SharpBalance, paper"  # trains the span before the meeting
FROM_SPAN = ("SAM", "SharpBalance, released")  # begin from that span
PAIRS = [("SAM", "deep ensemble")]  # who is to gain on whom
PAIRS += [(f"SharpBalance, {rule}", other) for other in ("deep ensemble", "SAM") for rule in ("paper", "released")]
NOISES = " | ".join(f"noise {sigma:.2f}" if sigma else "clean" for sigma in SIGMAS)


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
                "limit": 300 if quick else 22_000,
                "validation_split": 44 if quick else 2_000,
                "batch_size": 128,
                "crop": 2,
                "flip": True,
            },
            "model": {"name": "resnet8", "width": 4 if quick else 16},
            "method": {**method, **({"rho": rho} if climbs else {})},
            "optimizer": {"name": "SGD", "lr": 0.2, "momentum": 0.9, "weight_decay": 2e-4, "nesterov": True},
            "lr_scheduler": [
                {"name": "linear", "epochs": 0.5 if quick else 2, "start_factor": 0.1, "interval": "step"},
                {"name": "cosine", "interval": "step"},
            ],
            "train": {
                "epochs": 2 if quick else 20,
                "validate_every": 2 if quick else 5,
                "memory_format": "channels_last",
            },
            "executor": {"mode": "offload", "threads": 1},
            "run": {"keep_checkpoints": "last"},
        }
    )


class Study:
    """All runs below one folder."""

    def __init__(self, root: Path, quick: bool) -> None:
        self.root, self.quick = root, quick
        self.rhos = RHOS[:2] if quick else RHOS
        self.seeds = range(1 if quick else REPETITIONS)
        self.store = LocalStore(root)
        self.writing = Lock()

    def go(self) -> None:
        """Train and measure what is missing, two runs at a time."""
        self._all([f"rho/{rho}" for rho in self.rhos])
        print(f"rho = {self.rho()} is best for SAM on validation images", flush=True)
        self._all(self._order())

    def _order(self) -> list[str]:
        """Return all runs in an order in which a span is trained, while there is other work, before it is wanted."""
        begins = [[f"{SPAN}/{seed}", f"deep ensemble/{seed}"] for seed in self.seeds]
        follows = [[f"{name}/{seed}" for name in FROM_SPAN] for seed in self.seeds]
        return [name for pair in zip([*begins, []], [[], *follows], strict=True) for each in pair for name in each]

    def _all(self, names: list[str]) -> None:
        with ThreadPoolExecutor(2) as lanes:
            work = dict[str, Future[None]]()
            for name in names:
                kind, _, which = name.partition("/")
                span = work.get(f"{SPAN}/{which}") if kind in FROM_SPAN else None
                work[name] = lanes.submit(self._train, name, span)
            try:
                for each in work.values():
                    each.result()
            except BaseException:
                lanes.shutdown(cancel_futures=True)
                raise

    def _train(self, name: str, after: Future[None] | None) -> None:
        """Train one run in a process of its own, after that whose span it shares; write down what it measures."""
        if after:
            after.result()
        if name in self.results():
            return
        call = [sys.executable, __file__, str(self.root), "--one", name, *(["--quick"] if self.quick else [])]
        subprocess.run(call, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found = self._measured(name)
        with self.writing:
            self.store.put_json("results.json", {**self.results(), name: found}, has_digest=False)
        print(f"{name} done", flush=True)

    def results(self) -> dict[str, dict[str, Any]]:
        """Return what was measured so far, by run."""
        return dict(self.store.get_json("results.json", has_digest=False)) if self.store.has("results.json") else {}

    def _measured(self, name: str) -> dict[str, Any]:
        run = plateaux.Run.open(self.root / name)
        if name.startswith("rho/"):
            return {
                "validation accuracy": [x["validation accuracy"] for x in run.log(0) if "validation accuracy" in x][-1]
            }
        costs = [measured_cost(run, member) for member in range(3)]
        means = {by: statistics.mean(getattr(cost, by) for cost in costs) for by in ("passes", "seconds")}
        return {"accuracies": self._accuracies(self.root / name), **means, "careful": _careful(run)}

    def one(self, name: str) -> None:
        """Train one run in this process."""
        kind, _, which = name.partition("/")
        if kind == "rho":
            recipe = recipe_for(METHODS["SAM"], rho=float(which), seed=100, members=1, quick=self.quick)
            plateaux.train(recipe, self.root / name)
            return
        recipe = recipe_for(METHODS[kind], rho=self.rho(), seed=int(which), members=3, quick=self.quick)
        shares = kind in FROM_SPAN and (self.root / SPAN / which).exists()
        plateaux.train(recipe, self.root / name, branch_from=self.root / SPAN / which if shares else None)

    def chosen(self) -> bool:
        """Say whether all radii were tried."""
        return all(f"rho/{rho}" in self.results() for rho in self.rhos)

    def rho(self) -> float:
        """Return the radius with the best validation accuracy of one SAM member; the smaller of equals."""
        found = {rho: self.results()[f"rho/{rho}"]["validation accuracy"] for rho in self.rhos}
        return max(self.rhos, key=lambda rho: (found[rho], -rho))

    def chosen_rho(self) -> str:
        """Return the selected radius in words."""
        return f"rho chosen on validation images: {self.rho()}" if self.chosen() else "rho is not chosen yet"

    def tables(self) -> str:
        """Return the results as Markdown."""
        lines = [f"| method | of | {NOISES} |", "|---|---|" + "---:|" * len(SIGMAS)]
        gains = ["", f"| ensemble of | less that of | {NOISES} |", "|---|---|" + "---:|" * len(SIGMAS)]
        gains += [row for pair in PAIRS for row in self._gain(*pair)]
        costs = [
            "",
            "| method | SAM share | passes over the data, a member | seconds, a member |",
            "|---|---:|---:|---:|",
        ]
        for name in METHODS:
            found = list(self._found(name).values())
            if not found:
                continue
            for row in ("members", "ensemble"):
                cells = [_interval([each["accuracies"][row][str(sigma)] for each in found]) for sigma in SIGMAS]
                lines.append(f"| {name} ({len(found)}) | {row} | " + " | ".join(cells) + " |")
            costs.append(_cost(name, found))
        return "\n".join(lines + gains + costs)

    def _found(self, name: str) -> dict[int, dict[str, Any]]:
        """Return what was measured of a method, by repetition."""
        results = self.results()
        return {seed: results[f"{name}/{seed}"] for seed in self.seeds if f"{name}/{seed}" in results}

    def _gain(self, name: str, other: str) -> list[str]:
        """Return the row of a method's gain on another in the repetitions both have; none where there are none."""
        mine, theirs = ({s: x["accuracies"]["ensemble"] for s, x in self._found(n).items()} for n in (name, other))
        both = sorted(mine.keys() & theirs.keys())
        cells = [_difference(*([x[s][str(sigma)] for s in both] for x in (mine, theirs))) for sigma in SIGMAS if both]
        return [f"| {name} ({len(both)}) | {other} | " + " | ".join(cells) + " |"] if both else []

    def _accuracies(self, root: Path) -> dict[str, dict[str, float]]:
        """Return the accuracy of the members' mean and of the ensemble by mean probability, at every noise."""
        test = build_data(plateaux.Run.open(root).recipe).test
        samples = 100 if self.quick else len(test)
        ensemble = plateaux.load(root).to(memory_format=torch.channels_last)
        found: dict[str, dict[str, float]] = {"members": {}, "ensemble": {}}
        for sigma in SIGMAS:
            right = torch.zeros(len(ensemble) + 1)
            for ids, noise in _noises(samples):
                x, y = test.fetch(ids)
                noisy = (x.float() / 255 + sigma * noise).clamp(0, 1).contiguous(memory_format=torch.channels_last)
                right += (log_probabilities(ensemble.logits(noisy))[: len(ensemble) + 1].argmax(-1) == y).sum(-1)
            right = 100 * right / samples
            found["members"][str(sigma)] = float(right[:-1].mean())
            found["ensemble"][str(sigma)] = float(right[-1])
        return found


def _cost(name: str, found: list[dict[str, Any]]) -> str:
    passes, seconds = (statistics.mean(each[by] for each in found) for by in ("passes", "seconds"))
    shares = [share for each in found for share in each["careful"]]
    share = f"{100 * statistics.mean(shares):.1f} %" if shares else ""
    return f"| {name} | {share} | {passes:.1f} | {seconds:.0f} |"


def _careful(run: plateaux.Run) -> list[float]:
    names = [name for name in run.store.names() if name.startswith("sam_sets/") and name.endswith("summary.json")]
    return [share for name in names for share in run.store.get_json(name)["share"]]


def _noises(samples: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and standard normal noise for them: the same for every network and sigma."""
    generator = torch.Generator().manual_seed(2024)
    for ids in torch.arange(samples).split(500):
        yield ids, torch.randn(len(ids), 3, 32, 32, generator=generator)


def _interval(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    found = t_interval(values)
    return f"{found.value:.2f} ± {found.half:.2f}"


def _difference(values: list[float], baseline: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0] - baseline[0]:+.2f}"
    found = paired_t_interval(values, baseline)
    return f"{found.value:+.2f} ± {found.half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", action="store_true", help="print the table of what is there so far")
    parser.add_argument("--quick", action="store_true", help="a minute instead of hours: to see that it works")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # what is measured here must not slow down what trains beside it
    study = Study(args.folder, args.quick)
    if args.one:
        study.one(args.one)
        return
    if not args.table:
        study.go()
    print(f"{study.chosen_rho()}\n\n{study.tables()}")


if __name__ == "__main__":
    main()
