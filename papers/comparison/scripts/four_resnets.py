# A record, not run at HEAD. It ran at commit 918278fff606: `git checkout 918278fff606`, then `python studies/four_resnets.py`.
"""Everything that `plateaux evaluate` reports on four published networks: CIFAR-10 ResNets of depth 20, 32, 44, and 56.

    python studies/four_resnets.py runs/four               # about 45 minutes on one core; again to continue
    python studies/four_resnets.py runs/four --limit 100   # of the first 100 samples of every set, to try it
    python studies/four_resnets.py runs/four --results studies/results/four_resnets.json   # also write a results file

Equal to the two commands on the page docs/results/four-resnets.md. Needs CIFAR-10, the five other data sets, and the
weights (one safetensors file with the prefixes `resnet20.` to `resnet56.`) under PLATEAUX_DATA.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import plateaux
from plateaux.core.row_names import RowName
from plateaux.core.runtime import configure_runtime
from plateaux.data.files import data_root
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.tables import CAPTION, format_value, to_markdown
from plateaux.storage.local_store import LocalStore
from plateaux.studies.packed_results import encode_results
from plateaux.studies.results import read_results, to_metric_result, to_stored

DEPTHS = (20, 32, 44, 56)
WEIGHTS = "weights/resnet20_32_44_56_cifar10.safetensors"
SUITES = {"near": ["cifar100", "tin"], "far": ["texture", "mnist", "fashionmnist"]}
CORRUPTED = ("accuracy", "nll", "ece")
RUN = "four"
FIRST = RowName.member(0)
# AUROC of the maximum probability in the data sheet of the ResNet-20, on as many samples as its authors used.
DATA_SHEET = {"cifar100 (near)": 0.866, "tin (near)": 0.873, "texture (far)": 0.871, "mnist (far)": 0.914,
              "fashionmnist (far)": 0.936}  # fmt: skip


def recipe() -> plateaux.Recipe:
    """Return the recipe of the imported run."""
    data = {"name": "cifar10", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    names = [f"resnet{depth}" for depth in DEPTHS]
    return plateaux.Recipe.from_dict({"members": len(DEPTHS), "data": data, "model": {"name": names}})


def evaluated(root: Path, limit: int | None) -> list[MetricResult]:
    """Import the weights if there is no run yet, and return all results."""
    if not LocalStore(root).has("run.json"):
        file = data_root(None) / WEIGHTS
        plateaux.import_weights(root, recipe(), [f"{file}:resnet{depth}." for depth in DEPTHS])
    options = plateaux.EvalOptions(limit=limit)
    found = list(plateaux.evaluate(root, split=["test"], metrics=["all"], options=options))
    found += plateaux.evaluate(root, split=[f"corrupted@{limit or 2000}"], metrics=list(CORRUPTED), options=options)
    found += plateaux.robustness(found)
    return [*found, *plateaux.detect_ood(root, SUITES, options=options)]


def write(file: Path, found: Sequence[MetricResult]) -> None:
    """Write a results file in the format of a study with one run."""
    conditions = [{"run": RUN, "condition": {}, "repetition": 0}]
    runs = {RUN: {"metrics": [to_stored(each) for each in found], "costs": {}}}
    LocalStore(file.parent).put(file.name, encode_results({"conditions": conditions, "runs": runs}))


def read(file: Path) -> list[MetricResult]:
    """Return the results of a results file."""
    return [to_metric_result(tree, file) for tree in read_results(file)["runs"][RUN]["metrics"]]


def tables(found: Sequence[MetricResult]) -> dict[str, str]:
    """Return the tables of the page, by name."""
    outside = [each for each in found if each.metric == "ood"]
    alone = [replace(each, rows={row: v for row, v in each.rows.items() if row.base == FIRST}) for each in outside]
    return {"data sheet": data_sheet(outside), "all": _without_captions(found), "member 0": _without_captions(alone)}


def _without_captions(found: Sequence[MetricResult]) -> str:
    """Return the tables without the captions that would repeat under each; the page explains them once."""
    text = to_markdown(found)
    for caption in dict.fromkeys([CAPTION, *(each.definition for each in found if each.metric == "ood")]):
        text = text.replace(f"\n{caption}\n", "")
    return text.strip()


def data_sheet(outside: Sequence[MetricResult]) -> str:
    """Return the AUROC of member 0 beside the published one."""
    lines = ["| data set | AUROC of member 0, max probability | data sheet |", "|---|---:|---:|"]
    for each in outside:
        if each.split in DATA_SHEET:
            value = each.rows[RowName.parse("member 0 · max_probability · auroc")]
            lines.append(f"| {each.split} | {format_value(each, value)} | {DATA_SHEET[each.split]:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the run folder")
    parser.add_argument("--limit", type=int, help="use only the first samples of every set")
    parser.add_argument("--results", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    configure_runtime(threads=1)
    found = evaluated(args.root, args.limit)
    if args.results:
        write(args.results, found)
    print("\n\n".join(tables(found).values()))


if __name__ == "__main__":
    main()
