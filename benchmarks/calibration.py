"""Calibration on CIFAR-10: coverage of conformal sets over 20 splits, and the effect of temperature scaling.

Four published ResNets (depth 20, 32, 44, 56) are imported as one ensemble. In each of 20 random splits, half of the
test images are used to fit temperature and sets, and the other half to evaluate them. `--run RUN` uses an existing run.
The quick form uses 400 images: its mean coverage has a standard error of 0.7 points.
"""

from __future__ import annotations

import tempfile
from statistics import mean

import torch
from _common import NETWORKS, Results, at_least, at_most, flag_parser, missing_data

import plateaux
from plateaux.data.files import data_root
from plateaux.ensembles import conformal
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.ensembles.temperature import apply, calibrate_then_pool, fit, pool_then_calibrate
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import MemberOutputs, predict_all
from plateaux.evaluation.splits import eval_split

DEPTHS = (20, 32, 44, 56)
KINDS = ("lac", "aps", "raps")
LEVELS = (0.9, 0.95)


def import_networks(folder: str) -> str:
    """Make a run of the four networks."""
    file = data_root(None) / NETWORKS
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


def evaluate_split(outputs: MemberOutputs, split: int) -> dict[str, float]:
    """Return the results of one split: coverage in points, and NLL before and after."""
    order = torch.randperm(len(outputs.y), generator=torch.Generator().manual_seed(split))
    held, rest = (outputs.take(part) for part in order.tensor_split(2))
    pooled, single = pool_then_calibrate(held.logits, held.y), calibrate_then_pool(held.logits, held.y)
    log_p = {"held": apply(held.logits, pooled), "rest": apply(rest.logits, pooled)}
    found: dict[str, float] = {}
    for kind in KINDS:
        for level in LEVELS:
            fitted = conformal.fit(log_p["held"], held.y, held.ids, round(1 - level, 6), kind)  # type: ignore[arg-type]
            sets = fitted.sets(log_p["rest"], rest.ids)
            found[f"{kind} {100 * level:g} %: coverage"] = 100 * conformal.coverage(sets, rest.y).value
            found[f"{kind} {100 * level:g} %: classes"] = conformal.mean_size(sets).value
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
    parser = flag_parser(__doc__ or "")
    parser.add_argument("--run", help="a run of the four networks on CIFAR-10")
    args = parser.parse_args()
    results = Results(args.quick, args.json)
    reason = None if args.run else missing_data("CIFAR-10", "ResNets")
    if reason is not None:
        results.cannot_tell(reason)
        results.finish()
        return
    with tempfile.TemporaryDirectory() as folder:
        run = plateaux.open_run(args.run or import_networks(folder))
        evaluator = Evaluator(run, limit=400 if args.quick else None)
        outputs = predict_all(evaluator, eval_split(evaluator.recipe, evaluator.data_info, "test"))
    splits = [evaluate_split(outputs, split) for split in range(20)]
    for name in splits[0]:
        results.add(name, mean(split[name] for split in splits))
    for kind in KINDS:
        for level in LEVELS:
            name = f"{kind} {100 * level:g} %: coverage"
            apart = abs(results.figures[name] - 100 * level)
            results.add(f"{name}, points off", apart, full=at_most(0.5), quick=at_most(3.0))
    for depth in DEPTHS:
        gained = results.figures[f"resnet{depth}: nll before"] - results.figures[f"resnet{depth}: nll after"]
        results.add(f"resnet{depth}: nll gained", gained, full=at_least(0.0), quick=at_least(0.0))
    results.finish(splits=len(splits), samples=len(outputs.y))


if __name__ == "__main__":
    main()
