"""README's first example, the quickstart, and the tutorial: is the ensemble worth it, and calibrated?

Each example is trained with ten seeds, as its page says: the code and the recipes are read from the pages. The samples
are the same for all seeds. Limits: the ensemble is right on at least 95 % of the test samples; the paired 95 % t
interval over the seeds of its difference from the mean of its members excludes zero, for accuracy and for NLL; and its
ECE after calibration is not worse than that of the calibrated members: the interval of the difference is not above
zero. Temperatures are fitted on a random half of the test samples, and the ECE (15 bins) is that of the other half.

The full form takes about six minutes of one core. The quick form trains the quickstart for two epochs with two seeds,
and judges nothing.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from _common import Results, at_least, at_most, parse_flags
from torch import Tensor

import plateaux
from plateaux.ensembles.temperature import apply, calibrate_then_pool, pool_then_calibrate
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import predict_all
from plateaux.evaluation.splits import eval_split
from plateaux.stats import paired_t_interval

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = ROOT / "docs" / "get-started" / "tutorial.md"
SEEDS = range(10)
TINY = 1e-9  # an interval that excludes zero begins above it
Train = Callable[[int, Path], plateaux.Run]


def block(page: Path, language: str) -> str:
    """Return the first fenced block of a language."""
    found = re.search(rf"^```{language}\b[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None, f"{page} has no block of {language}"
    return found[1]


def train_readme(seed: int, out: Path) -> plateaux.Run:
    """Run README's first example up to its results, with another seed and folder."""
    code, real = block(ROOT / "README.md", "python").partition("print(")[0], plateaux.fit

    def fit(*args: Any, **options: Any) -> plateaux.Run:
        return real(*args, **{**options, "seed": seed, "out": out})

    space: dict[str, Any] = {}
    with patch.object(plateaux, "fit", fit):
        exec(compile(code, "README.md", "exec"), space)
    run: plateaux.Run = space["run"]
    return run


def train_quickstart(seed: int, out: Path, *changes: str) -> plateaux.Run:
    return plateaux.train(plateaux.Recipe.load("quickstart", [f"seed={seed}", *changes]), out)


def train_tutorial(seed: int, out: Path) -> plateaux.Run:
    """Train the recipe of the tutorial on the images that its script draws."""
    if not Path("flags").exists():
        exec(compile(block(TUTORIAL, "python"), str(TUTORIAL), "exec"), {})
    return plateaux.train(plateaux.Recipe.parse(block(TUTORIAL, "toml"), [f"seed={seed}"]), out)


EXAMPLES: dict[str, Train] = {
    "README": train_readme,
    "quickstart": train_quickstart,
    "tutorial": train_tutorial,
}


def ece(p: Tensor, y: Tensor, bins: int = 15) -> float:
    confidence, label = p.max(-1)
    position = (confidence * bins).long().clamp_max(bins - 1)
    gaps = confidence.new_zeros(bins).index_add(0, position, (label == y).to(confidence.dtype) - confidence)
    return float(gaps.abs().sum() / len(y))


def measure(run: plateaux.Run) -> dict[str, tuple[float, float]]:
    """Return accuracy, NLL, and ECE after calibration: of the ensemble, and the mean of its members."""
    results = plateaux.evaluate(run, metrics=["accuracy", "nll"])
    found = {
        name: (results[name].value, mean(each.value for each in results[name].members.values()))
        for name in ("accuracy", "nll")
    }
    evaluator = Evaluator(run)
    test = predict_all(evaluator, eval_split(evaluator.recipe, evaluator.data_info, "test"))
    order = torch.randperm(len(test.y), generator=torch.Generator().manual_seed(0))
    held, rest = (test.take(part) for part in order.tensor_split(2))
    pooled = apply(rest.logits, pool_then_calibrate(held.logits, held.y)).exp()
    values = calibrate_then_pool(held.logits, held.y).values
    members = [(logits.double() / t).softmax(-1) for logits, t in zip(rest.logits, values, strict=True)]
    found["ece"] = ece(pooled, rest.y), mean(ece(p, rest.y) for p in members)
    return found


def add_figures(name: str, found: list[dict[str, tuple[float, float]]], results: Results) -> None:
    pairs = {metric: list(zip(*(each[metric] for each in found), strict=True)) for metric in found[0]}
    for metric, (ensemble, members) in pairs.items():
        apart = paired_t_interval(ensemble, members)
        limit = at_least(0.95) if metric == "accuracy" else None
        results.add(f"{name}: {metric}, ensemble", mean(ensemble), full=limit)
        results.add(f"{name}: {metric}, mean of members", mean(members))
        results.add(f"{name}: {metric}, difference", apart.value)
        low = {"accuracy": at_least(TINY), "ece": at_most(0.0)}.get(metric)
        results.add(f"{name}: {metric}, low end", apart.low, full=low)
        results.add(f"{name}: {metric}, high end", apart.high, full=at_most(-TINY) if metric == "nll" else None)


def main() -> None:
    args = parse_flags(__doc__ or "", tuple(EXAMPLES))
    torch.set_num_threads(1)
    results, begin = Results(args.quick, args.json), time.monotonic()
    examples = {name: EXAMPLES[name] for name in args.parts}
    if args.quick:
        examples = {"quickstart": lambda seed, out: train_quickstart(seed, out, "train.epochs=2")}
    seeds = list(SEEDS[:2] if args.quick else SEEDS)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name, train in examples.items():
            add_figures(name, [measure(train(seed, Path(f"{name}-{seed}"))) for seed in seeds], results)
    results.finish(seeds=seeds, seconds=round(time.monotonic() - begin))


if __name__ == "__main__":
    main()
