"""The defaults of a short recipe: which optimizer, learning rate, schedule, and number of epochs?

Registered before the first run.

Question: a user names data and a model and nothing else, in a recipe or in `plateaux.fit`. Which one setting of
optimizer, rate, schedule, and epochs should be used?

Hypothesis: SGD with rate 0.1, momentum 0.9, a cosine schedule, and 30 epochs is the best of `CANDIDATES` or tied with
it. The second candidate is the default of recipes so far, the sixth that of `fit`.

Setup: nine cases of built-in data, each trained as a user meets it. A recipe (`deep_ensemble`, batches of 128):
`moons`, `spirals`, `blobs`, and `digits` with the MLP, and `digits` with the CNN. `fit` (`sam`, batches of 32): the
arrays iris, wine, breast cancer, and digits of scikit-learn with the MLP, of which a half are test samples. One member
each, no augmentation, no validation.

Repetitions: five. A repetition changes the seed of the member, of the order, and of the data or their split; within one
all candidates have the same. The number of a repetition is the mean over the nine cases.

Decision: a candidate is out if one of its trainings diverges. Of the others, the best has the largest mean accuracy on
test samples, and all whose paired 95 % t interval of the difference from it contains zero are tied with it. The tied
candidate with the lowest mean NLL becomes the default. The benchmark fails if that is not the default of recipes and of
`fit`.

The full form takes about five minutes of one core. It writes each pair of scores to `--scores`, by default
`benchmarks/defaults.json`, which is in the repository, and trains only what is missing there, one repetition after the
other. The quick form trains one task twice, and judges nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from _common import Results, at_least, flag_parser
from sklearn import datasets

import plateaux
from plateaux.stats import paired_t_interval

COSINE = [{"name": "cosine"}]
SGD = {"name": "SGD", "lr": 0.1, "momentum": 0.9}
Sections = dict[str, Any]


def candidate(optimizer: Sections, epochs: int, schedule: list[Sections]) -> Sections:
    return {"optimizer": optimizer, "lr_scheduler": schedule, "train": {"epochs": epochs}}


CANDIDATES = {
    "SGD 0.1, momentum 0.9, cosine, 30 epochs": candidate(SGD, 30, COSINE),
    "SGD 0.1, no momentum, constant, 10 epochs": candidate({"name": "SGD", "lr": 0.1}, 10, []),
    "SGD 0.1, momentum 0.9, cosine, 10 epochs": candidate(SGD, 10, COSINE),
    "SGD 0.1, momentum 0.9, constant, 30 epochs": candidate(SGD, 30, []),
    "SGD 0.03, momentum 0.9, cosine, 30 epochs": candidate({**SGD, "lr": 0.03}, 30, COSINE),
    **{
        f"AdamW {lr}, weight decay 0.01, cosine, {epochs} epochs": candidate(
            {"name": "AdamW", "lr": lr, "weight_decay": 0.01}, epochs, COSINE
        )
        for lr, epochs in ((0.001, 20), (0.003, 30), (0.01, 30))
    },
}
REGISTERED = [*((name, "mlp") for name in ("moons", "spirals", "blobs", "digits")), ("digits", "cnn")]
ARRAYS = [(name, "mlp") for name in ("iris", "wine", "breast_cancer", "digits")]
CASES = [*((*case, "deep_ensemble") for case in REGISTERED), *((*case, "sam") for case in ARRAYS)]
BATCH = {"deep_ensemble": 128, "sam": 32}
REPETITIONS = 5
Scores = tuple[float, float]  # accuracy and NLL


def measure(data: str, model: str, method: str, repetition: int, chosen: Sections) -> Scores | None:
    """Train one member, and return its accuracy and NLL on test samples; None: it diverged."""
    section: Sections = {"name": data, "batch_size": BATCH[method]}
    splits = None
    if method == "sam":
        x, y = getattr(datasets, f"load_{data}")(return_X_y=True)
        splits = plateaux.from_arrays(x.astype("float32"), y, test=0.5, seed=repetition)
    else:
        section["seed"] = repetition
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 1,
            "seed": repetition,
            "data": section,
            "model": {"name": model},
            "method": {"name": method},
            "executor": {"threads": 1},
            "run": {"checkpoint_every_epochs": 1000},
            **chosen,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = plateaux.train(recipe, Path(folder) / "run", data=splits, progress=lambda _: None)
        except plateaux.errors.DivergedError:
            return None
        found = plateaux.evaluate(run, metrics=["accuracy", "nll"])
    return found["accuracy"].value, found["nll"].value


def measure_all(
    names: list[str], cases: list[tuple[str, str, str]], results: Results, file: Path
) -> dict[str, list[Scores]]:
    """Return the mean scores of every candidate in each repetition; candidates that diverged are left out."""
    stored: dict[str, list[float] | None] = json.loads(file.read_text()) if file.exists() else {}
    for repetition, name, (data, model, method) in product(range(REPETITIONS), names, cases):
        key = f"{name}: {data}, {model}, {method}, repetition {repetition}"
        if key not in stored:
            scores = measure(data, model, method, repetition, CANDIDATES[name])
            stored[key] = None if scores is None else [round(score, 5) for score in scores]
            file.write_text(json.dumps(stored, indent=0) + "\n")
    kept: dict[str, list[Scores]] = {}
    for name in names:
        found = {
            f"{data}, {model}, {method}": [
                stored[f"{name}: {data}, {model}, {method}, repetition {each}"] for each in range(REPETITIONS)
            ]
            for data, model, method in cases
        }
        for case, several in found.items():
            finished = [score for score in several if score is not None]
            results.add(f"{name}: {case}, diverged", len(several) - len(finished))
            if finished:
                results.add(f"{name}: {case}, accuracy", mean(accuracy for accuracy, _ in finished))
                results.add(f"{name}: {case}, NLL", mean(nll for _, nll in finished))
        rounds = [[score for score in each if score is not None] for each in zip(*found.values(), strict=True)]
        if all(len(each) == len(cases) for each in rounds):
            kept[name] = [(mean(a for a, _ in each), mean(n for _, n in each)) for each in rounds]
    return kept


def decide(kept: dict[str, list[Scores]], results: Results) -> str:
    """Return the candidate with the lowest NLL of those that are tied with the most accurate one."""
    accuracy = {name: [each for each, _ in scores] for name, scores in kept.items()}
    nll = {name: mean(each for _, each in scores) for name, scores in kept.items()}
    best = max(kept, key=lambda name: mean(accuracy[name]))
    tied = [best]
    for name in kept:
        apart = paired_t_interval(accuracy[name], accuracy[best])
        results.add(f"{name}: accuracy", mean(accuracy[name]))
        results.add(f"{name}: difference from the best", apart.value)
        results.add(f"{name}: half of its interval", 0.0 if name == best else apart.half)
        results.add(f"{name}: NLL", nll[name])
        tied += [name] if name != best and apart.low <= 0 <= apart.high else []
    return min(tied, key=lambda name: nll[name])


def defaults() -> list[Sections]:
    """Return the sections that a recipe and `fit` use if nothing is given."""
    from plateaux.training.fit_arrays import build_recipe

    data = plateaux.from_arrays(*datasets.load_iris(return_X_y=True))
    recipes = [
        plateaux.Recipe.from_dict({"data": {"name": "moons"}, "model": {"name": "mlp"}}),
        build_recipe(data, "mlp", members=1, method="sam", seed=0, settings={}),
    ]
    return [{name: recipe.to_dict()[name] for name in ("optimizer", "lr_scheduler", "train")} for recipe in recipes]


def resolved(chosen: Sections) -> Sections:
    recipe = plateaux.Recipe.from_dict({"data": {"name": "moons"}, "model": {"name": "mlp"}, **chosen})
    return {name: recipe.to_dict()[name] for name in ("optimizer", "lr_scheduler", "train")}


def main() -> None:
    parser = flag_parser(__doc__ or "")
    parser.add_argument("--scores", type=Path, default=Path(__file__).with_suffix(".json"), help="a JSON file")
    args: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    results, begin = Results(args.quick, args.json), time.monotonic()
    names, cases = (list(CANDIDATES)[1:3], CASES[:1]) if args.quick else (list(CANDIDATES), CASES)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scores.json" if args.quick else args.scores
        selected = decide(measure_all(names, cases, results, file), results)
    if not args.quick:
        is_default = all(each == resolved(CANDIDATES[selected]) for each in defaults())
        results.add("the defaults are the selected candidate", float(is_default), full=at_least(1.0))
    results.finish(selected=selected, repetitions=REPETITIONS, seconds=round(time.monotonic() - begin))


if __name__ == "__main__":
    main()
