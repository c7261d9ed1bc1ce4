"""Do joint methods help? Five heads on one ImageNet backbone: CIFAR-100, corruptions, and OOD samples.

    python studies/joint_cifar100.py runs/joint              # about 40 minutes on one core; again to go on
    python studies/joint_cifar100.py runs/joint --features   # only the trunk's features: the first quarter of it
    python studies/joint_cifar100.py runs/joint --table      # the tables of what is there so far, as Markdown
    python studies/joint_cifar100.py runs/joint --json       # the same as JSON
    python studies/joint_cifar100.py runs/joint --into docs/results/joint-cifar100.md   # write the tables into a page

The trunk is timm's tf_efficientnet_lite0 with ImageNet weights, which has seen ImageNet: that Tiny-ImageNet is foreign
to CIFAR-100's classes does not make it foreign to the trunk. Images of 32 px are brought to 128 px; each goes through
the trunk once. Members are perceptrons over its 1280 features, trained on 20,000 images. SED trains two of five heads
in a step, so it has 2.5 times the epochs: every head makes as many steps as in the other methods. The evidence for
claim 9 of the ledger is written to `evidence/` in that folder.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import plateaux
from plateaux.config.builders.data import build_data
from plateaux.config.builders.model import build_backbone
from plateaux.core import registry
from plateaux.core.runtime import configure_runtime
from plateaux.core.stats.intervals import Interval, paired_t_interval, t_interval
from plateaux.core.types import derive_seed
from plateaux.data.corruptions.corrupt import CORRUPTIONS, Corrupted
from plateaux.data.files import data_root
from plateaux.data.sources import InMemorySource, Source
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.ensembles.ood_scores import OOD_SCORES, compare
from plateaux.ensembles.soup import uniform
from plateaux.evaluation.splits import ResizedSource
from plateaux.storage.feature_cache import FeatureSource, prepare_features, through_backbone
from plateaux.storage.local_store import LocalStore
from plateaux.studies.claims.claim import Case, Evidence, write_evidence
from plateaux.studies.claims.contrasts import mean_with_interval

LAMBDAS = (0.0, 0.1, 1.0, 3.0, 10.0)  # the paper's; `strength` is half of it
# Tiny-ImageNet's classes that CIFAR-100 has too, by another name or as a kind of one of its own.
ALSO_IN_CIFAR100 = frozenset(
    """African elephant|American alligator|American lobster|Arabian camel|alp|bee|beer bottle|bell pepper|black widow
boa constrictor|brown bear|bullet train|chimpanzee|cockroach|computer keyboard|desk|dining table|freight car|goldfish
ladybug|lampshade|lawn mower|lion|monarch|mushroom|orange|ox|pay-phone|pill bottle|plate|pop bottle|projectile
rocking chair|school bus|seashore|snail|spiny lobster|steel arch bridge|stopwatch|sulphur butterfly|suspension bridge
tarantula|tractor|trolleybus|viaduct""".replace("\n", "|").split("|")
)


def recipe_for(
    condition: Mapping[str, Any], repetition: int, root: Path, *, quick: bool, pixels: int
) -> plateaux.Recipe:
    """Return a condition's recipe; repetitions are paired by their seed."""
    epochs = condition.get("epochs", 1) * (1 if quick else 8)
    rate = condition.get("lr", 1e-3)
    return plateaux.Recipe.from_dict(
        {
            "members": 5,
            "seed": derive_seed("joint", repetition),
            "data": {
                "name": "cifar100",
                "limit": 300 if quick else 20_000,
                "test_limit": 100 if quick else 10_000,
                "batch_size": 256,
                "mean": [0.5] * 3,
                "std": [0.5] * 3,
                "unlabeled_batch_size": 128,
            },
            "model": {
                "name": "timm:tf_efficientnet_lite0",
                "weights": str(data_root(None) / "weights" / "efficientnet_lite0_imagenet_fp16.safetensors"),
                "strict": False,
                "backbone": "features",
                "image_size": pixels,
                "head": "mlp",
                "head_width": condition.get("width", 256),
                "cache_features": True,
            },
            "method": condition["method"],
            "optimizer": {"name": "AdamW", "lr": rate, "weight_decay": condition.get("decay", 0.01)},
            "lr_scheduler": [{"name": "cosine", "interval": "step"}],
            "train": {"epochs": int(epochs), "memory_format": "channels_last"},
            "run": {
                "feature_cache": str(root / "features"),
                "checkpoint_every_minutes": None,
                "checkpoint_every_epochs": 1000,
            },
        }
    )


CONDITIONS: dict[str, dict[str, Any]] = {
    "deep ensemble": {"method": {"name": "deep_ensemble"}},
    "diverse hyper-parameters": {
        "method": {"name": "deep_ensemble"},
        "lr": [3e-4, 6e-4, 1e-3, 2e-3, 4e-3],
        "decay": [0.1, 0.001, 0.03, 0.01, 0.3],
    },
    "A2D": {"method": {"name": "a2d", "diversity_weight": 0.05}},
    "DivDis": {"method": {"name": "divdis", "diversity_weight": 10.0, "regularizer_weight": 10.0}},
    **{f"SED {lam:g}": {"method": {"name": "sed", "diversity_weight": lam / 2}, "epochs": 2.5} for lam in LAMBDAS},
}
BASE = "deep ensemble"
PAPERS = "SED 0.1"
CLAIM = "09-sed-differs-and-detects"
SEVERITIES = (1, 2, 3, 4, 5)
OUT = ("Tiny-ImageNet", "CIFAR-10", "textures", "MNIST", "Fashion-MNIST")
MARKS = ("<!-- written by studies/joint_cifar100.py --into: begin -->", "<!-- end -->")
Numbers = dict[str, float]


class Study:
    """All runs below one folder, and what was found of them."""

    def __init__(self, root: Path, *, quick: bool, repetitions: int, pixels: int) -> None:
        self.root, self.quick, self.repetitions, self.pixels = root, quick, repetitions, pixels
        self.store = LocalStore(root)
        self.recipe = recipe_for(CONDITIONS[BASE], 0, root, quick=quick, pixels=pixels)

    def go(self) -> None:
        """Train and ask what is missing: one repetition of everything before the second."""
        self.ready()
        for repetition in range(self.repetitions):
            for name, condition in CONDITIONS.items():
                if f"{name}/{repetition}" not in self.results():
                    self._one(name, condition, repetition)

    def ready(self) -> None:
        """Send every image through the trunk that did not go yet."""
        self.data = build_data(self.recipe)
        self.unlabelled, self.others = foreign(50 if self.quick else 1000)
        self.trunk = build_backbone(self.recipe, self.data)
        train = through_backbone(self.recipe, self.data, self.data.train, self.trunk)
        spare = through_backbone(self.recipe, self.data, self.unlabelled, self.trunk)
        self.seen = dict(self._sets())
        for name, source in {"train": train, "unlabelled": spare, **self.seen}.items():
            made = prepare_features([source], SINGLE_PROCESS)
            if made:
                print(f"{name}: {len(source):,} samples, {made:,} went through the trunk", flush=True)

    def _sets(self) -> Iterator[tuple[str, FeatureSource]]:
        """Yield what members are asked about, by name."""
        first, few = (20, 50) if self.quick else (200, 1000)
        yield "test", self._through(self.data.test, len(self.data.test))
        yield "out: Tiny-ImageNet", self._through(self.others, few if self.quick else len(self.others))
        names = {"CIFAR-10": "cifar10", "textures": "textures32", "MNIST": "mnist", "Fashion-MNIST": "fashion_mnist"}
        for title, name in names.items():
            yield f"out: {title}", self._through(ResizedSource(registry.dataset.get(name)().test, (3, 32, 32)), few)
        for kind in CORRUPTIONS[:2] if self.quick else CORRUPTIONS:
            for severity in SEVERITIES:
                yield f"{kind} {severity}", self._through(Corrupted(self.data.test, kind, severity), first)

    def _through(self, source: Source, count: int) -> FeatureSource:
        return through_backbone(self.recipe, self.data, source, self.trunk, ids=torch.arange(min(count, len(source))))

    def _one(self, name: str, condition: Mapping[str, Any], repetition: int) -> None:
        folder = self.root / "runs" / f"{name.replace(' ', '_')}-{repetition}"
        recipe = recipe_for(condition, repetition, self.root, quick=self.quick, pixels=self.pixels)
        run = plateaux.train(recipe, folder, unlabeled=self.unlabelled)
        seconds = sum(progress.seconds for progress in run.all_progress())
        found = {**self._asked(folder), "seconds of training": seconds}
        self.store.put_json("results.json", {**self.results(), f"{name}/{repetition}": found}, has_digest=False)
        print(f"{name} #{repetition}: " + ", ".join(f"{k} {found[k]:.3f}" for k in list(found)[:4]), flush=True)

    @torch.no_grad()
    def _asked(self, folder: Path) -> Numbers:
        """Return every number about one run."""
        heads = [member.head for member in plateaux.load(folder).members]
        mixed = uniform([head.state_dict() for head in heads])
        tables: dict[str, Tensor] = {}
        labels: dict[str, Tensor] = {}
        for name, source in self.seen.items():
            x, labels[name] = source.fetch(torch.arange(len(source)))
            rows = [head(x) for head in heads]
            tables[name] = torch.stack([*rows, functional_call(heads[0], mixed, x)])
        found = answers("test", tables["test"], labels["test"])
        for severity in SEVERITIES:
            names = [name for name in tables if name.endswith(f" {severity}")]
            each = [answers(f"C-{severity}", tables[name], labels[name]) for name in names]
            found |= {key_: sum(one[key_] for one in each) / len(each) for key_ in each[0]}
        out = {name: tables[f"out: {name}"][:-1] for name in OUT}
        for severity in (1, 5):
            out[f"C-{severity}"] = torch.cat([tables[n][:-1] for n in tables if n.endswith(f" {severity}")], 1)
        for name, table in out.items():
            found |= {f"AUROC {score}, {name}": v for score, v in told_apart(tables["test"][:-1], table).items()}
            found[f"#unique, {name}"], found[f"PDS, {name}"] = unique(table), float(OOD_SCORES["pds"](table).mean())
        for size in range(2, len(heads) + 1):
            casts = list(combinations(range(len(heads)), size))
            apart = [told_apart(tables["test"][list(cast)], out["C-1"][list(cast)])["PDS"] for cast in casts]
            found[f"AUROC PDS of {size}, C-1"] = sum(apart) / len(apart)
        return found

    def results(self) -> dict[str, Numbers]:
        if not self.store.has("results.json"):
            return {}
        found: dict[str, Numbers] = self.store.get_json("results.json", has_digest=False)
        return found

    def numbers(self, condition: str, what: str) -> list[float]:
        """Return a number in every repetition that all conditions have."""
        found = self.results()
        whole = [r for r in range(self.repetitions) if all(f"{name}/{r}" in found for name in CONDITIONS)]
        return [found[f"{condition}/{repetition}"][what] for repetition in whole]


def answers(name: str, rows: Tensor, y: Tensor) -> Numbers:
    """Return how good and how different five heads are; the last row is their soup."""
    table, guesses = rows[:-1], rows.argmax(-1)
    single = (guesses[:-1] == y).float().mean(1)
    pairs = [float((a != b).float().mean()) for a, b in combinations(guesses[:-1], 2)]
    return {
        f"accuracy of the prediction ensemble, {name}": float((table.mean(0).argmax(-1) == y).float().mean()),
        f"accuracy of the uniform soup, {name}": float((guesses[-1] == y).float().mean()),
        f"accuracy of the oracle, {name}": float(single.max()),
        f"accuracy of a member, {name}": float(single.mean()),
        f"#unique, {name}": unique(table),
        f"PDS, {name}": float(OOD_SCORES["pds"](table).mean()),
        f"disagreement, {name}": sum(pairs) / len(pairs),
    }


def unique(table: Tensor) -> float:
    """Return the mean number of different guesses."""
    guesses = table.argmax(-1).sort(0).values
    return 1 + float((guesses[1:] != guesses[:-1]).float().sum(0).mean())


def told_apart(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """Return the AUROC of two scores: one less the largest mean probability (BMA), and PDS."""
    scores = {"BMA": OOD_SCORES["max_probability"], "PDS": OOD_SCORES["pds"]}
    found = compare(*({n: score(t).numpy() for n, score in scores.items()} for t in (inside, outside)))
    return {name: each["auroc"].value for name, each in found.items()}


def foreign(count: int) -> tuple[InMemorySource, InMemorySource]:
    """Return Tiny-ImageNet images of classes that CIFAR-100 lacks: so many to train beside, the others to test on."""
    made = registry.dataset.get("tinyimagenet32")()
    allowed = torch.tensor([name not in ALSO_IN_CIFAR100 for name in made.labels])
    ids = allowed[made.test.y].nonzero().flatten()
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(derive_seed("foreign")))]
    x, y = made.test.fetch(ids)
    return InMemorySource(x[:count].clone(), y[:count].clone()), InMemorySource(x[count:].clone(), y[count:].clone())


# What was found, in tables and sentences.

ALL = [*OUT, "C-1", "C-5"]
TABLES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "How different: #unique of five, PDS and disagreement (Table 1)": (
        tuple(CONDITIONS),
        ("#unique, test", "#unique, C-1", "#unique, C-5", "#unique, Tiny-ImageNet", "#unique, textures", "PDS, test",
         "PDS, C-1", "PDS, C-5", "disagreement, test", "disagreement, C-1", "disagreement, C-5"),
    ),
    "How good: accuracy on test and corrupted images (Table 2)": (
        tuple(CONDITIONS),
        tuple(f"accuracy of {who}, {on}" for who in ("the oracle", "the prediction ensemble", "the uniform soup")
              for on in ("test", "C-1", "C-5")),
    ),
    "How alarmed: AUROC of BMA (Table 3)": (tuple(CONDITIONS), tuple(f"AUROC BMA, {name}" for name in ALL)),
    "How alarmed: AUROC of PDS (Table 3)": (tuple(CONDITIONS), tuple(f"AUROC PDS, {name}" for name in ALL)),
    "Lambda, diversity and alarm (Figure 3)": (
        tuple(f"SED {lam:g}" for lam in LAMBDAS),
        ("PDS, C-1", "AUROC PDS, C-1", "PDS, Tiny-ImageNet", "AUROC PDS, Tiny-ImageNet"),
    ),
    "Size of the ensemble, some of five: AUROC of PDS on C-1 (Figure 4)": (
        tuple(CONDITIONS), tuple(f"AUROC PDS of {size}, C-1" for size in range(2, 6)),
    ),
}  # fmt: skip


def tables(study: Study) -> str:
    """Return all tables as Markdown: mean over repetitions, and half the width of its 95 % t interval."""
    lines: list[str] = []
    for title, (conditions, columns) in TABLES.items():
        lines += [f"**{title}**", "", "| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
        for name in conditions:
            cells = [_cell(t_interval(study.numbers(name, what)), what) for what in columns]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["**Claims**", "", "| claim | here | numbers | paired difference, 95 % interval |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(each) + " |" for each in claims(study))])


def claims(study: Study) -> list[tuple[str, str, str, str]]:
    """Return every claim with what became of it; seen is a difference whose paired interval lies above zero."""
    lams = [f"SED {lam:g}" for lam in LAMBDAS[1:]]
    found = []
    for name in ("A2D", "DivDis", *lams):
        asked = f"{name} guesses more differently on C-1 than the deep ensemble (#unique)"
        found.append(_compared(study, asked, (name, "#unique, C-1"), (BASE, "#unique, C-1")))
    for name in lams:  # two of five heads at a time, and no diversity: what is left is the diversity's doing
        asked = f"{name} guesses more differently on C-1 than SED without its diversity term (#unique)"
        found.append(_compared(study, asked, (name, "#unique, C-1"), ("SED 0", "#unique, C-1")))
    for on in ("C-1", "C-5"):
        what = f"accuracy of the prediction ensemble, {on}"
        for name in lams:
            asked = f"the prediction ensemble of {name} is better on {on} than the deep ensemble's"
            found.append(_compared(study, asked, (name, what), (BASE, what)))
    for on in ALL:
        best = _best(study, list(CONDITIONS), f"AUROC BMA, {on}")
        asked = f"SED with PDS tells {on} from test better than the best BMA, that of {best}"
        for name in dict.fromkeys((PAPERS, _best(study, lams, f"AUROC PDS, {on}"))):
            words = f"{asked}; {name}" + (", the paper's lambda" if name == PAPERS else ", the best lambda here")
            found.append(_compared(study, words, (name, f"AUROC PDS, {on}"), (best, f"AUROC BMA, {on}")))
        asked = f"{PAPERS} with PDS tells {on} from test better than the deep ensemble with PDS"
        found.append(_compared(study, asked, (PAPERS, f"AUROC PDS, {on}"), (BASE, f"AUROC PDS, {on}")))
    for what in ("PDS, C-1", "AUROC PDS, C-1"):
        found.append(_compared(study, f"{what} rises from lambda 0 to 10", ("SED 10", what), ("SED 0", what)))
    for name in lams:
        asked = f"PDS of five members of {name} tells C-1 from test better than that of two"
        found.append(_compared(study, asked, (name, "AUROC PDS of 5, C-1"), (name, "AUROC PDS of 2, C-1")))
    found.append(("SED reaches .977 on iNaturalist, 77.3 % on ImageNet-C", "not testable here", "other data", ""))
    return found


def evidence(study: Study) -> Evidence:
    """Return what the study says of claim 9: SED at the paper's lambda, means over all sets, paired by repetition."""
    best = {on: _best(study, list(CONDITIONS), f"AUROC BMA, {on}") for on in ALL}
    alarms = [_less(study, (PAPERS, f"AUROC PDS, {on}"), (best[on], f"AUROC BMA, {on}")) for on in ALL]
    answers = [_less(study, (PAPERS, f"#unique, {on}"), (BASE, f"#unique, {on}")) for on in ALL]
    first, second = (
        mean_with_interval([_mean(each) for each in zip(*rows, strict=True)]) for rows in (alarms, answers)
    )
    return Evidence(claim=CLAIM, cases={"as stated": Case(primary=(first,), also=(second,))})


def _less(study: Study, mine: tuple[str, str], other: tuple[str, str]) -> list[float]:
    return [a - b for a, b in zip(study.numbers(*mine), study.numbers(*other), strict=True)]


def _best(study: Study, names: Sequence[str], what: str) -> str:
    """Return the condition with the largest mean: chosen on the very samples it is judged by, so it flatters."""
    return max(names, key=lambda name: _mean(study.numbers(name, what)))


def _compared(study: Study, words: str, mine: tuple[str, str], other: tuple[str, str]) -> tuple[str, str, str, str]:
    here, there = study.numbers(*mine), study.numbers(*other)
    apart = paired_t_interval(here, there)
    verdict = "seen" if apart.low > 0 else "not seen: the opposite" if apart.high < 0 else "inconclusive"
    numbers = f"{_mean(here):.3f} against {_mean(there):.3f}"
    return words, verdict, numbers, f"{apart.value:+.3f}, {apart.low:+.3f} to {apart.high:+.3f}"


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else float("nan")


def _cell(found: Interval, what: str) -> str:
    scale, digits = (100, 1) if what.startswith(("accuracy", "disagreement")) else (1, 3)
    reach = (found.high - found.value) * scale
    return f"{found.value * scale:.{digits}f}" + (f" ± {reach:.{digits}f}" if reach == reach else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few images, one epoch, 32 px: does it run?")
    parser.add_argument("--pixels", type=int, default=128, help="the side that images are brought to before the trunk")
    parser.add_argument("--features", action="store_true", help="only send the images through the trunk")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--into", type=Path, help="only write what is there into a page, between its marks")
    parser.add_argument("--json", action="store_true", help="only print what is there, as JSON")
    args = parser.parse_args()
    configure_runtime(threads=1)
    warnings.filterwarnings("ignore", message="Not loaded from")
    warnings.filterwarnings("ignore", message=".*looks at no unlabelled")
    few, pixels = (1, 32) if args.quick else (3, args.pixels)
    study = Study(args.root, quick=args.quick, repetitions=few, pixels=pixels)
    if args.features:
        study.ready()
    elif not (args.table or args.json or args.into):
        study.go()
        write_evidence(evidence(study), args.root / "evidence")
    if args.json:
        print(json.dumps({"numbers": study.results(), "claims": claims(study)}))
    elif args.into:
        page = args.into.read_text(encoding="utf-8")
        before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
        args.into.write_text(f"{before}{MARKS[0]}\n\n{tables(study)}\n\n{MARKS[1]}{after}", encoding="utf-8")
    elif not args.features:
        print(tables(study))


if __name__ == "__main__":
    main()
