# A record, not run at HEAD. It ran at commit 6d5351f4424f: `git checkout 6d5351f4424f`, then `python studies/landscape_cifar10.py`.
"""Which probes detect that SAM is flatter? A deep ensemble and SAM at three radii: resnet8 on 10,000 CIFAR-10 images.

    python studies/landscape_cifar10.py runs/landscape            # about ninety minutes on two cores; again to continue
    python studies/landscape_cifar10.py runs/landscape --table    # the table of the results so far
    python studies/landscape_cifar10.py runs/landscape --draw     # pictures of every run, in its folder
    python studies/landscape_cifar10.py runs/landscape --results studies/results/landscape_cifar10.json
    python studies/landscape_cifar10.py runs/landscape --known studies/results/landscape_cifar10.json   # only the rest
    python studies/landscape_cifar10.py studies/results/landscape_cifar10.json --table    # the table of a results file

Three members each, 15 epochs without augmentation. Probes use 512 training images, those of curvature 128. Results are
written to `results/` in the study folder, probe by probe. Members with the same number start from the same weights and
see the same batches in every condition: SAM is called flatter, or sharper, if the 95 % t interval of the paired
differences from the members of the deep ensemble excludes zero.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from _results import read_numbers, write_numbers

import plateaux
from plateaux.core.row_names import MEAN_OF_MEMBERS
from plateaux.core.stats.intervals import paired_t_interval
from plateaux.evaluation.results import MetricResult
from plateaux.loss_landscape.probe import get_probes
from plateaux.loss_landscape.render import plot_landscape
from plateaux.storage.local_store import LocalStore

CONDITIONS: dict[str, dict[str, Any]] = {
    "deep_ensemble": {"name": "deep_ensemble"},
    **{f"sam_{rho}": {"name": "sam", "rho": rho} for rho in (0.05, 0.1, 0.2)},
}
STUDY = "landscape_cifar10"
BASE = "deep_ensemble"
Numbers = dict[str, dict[str, Any]]  # by condition: "training accuracy", and "probes" with the summary of each
CURVED = ("trace", "top_eigenvalue", "gauss_newton_trace", "gauss_newton_eigenvalue")  # four passes a product: fewer
MORE = (
    "worst_l2(preset=sharpbalance)",
    "worst_l2(adaptive=false)",
    "average_l2(adaptive=false)",
    "rank_agreement",
    "sam_sharpness",  # in its default form, antithetic pairs: added after the first results
)


def recipe_for(method: dict[str, Any], *, members: int, quick: bool) -> plateaux.Recipe:
    return plateaux.Recipe.from_dict(
        {
            "members": members,
            "data": {"name": "cifar10", "limit": 256 if quick else 10_000, "batch_size": 128},
            "model": {"name": "resnet8", "width": 4 if quick else 16},
            "method": method,
            "optimizer": {"name": "SGD", "lr": 0.2, "momentum": 0.9, "weight_decay": 2e-4, "nesterov": True},
            "lr_scheduler": [
                {"name": "linear", "epochs": 0.5 if quick else 2, "start_factor": 0.1, "interval": "step"},
                {"name": "cosine", "interval": "step"},
            ],
            "train": {
                "epochs": 2 if quick else 15,
                "validate_every": 2 if quick else 15,
                "memory_format": "channels_last",
            },
            "executor": {"processes": 1, "threads": 1},
        }
    )


def probe_names(*, quick: bool) -> list[str]:
    """Return the probes, in the order of the table."""
    usual = ["fisher_rao", "sam_step(samples=64; m=32)"] if quick else list(get_probes(["all"]))
    # The published table has the paper's form of SAM-sharpness, which is not the default.
    usual = [name if name != "sam_sharpness" else "sam_sharpness(form=paper)" for name in usual]
    return [*usual, *(() if quick else MORE)]


class Study:
    """All runs below one folder, and their results."""

    def __init__(self, root: Path, members: int, quick: bool, known: Numbers | None = None) -> None:
        self.root, self.members, self.quick, self.known = root, members, quick, known or {}
        self.store = LocalStore(root)

    def run(self) -> None:
        """Train and measure what is missing: a condition at a time in each of two processes of one thread."""
        missing = [name for name in reversed(CONDITIONS) if not self.is_known(name)]  # SAM takes longer: first
        if self.quick:
            for name in missing:
                self.measure(name)
        else:
            with ProcessPoolExecutor(2, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
                list(pool.map(self.measure, missing))

    def is_known(self, name: str) -> bool:
        """Return whether a condition was trained and measured before, as a results file says."""
        return set(probe_names(quick=self.quick)) <= set(self.known.get(name, {}).get("probes", {}))

    def measure(self, name: str) -> None:
        """Train a condition, and run the probes on it that have no results yet."""
        plateaux.train(recipe_for(CONDITIONS[name], members=self.members, quick=self.quick), self.root / name)
        print(f"{name} is trained", flush=True)
        for probe in probe_names(quick=self.quick):
            found = self.results(name)
            if probe not in found:
                count = 64 if self.quick else 128 if probe in CURVED else None if "preset" in probe else 512
                (measured,) = plateaux.probe_landscape(self.root / name, probes=[probe], limit=count)
                found[probe] = summary(measured)
                self.store.put_json(f"results/{name}.json", found, has_digest=False)
                print(f"{name}, {probe}: {_cell(found[probe])}", flush=True)

    def results(self, name: str) -> dict[str, dict[str, Any]]:
        at = f"results/{name}.json"
        found: dict[str, dict[str, Any]] = self.store.get_json(at, has_digest=False) if self.store.has(at) else {}
        return found

    def draw(self) -> None:
        for name in CONDITIONS:
            kinds = ["slices", "paths", "plane"] if self.members > 2 else ["slices", "paths"]
            plot_landscape(self.root / name, kinds, limit=64 if self.quick else 512)

    def numbers(self) -> Numbers:
        """Return the results of all conditions, and the training accuracy of member 0 in the last epoch."""
        found = {}
        for name in CONDITIONS:
            if self.is_known(name):
                found[name] = self.known[name]
            elif self.store.has(f"{name}/run.json"):
                log = plateaux.Run.open(self.root / name).log(0)
                accuracy = [each["train accuracy"] for each in log if "train accuracy" in each]
                found[name] = {"training accuracy": accuracy[-1] if accuracy else None, "probes": self.results(name)}
        return found


def fitted(numbers: Numbers) -> str:
    """Return the training accuracy of member 0 of every trained condition."""
    shares = {name: found["training accuracy"] for name, found in numbers.items()}
    values = [f"{name} {share:.1%}" for name, share in shares.items() if share is not None]
    return "Training accuracy of member 0 in the last epoch: " + ", ".join(values)


def table(numbers: Numbers) -> str:
    """Return the results as Markdown: mean over members, its standard error, and the effect of each radius."""
    results = {name: numbers[name]["probes"] for name in CONDITIONS if numbers.get(name, {}).get("probes")}
    names = list(results)
    verdicts = [f"{name} is" for name in names if name != BASE]
    head = ["probe", *names, *verdicts, "scale-invariant", "errors: data, draws"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * len(names) + "---|" * (len(head) - 1 - len(names))]
    for probe in dict.fromkeys(probe for found in results.values() for probe in found):
        found = {name: results[name].get(probe) for name in names}
        base = found.get(BASE)
        cells = [_cell(each) if each else "" for each in found.values()]
        words = [verdict(base, each) if base and each else "" for name, each in found.items() if name != BASE]
        kind = "yes" if get_probes([probe])[probe].scale_invariant else "no"
        lines.append("| " + " | ".join([f"`{probe}`", *cells, *words, kind, _errors(base)]) + " |")
    return "\n".join(lines)


def summary(found: MetricResult) -> dict[str, Any]:
    """Return the members' numbers with both errors, and their mean."""
    rows = {name: v for name, v in found.rows.items() if "·" not in name}
    mean = rows.get(MEAN_OF_MEMBERS) or next(iter(rows.values()))
    members = {name: [v.value, v.stderr, v.mc_stderr] for name, v in rows.items() if name != MEAN_OF_MEMBERS}
    over_members = mean.stderr if MEAN_OF_MEMBERS in rows else None
    return {"mean": mean.value, "stderr": over_members, "members": members, "higher_is_better": found.higher_is_better}


def verdict(base: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the effect on a member, from the interval of the differences between members with the same number."""
    both = [name for name in base["members"] if name in other["members"]]
    if len(both) < 2 or base["higher_is_better"] is None:
        return ""
    mine, theirs = ([each["members"][name][0] for name in both] for each in (other, base))
    apart = paired_t_interval(mine, theirs)
    if not apart.excludes_zero:
        return "not distinguished"
    return "flatter" if (apart.high < 0) == (base["higher_is_better"] is False) else "sharper"


def _cell(found: dict[str, Any]) -> str:
    return f"{found['mean']:.4g}" + (f" ± {found['stderr']:.2g}" if found["stderr"] is not None else "")


def _errors(found: dict[str, Any] | None) -> str:
    """Return the mean size of the members' two errors."""
    columns = list(zip(*found["members"].values(), strict=True))[1:] if found else []
    means = ["-" if None in column else f"{sum(column) / len(column):.2g}" for column in columns]
    return ", ".join(means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the study folder, or a results file with --table")
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="256 images, 2 epochs, 2 members: to see that it runs")
    parser.add_argument("--table", action="store_true", help="only print the results so far")
    parser.add_argument("--results", type=Path, help="only write the results so far to this file")
    parser.add_argument("--known", type=Path, help="a results file; its conditions are not run again")
    parser.add_argument("--draw", action="store_true", help="only draw pictures of what is trained")
    args = parser.parse_args()
    known = read_numbers(args.known, STUDY) if args.known else None
    study = Study(args.root, 2 if args.quick else args.members, args.quick, known)
    if args.draw:
        study.draw()
        return
    if not (args.table or args.results):
        study.run()
    numbers = read_numbers(args.root, STUDY) if args.root.is_file() else study.numbers()
    if args.results:
        command = "python studies/landscape_cifar10.py runs/landscape"
        write_numbers(args.results, study=STUDY, command=command, numbers=numbers)
        return
    print(f"{fitted(numbers)}\n\n{table(numbers)}")


if __name__ == "__main__":
    main()
