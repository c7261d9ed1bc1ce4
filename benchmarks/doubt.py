"""Calibration on CIFAR-10: coverage of conformal sets over 20 splits, and the effect of temperature scaling.

Four published ResNets (depth 20, 32, 44, 56) are adopted as one ensemble. Half of the test images, drawn anew for each
of 20 splits, fit temperature and sets; the other half judges. `--run RUN` takes a run of them that is there already.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import mean

import torch
from _common import close

import plateaux
from plateaux.ensembles import conformal
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.ensembles.temperature import apply, calibrate_then_pool, fit, pool_then_calibrate
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.options import EvalOptions
from plateaux.evaluation.predictions import MemberOutputs, predict_all
from plateaux.evaluation.splits import eval_split

DEPTHS = (20, 32, 44, 56)
KINDS = ("lac", "aps", "raps")
WANTED = (0.9, 0.95)


def adopted(folder: str) -> str:
    """Make a run of the four networks."""
    file = Path(os.environ.get("PLATEAUX_DATA", "data")) / "weights" / "resnet20_32_44_56_cifar10.safetensors"
    recipe = plateaux.Recipe.from_dict(
        {
            "members": len(DEPTHS),
            "data": {"name": "cifar10", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
            "model": {"name": [f"resnet{depth}" for depth in DEPTHS]},
            "train": {"memory_format": "channels_last"},
        }
    )
    plateaux.import_weights(folder, recipe, [f"{file}:resnet{depth}." for depth in DEPTHS])
    return folder


def nll(log_p: torch.Tensor, y: torch.Tensor) -> float:
    return -float(log_p.gather(-1, y[:, None]).double().mean())


def judged(said: MemberOutputs, split: int) -> dict[str, float]:
    """Return what one split shows: coverage in points, and the losses before and after."""
    order = torch.randperm(len(said.y), generator=torch.Generator().manual_seed(split))
    held, rest = (said.take(part) for part in order.tensor_split(2))
    pooled, single = pool_then_calibrate(held.logits, held.y), calibrate_then_pool(held.logits, held.y)
    log_p = {"held": apply(held.logits, pooled), "rest": apply(rest.logits, pooled)}
    found: dict[str, float] = {}
    for kind in KINDS:
        for wanted in WANTED:
            made = conformal.fit(log_p["held"], held.y, held.ids, round(1 - wanted, 6), kind)  # type: ignore[arg-type]
            sets = made.sets(log_p["rest"], rest.ids)
            found[f"{kind} {100 * wanted:g} %: coverage"] = 100 * conformal.coverage(sets, rest.y).value
            found[f"{kind} {100 * wanted:g} %: classes"] = conformal.mean_size(sets).value
    rows = log_probabilities(rest.logits.double())
    for position, depth in enumerate(DEPTHS):
        scaled = (rest.logits[position].double() / fit(held.logits[position], held.y)).log_softmax(-1)
        found[f"resnet{depth}: nll before"] = nll(rows[position], rest.y)
        found[f"resnet{depth}: nll after"] = nll(scaled, rest.y)
    found["ensemble: nll before"] = nll(rows[-2], rest.y)
    found["ensemble: nll, pool then calibrate"] = nll(log_p["rest"], rest.y)
    found["ensemble: nll, calibrate then pool"] = nll(apply(rest.logits, single), rest.y)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the closing JSON line")
    parser.add_argument("--quick", action="store_true", help="a small version of the same measurement")
    parser.add_argument("--run", help="a run of the four networks on CIFAR-10")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = EvalOptions(limit=400 if args.quick else None)
        panel = Evaluator(plateaux.Run.open(args.run or adopted(folder)), options=options)
        own = eval_split(panel.recipe, panel.data_info, "test")
        said = predict_all(panel, own)
    splits = [judged(said, split) for split in range(20)]
    figures = {name: mean(each[name] for each in splits) for name in splits[0]}
    limits: dict[str, tuple[str, float]] = {}
    for kind in KINDS:
        for wanted in WANTED:
            name = f"{kind} {100 * wanted:g} %: coverage"
            figures[f"{name}, points off"] = abs(figures[name] - 100 * wanted)
            limits[f"{name}, points off"] = ("at most", 0.5)
    for depth in DEPTHS:
        figures[f"resnet{depth}: nll gained"] = (
            figures[f"resnet{depth}: nll before"] - figures[f"resnet{depth}: nll after"]
        )
        limits[f"resnet{depth}: nll gained"] = ("at least", 0.0)
    if not args.json:
        for name, value in figures.items():
            print(f"{name:>44}: {value:.4f}")
    close(figures, limits, args.quick, splits=len(splits), samples=len(said.y))


if __name__ == "__main__":
    main()
