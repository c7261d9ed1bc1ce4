"""Cascades on real ensembles: members queried, accuracy lost, and whether the guarantee holds over 200 splits.

Three ensembles: the four published ResNets on CIFAR-10 (depth 20, 32, 44, 56); five MLPs, trained here on Fashion-MNIST
for 15 epochs; and five narrow resnet8, trained here on CIFAR-10 for one epoch only, which disagree on many inputs.
In each of 200 random splits, the threshold is fitted on half of the test samples; members queried, accuracy, and the
bounded loss (harm, or changed predictions) are measured on the other half. At most 1 - confidence of the splits, plus
two standard errors, may have a loss above `max_harm`. `--run RUN` uses an existing run for the selected part.
The quick form uses few samples, so it tests a larger `max_harm`, and does not judge how much is saved.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from statistics import mean

import torch
from _common import NETWORKS, Results, at_least, at_most, flag_parser, missing_data, selected

import plateaux
from plateaux.data.files import data_root
from plateaux.ensembles.cascade import Cascade, CascadeOptions, fit
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import MemberOutputs, predict_all
from plateaux.evaluation.splits import eval_split

DEPTHS = (20, 32, 44, 56)
PARTS = ("published", "mlp", "resnet8")
NEEDED = {"published": ("CIFAR-10", "ResNets"), "mlp": ("Fashion-MNIST",), "resnet8": ("CIFAR-10",)}
SPLITS, QUICK_SPLITS, CONFIDENCE = 200, 20, 0.9
SAMPLES = 200  # of the quick form
FIGURES = (
    *("members queried", "accuracy of all members", "accuracy lost", "bounded loss", "splits above max_harm"),
    "splits that query all members",
)


def import_networks(folder: str) -> str:
    """Make a run of the four networks."""
    file = data_root(None) / NETWORKS
    recipe = plateaux.Recipe.from_dict(
        {
            "members": len(DEPTHS),
            "data": {"name": "cifar10", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
            "model": {"name": [f"resnet{depth}" for depth in DEPTHS]},
            "train": {"memory_format": "channels_last"},
            "executor": {"threads": 1},
        }
    )
    plateaux.import_weights(folder, recipe, [f"{file}:resnet{depth}." for depth in DEPTHS])
    return folder


def train_members(folder: str, part: str, *, quick: bool) -> str:
    """Train five members of one size."""
    limits = {"limit": 2000 if part == "mlp" else 256, "test_limit": SAMPLES} if quick else {}
    mlp = {"name": "mlp", "hidden_sizes": [64] if quick else [256, 128]}
    resnet8 = {"name": "resnet8", "width": 4 if quick else 8}
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 5,
            "data": {"name": "fashion_mnist" if part == "mlp" else "cifar10", "batch_size": 128, **limits},
            "model": mlp if part == "mlp" else resnet8,
            "optimizer": {"name": "SGD", "lr": 0.02 if part == "mlp" else 0.1, "momentum": 0.9, "weight_decay": 1e-4},
            "lr_scheduler": [{"name": "cosine"}],
            "train": {"epochs": 1 if part == "resnet8" else 3 if quick else 15, "memory_format": "channels_last"},
            "executor": {"threads": 1},
        }
    )
    plateaux.train(recipe, folder)
    return folder


def predict_test(run: str, limit: int | None) -> MemberOutputs:
    evaluator = Evaluator(plateaux.open_run(run), limit=limit)
    return predict_all(evaluator, eval_split(evaluator.recipe, evaluator.data_info, "test"))


@dataclass(frozen=True)
class Outcome:
    """What a cascade with one threshold does on all samples."""

    queried: torch.Tensor  # [N]
    is_right: torch.Tensor
    is_counted: torch.Tensor  # harmed, or with another prediction


def evaluate_all(outputs: MemberOutputs, cascade: Cascade) -> Outcome:
    label, full = cascade.log_p(outputs.logits).argmax(-1), predict_full(outputs)
    is_right = label == outputs.y
    is_counted = (full == outputs.y) & ~is_right if cascade.kind == "harm" else label != full
    return Outcome(cascade.members_queried(outputs.logits), is_right, is_counted)


def predict_full(outputs: MemberOutputs) -> torch.Tensor:
    return log_probabilities(outputs.logits.double())[-2].argmax(-1)


def evaluate_splits(outputs: MemberOutputs, options: CascadeOptions, splits: int) -> list[dict[str, float]]:
    """Fit on one half of the samples, and return what the cascade does on the other, for every split."""
    was_right, found = predict_full(outputs) == outputs.y, []
    outcomes: dict[float | None, Outcome] = {}  # there are at most 51 thresholds
    for split in range(splits):
        order = torch.randperm(len(outputs.y), generator=torch.Generator().manual_seed(split))
        held, rest = order.tensor_split(2)
        cascade = fit(outputs.logits[:, held], outputs.y[held], options)
        if cascade.threshold not in outcomes:
            outcomes[cascade.threshold] = evaluate_all(outputs, cascade)
        outcome = outcomes[cascade.threshold]
        queried, right, full, harm = (
            float(values[rest].double().mean())
            for values in (outcome.queried, outcome.is_right, was_right, outcome.is_counted)
        )
        is_above, is_all = float(harm > options.max_harm), float(cascade.threshold is None)
        found.append(dict(zip(FIGURES, (queried, full, full - right, harm, is_above, is_all), strict=True)))
    return found


def measure(results: Results, name: str, outputs: MemberOutputs, options: CascadeOptions, target: float | None) -> None:
    """Add the figures of one ensemble and one kind of cascade; `target` is the factor of fewer member passes."""
    splits = QUICK_SPLITS if results.quick else SPLITS
    found = evaluate_splits(outputs, options, splits)
    figures = {key: mean(split[key] for split in found) for key in FIGURES}
    allowed = at_most(1 - CONFIDENCE + 2 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / splits))
    for key, value in figures.items():
        limit = allowed if key == "splits above max_harm" else None
        results.add(f"{name}: {key}", value, full=limit, quick=limit)
    factor = len(outputs.logits) / figures["members queried"]
    limit = None if target is None else at_least(target)
    results.add(f"{name}: passes, all members / cascade", factor, full=limit)


def main() -> None:
    parser = flag_parser(__doc__ or "", PARTS)
    parser.add_argument("--run", help="an existing run; needs --part")
    args = selected(parser.parse_args())
    if args.run and len(args.parts) > 1:
        parser.error("--run needs --part")
    results = Results(args.quick, args.json)
    torch.set_num_threads(1)
    begin, max_harm = time.monotonic(), 0.05 if args.quick else 0.005
    facts: dict[str, int] = {}
    for part in args.parts:
        reason = None if args.run else missing_data(*NEEDED[part])
        if reason is not None:
            results.cannot_tell(f"{part}: {reason}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            if part == "published":
                run = args.run or import_networks(folder)
            else:
                run = args.run or train_members(folder, part, quick=args.quick)
            outputs = predict_test(run, SAMPLES if args.quick else None)
        facts[f"{part}: samples"] = len(outputs.y)
        kinds = {
            "harm": CascadeOptions(max_harm=max_harm),
            "differs": CascadeOptions(max_harm=max_harm, kind="differs"),
            "harm, from 1 member": CascadeOptions(max_harm=max_harm, stages=range(1, len(outputs.logits))),
        }
        for kind, options in kinds.items():
            target = 1.8 if part == "mlp" and kind == "harm" else None
            measure(results, f"{part}, {kind}", outputs, options, target)
    seconds = round(time.monotonic() - begin)
    splits = QUICK_SPLITS if args.quick else SPLITS
    results.finish(splits=splits, max_harm=max_harm, confidence=CONFIDENCE, **facts, seconds=seconds)


if __name__ == "__main__":
    main()
