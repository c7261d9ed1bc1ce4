"""Which OOD score is the default: AUROC of seven scores for nine ensembles against the OOD sets.

Question: which score of a calibrated ensemble separates test samples from OOD samples best, whatever the OOD set?

Ensembles: the four published ResNets on CIFAR-10 (depth 20, 32, 44, 56), and eight that are trained here, with four
members each: a CNN on 10,000 images of MNIST, an MLP on 10,000 of Fashion-MNIST, a CNN on 5,000 of CIFAR-10, and an MLP
on the digits of scikit-learn, each with the methods `deep_ensemble` and `sam`.

OOD sets: `SETS` below, the first 2,000 images of each, and 1,000 images of uniform noise. A set with the same classes
as the training data is left out (MNIST for the digits).

Scores: the temperature is fitted on a random half of the first 2,000 test samples; the other half is in-distribution.
The decision uses calibrated outputs in the default order, "pool then calibrate": `max_probability` and `entropy` come
from the calibrated probabilities, the other scores from the members' logits divided by the same temperature. AUROC
from the logits as they are is also reported.

Repetitions: the five rows of `SETS`. The number of one repetition is the mean AUROC over its OOD sets and ensembles,
because ensembles of two methods on the same data are not independent.

Decision: the best candidate has the largest mean over the five repetitions. All candidates whose paired 95 % t interval
of the difference from the best contains zero are tied with it, and the simplest one becomes the default, in the order
of `CANDIDATES`: first those that follow from the probabilities of an answer. Scores that compare members are reported
but are no candidates: one member, or a cascade that queries one, has none. The benchmark fails if `DEFAULT_OOD_SCORE`
is not the result.

Training takes about eight minutes of one core. `--folder` keeps the runs; the same call then continues. The quick form
trains two small ensembles on the digits, uses only noise, and judges nothing.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from _common import NETWORKS, Results, at_least, flag_parser, missing_data

import plateaux
from plateaux.data.files import data_root
from plateaux.ensembles.ood_scores import DEFAULT_OOD_SCORE, OOD_SCORES, compare
from plateaux.ensembles.temperature import Temperatures, apply, pool_then_calibrate
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import predict_all
from plateaux.evaluation.ood_sets import open_suites
from plateaux.evaluation.splits import eval_split
from plateaux.stats import Interval, paired_t_interval

DEPTHS = (20, 32, 44, 56)
METHODS = ("deep_ensemble", "sam")
CANDIDATES = ("max_probability", "entropy", "max_logit", "energy")  # the simplest first
OF_PROBABILITIES = ("max_probability", "entropy")  # functions of the ensemble's probabilities
NEEDED = ("CIFAR-10", "CIFAR-100", "MNIST", "Fashion-MNIST", "OOD sets", "ResNets")
COLOR = ("cifar100", "tinyimagenet32", "textures32", "mnist", "fashion_mnist")
SETS = {
    "resnets": COLOR,
    "cifar10": COLOR,
    "mnist": ("notmnist", "fashion_mnist", "cifar100", "textures32"),
    "fashion_mnist": ("notmnist", "mnist", "cifar100", "textures32"),
    "digits": ("notmnist", "fashion_mnist", "cifar100", "textures32"),
}
LIMIT, NOISE = 2000, 1000
Aurocs = dict[str, dict[str, float]]  # by "calibrated" or "raw", and score


@dataclass(frozen=True)
class Setup:
    """How the members on one data set are trained."""

    model: dict[str, Any]
    epochs: int
    lr: float
    batch_size: int = 64
    limit: int | None = None


SETUPS = {
    "mnist": Setup({"name": "cnn", "channels": [8, 16, 32], "norm": "batch"}, 3, 3e-3, limit=10_000),
    "fashion_mnist": Setup({"name": "mlp", "hidden_sizes": [256, 128]}, 5, 1e-3, limit=10_000),
    "cifar10": Setup({"name": "cnn", "channels": [16, 32, 64], "norm": "batch"}, 4, 3e-3, limit=5000),
    "digits": Setup({"name": "mlp"}, 10, 3e-3, batch_size=32),
}


def import_networks(folder: Path) -> Path:
    """Make a run of the four published networks."""
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
    if not folder.exists():
        plateaux.import_weights(folder, recipe, [f"{file}:resnet{depth}." for depth in DEPTHS])
    return folder


def train_members(folder: Path, data: str, method: str, *, quick: bool) -> Path:
    """Train the members of one ensemble; ensembles of different methods have different seeds."""
    setup = SETUPS[data]
    limit = {} if setup.limit is None else {"limit": setup.limit}
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 2 if quick else 4,
            "seed": METHODS.index(method),
            "data": {"name": data, "batch_size": setup.batch_size, **limit},
            "model": setup.model,
            "method": {"name": method},
            "optimizer": {"name": "AdamW", "lr": setup.lr, "weight_decay": 0.01},
            "lr_scheduler": [{"name": "cosine", "interval": "step"}],
            "train": {"epochs": 2 if quick else setup.epochs, "memory_format": "channels_last"},
            "executor": {"threads": 1},
        }
    )
    plateaux.train(recipe, folder)
    return folder


def all_scores(logits: torch.Tensor, fitted: Temperatures | None) -> dict[str, Any]:
    """Return the scores of logits `[M, N, C]`, of the calibrated outputs if temperatures are given."""
    if fitted is None:
        return {name: score(logits).numpy() for name, score in OOD_SCORES.items()}
    pooled, members = apply(logits, fitted)[None], logits.double() / fitted.values[0]
    return {name: score(pooled if name in OF_PROBABILITIES else members).numpy() for name, score in OOD_SCORES.items()}


def measure(run: Path, names: tuple[str, ...]) -> dict[str, Aurocs]:
    """Return the AUROC of every score by OOD set."""
    evaluator = Evaluator(run, limit=LIMIT)
    test = predict_all(evaluator, eval_split(evaluator.recipe, evaluator.data_info, "test"))
    order = torch.randperm(len(test.y), generator=torch.Generator().manual_seed(0))
    held, rest = (test.take(part) for part in order.tensor_split(2))
    kinds = {"calibrated": pool_then_calibrate(held.logits, held.y), "raw": None}
    inside = {kind: all_scores(rest.logits, fitted) for kind, fitted in kinds.items()}
    shape, generator = (NOISE, *evaluator.data_info.shape), torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    found: dict[str, Aurocs] = {}
    for sets in open_suites(evaluator, {"named": names, "made": {"noise": noise}}).values():
        for name, open_splits in sets:
            (split,) = open_splits()
            logits = predict_all(evaluator, split).logits
            compared = {kind: compare(inside[kind], all_scores(logits, kinds[kind])) for kind in kinds}
            found[name] = {
                kind: {score: values["auroc"].value for score, values in by_score.items()}
                for kind, by_score in compared.items()
            }
    return found


def measure_all(folder: Path, results: Results) -> dict[str, Aurocs]:
    """Return the mean AUROC over OOD sets and ensembles by data set, and add the figures of each ensemble."""
    means: dict[str, Aurocs] = {}
    for data, names in SETS.items():
        if results.quick and data != "digits":
            continue
        methods = ("published",) if data == "resnets" else METHODS
        found: list[Aurocs] = []
        for method in methods:
            run = folder / f"{data}-{method}"
            if data == "resnets":
                import_networks(run)
            else:
                train_members(run, data, method, quick=results.quick)
            by_set = measure(run, () if results.quick else names)
            for name, aurocs in by_set.items():
                for score in CANDIDATES:
                    results.add(f"{data}, {method}, {name}: {score}", aurocs["calibrated"][score])
            found.append(mean_of(list(by_set.values())))
        means[data] = mean_of(found)
        for score, value in means[data]["calibrated"].items():
            results.add(f"{data}: {score}", value)
    return means


def mean_of(several: list[Aurocs]) -> Aurocs:
    return {kind: {score: mean(each[kind][score] for each in several) for score in OOD_SCORES} for kind in several[0]}


def decide(means: dict[str, Aurocs]) -> tuple[str, str, dict[str, Interval]]:
    """Return the best candidate, the selected score, and the difference of every score from the best candidate."""
    by_score = {score: [each["calibrated"][score] for each in means.values()] for score in OOD_SCORES}
    best = max(CANDIDATES, key=lambda score: mean(by_score[score]))
    differences = {score: paired_t_interval(values, by_score[best]) for score, values in by_score.items()}
    selected = next(score for score in CANDIDATES if score == best or not _excludes_zero(differences[score]))
    return best, selected, differences


def print_table(means: dict[str, Aurocs], best: str, differences: dict[str, Interval]) -> None:
    """Print AUROC in percent as a table in Markdown."""
    rule = "|".join(["---", *["---:"] * (3 + len(means))])
    print(f"| score | {' | '.join(means)} | mean | difference from {best} | mean, not calibrated |\n|{rule}|")
    for score, apart in differences.items():
        values = [each["calibrated"][score] for each in means.values()]
        cells = [f"{100 * value:.1f}" for value in (*values, mean(values))]
        cells.append("" if score == best else f"{100 * apart.value:+.1f} ± {100 * apart.half:.1f}")
        cells.append(f"{100 * mean(each['raw'][score] for each in means.values()):.1f}")
        print(f"| `{score}` | {' | '.join(cells)} |")


def _excludes_zero(interval: Interval) -> bool:
    return interval.low > 0 or interval.high < 0


def main() -> None:
    parser = flag_parser(__doc__ or "")
    parser.add_argument("--folder", help="where to keep the runs (default: a temporary folder)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, begin = Results(args.quick, args.json), time.monotonic()
    if not args.quick and (reason := missing_data(*NEEDED)) is not None:
        results.cannot_tell(reason)
        results.finish()
        return
    with tempfile.TemporaryDirectory() as temporary:
        means = measure_all(Path(args.folder or temporary), results)
    best, selected, differences = decide(means)
    for score in OOD_SCORES:
        results.add(f"mean: {score}", mean(each["calibrated"][score] for each in means.values()))
        results.add(f"mean, not calibrated: {score}", mean(each["raw"][score] for each in means.values()))
    if not args.quick:  # one repetition has no interval
        results.add("the default is the selected score", float(selected == DEFAULT_OOD_SCORE), full=at_least(1.0))
    if not args.json:
        print_table(means, best, differences)
    results.finish(best=best, selected=selected, default=DEFAULT_OOD_SCORE, seconds=round(time.monotonic() - begin))


if __name__ == "__main__":
    main()
