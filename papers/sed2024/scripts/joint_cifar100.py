# A record, not run at HEAD. It ran at commit 1a05f560c86f: `git checkout 1a05f560c86f`, then `python studies/joint_cifar100.py`.
"""Do joint methods help? Five heads on one ImageNet backbone: CIFAR-100, corruptions, and OOD samples.

    python studies/joint_cifar100.py runs/joint              # about 40 minutes on one core; again to continue
    python studies/joint_cifar100.py runs/joint --features   # only the features of the backbone: the first half of it
    python studies/joint_cifar100.py runs/joint --table      # the tables of the results so far, as Markdown
    python studies/joint_cifar100.py runs/joint --json       # the same as JSON
    python studies/joint_cifar100.py runs/joint --results studies/results/joint_cifar100.json   # write a results file
    python studies/joint_cifar100.py studies/results/joint_cifar100.json --table    # the tables of a results file

The backbone is timm's tf_efficientnet_lite0, trained on ImageNet: Tiny-ImageNet has classes that CIFAR-100 lacks, but
they are not new to the backbone. Images of 32 px are resized to 128 px; each passes through the backbone once. Members
are MLPs on its 1280 features, trained on the first 20,000 images. The last 2,000 test images are held out of OOD
detection: lambda of SED and the method for BMA are selected on them and on corrupted versions of the first 200 of
them. SED trains two of five heads per step, so it has 2.5 times the epochs: every head makes as many steps as in the
other methods. The evidence for claim 9 is written to `evidence/` in the study folder.
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
from _joint_results import BASE, HELD_OUT, HELD_OUT_KEY, LAMBDAS, OUT, Found, Numbers, comparisons, evidence, markdown
from _results import read_numbers, write_numbers
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

import plateaux
from plateaux.config.builders.data import build_data
from plateaux.config.builders.model import build_backbone
from plateaux.core import registry
from plateaux.core.runtime import configure_runtime
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
from plateaux.studies.claims.claim import write_evidence

STUDY = "joint_cifar100"
# Classes of Tiny-ImageNet that CIFAR-100 also has, by another name or as a kind of one of its classes.
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
SEVERITIES = (1, 2, 3, 4, 5)
SELECTION_SEVERITIES = (1, 5)


class Study:
    """All runs below one folder, and their numbers."""

    def __init__(self, root: Path, *, quick: bool, repetitions: int, pixels: int) -> None:
        self.root, self.quick, self.repetitions, self.pixels = root, quick, repetitions, pixels
        self.store = LocalStore(root)
        self.recipe = recipe_for(CONDITIONS[BASE], 0, root, quick=quick, pixels=pixels)

    def run(self) -> None:
        """Train and measure what is missing: one repetition of all methods before the second."""
        self.prepare()
        for repetition in range(self.repetitions):
            for name, condition in CONDITIONS.items():
                if HELD_OUT_KEY not in self.results().get(f"{name}/{repetition}", {}):
                    self._run_one(name, condition, repetition)

    def prepare(self) -> None:
        """Compute the features of all images that have none yet."""
        self.data = build_data(self.recipe)
        self.first_held_out = len(self.data.test) * 4 // 5
        self.unlabeled, self.others = foreign(50 if self.quick else 1000)
        self.backbone = build_backbone(self.recipe, self.data)
        train = through_backbone(self.recipe, self.data, self.data.train, self.backbone)
        unlabeled = through_backbone(self.recipe, self.data, self.unlabeled, self.backbone)
        self.tested, self.held_out = dict(self._test_sets()), dict(self._held_out_sets())
        for name, source in {"train": train, "unlabeled": unlabeled, **self.tested, **self.held_out}.items():
            count = prepare_features([source], SINGLE_PROCESS)
            if count:
                print(f"{name}: {len(source):,} samples, {count:,} passed through the backbone", flush=True)

    def _test_sets(self) -> Iterator[tuple[str, FeatureSource]]:
        """Yield the sets that results are reported on, by name."""
        first, few = (20, 50) if self.quick else (200, 1000)
        yield "test", self._features(self.data.test, len(self.data.test))
        yield "out: Tiny-ImageNet", self._features(self.others, few if self.quick else len(self.others))
        names = {"CIFAR-10": "cifar10", "textures": "textures32", "MNIST": "mnist", "Fashion-MNIST": "fashion_mnist"}
        for title, name in names.items():
            yield f"out: {title}", self._features(ResizedSource(registry.dataset.get(name)().test, (3, 32, 32)), few)
        for kind in self._kinds():
            for severity in SEVERITIES:
                yield f"{kind} {severity}", self._features(Corrupted(self.data.test, kind, severity), first)

    def _held_out_sets(self) -> Iterator[tuple[str, FeatureSource]]:
        """Yield corrupted versions of the first held-out images."""
        count = 10 if self.quick else 200
        x, y = self.data.test.fetch(torch.arange(self.first_held_out, self.first_held_out + count))
        assert isinstance(x, Tensor)
        for kind in self._kinds():
            for severity in SELECTION_SEVERITIES:
                source = Corrupted(InMemorySource(x, y), kind, severity)
                yield f"{HELD_OUT} {kind} {severity}", self._features(source, count)

    def _kinds(self) -> Sequence[str]:
        return CORRUPTIONS[:2] if self.quick else CORRUPTIONS

    def _features(self, source: Source, count: int) -> FeatureSource:
        ids = torch.arange(min(count, len(source)))
        return through_backbone(self.recipe, self.data, source, self.backbone, ids=ids)

    def _run_one(self, name: str, condition: Mapping[str, Any], repetition: int) -> None:
        folder = self.root / "runs" / f"{name.replace(' ', '_')}-{repetition}"
        recipe = recipe_for(condition, repetition, self.root, quick=self.quick, pixels=self.pixels)
        run = plateaux.train(recipe, folder, unlabeled=self.unlabeled)
        found = self.results().get(f"{name}/{repetition}", {})
        heads = [member.head for member in plateaux.load(folder).members]
        logits = self._logits(heads)
        if not found:  # otherwise measured by an earlier version, which had no held-out images
            found = {
                **self._accuracies(heads, logits),
                "seconds of training": sum(p.seconds for p in run.all_progress()),
            }
        found = {**found, **self._detection(logits)}
        self.store.put_json("results.json", {**self.results(), f"{name}/{repetition}": found}, has_digest=False)
        print(f"{name} #{repetition}: " + ", ".join(f"{k} {found[k]:.3f}" for k in list(found)[:4]), flush=True)

    @torch.no_grad()
    def _logits(self, heads: Sequence[Module]) -> dict[str, Tensor]:
        """Return the logits of all members on all sets, by the name of the set."""
        sets = {**self.tested, **self.held_out}
        features = {name: source.fetch(torch.arange(len(source)))[0] for name, source in sets.items()}
        return {name: torch.stack([head(x) for head in heads]) for name, x in features.items()}

    @torch.no_grad()
    def _accuracies(self, heads: Sequence[Module], logits: Mapping[str, Tensor]) -> Numbers:
        """Return accuracy and diversity on test images and corrupted test images."""
        soup = uniform([head.state_dict() for head in heads])

        def measure(name: str, title: str) -> Numbers:
            source = self.tested[name]
            x, y = source.fetch(torch.arange(len(source)))
            return accuracy_and_diversity(title, logits[name], functional_call(heads[0], soup, x), y)

        found = measure("test", "test")
        for severity in SEVERITIES:
            each = [measure(f"{kind} {severity}", f"C-{severity}") for kind in self._kinds()]
            found |= {key: sum(one[key] for one in each) / len(each) for key in each[0]}
        return found

    @torch.no_grad()
    def _detection(self, logits: Mapping[str, Tensor]) -> Numbers:
        """Return the AUROC of both scores on all sets, and diversity on those that are out of distribution."""
        inside, held_out = logits["test"].tensor_split([self.first_held_out], dim=1)
        found: Numbers = {}
        out = {name: logits[f"out: {name}"] for name in OUT}
        out |= {f"C-{severity}": self._corrupted(logits, severity) for severity in (1, 5)}
        for name, outside in out.items():
            found |= {f"AUROC {score}, {name}": v for score, v in aurocs(inside, outside).items()}
            found[f"#unique, {name}"], found[f"PDS, {name}"] = unique(outside), float(OOD_SCORES["pds"](outside).mean())
        for size in range(2, len(inside) + 1):
            subsets = [list(some) for some in combinations(range(len(inside)), size)]
            values = [aurocs(inside[some], out["C-1"][some])["PDS"] for some in subsets]
            found[f"AUROC PDS of {size}, C-1"] = sum(values) / len(values)
        each = [
            aurocs(held_out, self._corrupted(logits, severity, f"{HELD_OUT} ")) for severity in SELECTION_SEVERITIES
        ]
        return found | {f"AUROC {score}, {HELD_OUT}": sum(one[score] for one in each) / len(each) for score in each[0]}

    def _corrupted(self, logits: Mapping[str, Tensor], severity: int, prefix: str = "") -> Tensor:
        return torch.cat([logits[f"{prefix}{kind} {severity}"] for kind in self._kinds()], 1)

    def results(self) -> dict[str, Numbers]:
        if not self.store.has("results.json"):
            return {}
        found: dict[str, Numbers] = self.store.get_json("results.json", has_digest=False)
        return found


def accuracy_and_diversity(name: str, members: Tensor, soup: Tensor, y: Tensor) -> Numbers:
    """Return accuracy and diversity of five heads and their soup, from their logits."""
    classes = members.argmax(-1)
    single = (classes == y).float().mean(1)
    pairs = [float((a != b).float().mean()) for a, b in combinations(classes, 2)]
    return {
        f"accuracy of the prediction ensemble, {name}": float((members.mean(0).argmax(-1) == y).float().mean()),
        f"accuracy of the uniform soup, {name}": float((soup.argmax(-1) == y).float().mean()),
        f"accuracy of the oracle, {name}": float(single.max()),
        f"accuracy of a member, {name}": float(single.mean()),
        f"#unique, {name}": unique(members),
        f"PDS, {name}": float(OOD_SCORES["pds"](members).mean()),
        f"disagreement, {name}": sum(pairs) / len(pairs),
    }


def unique(logits: Tensor) -> float:
    """Return the mean number of distinct predictions."""
    classes = logits.argmax(-1).sort(0).values
    return 1 + float((classes[1:] != classes[:-1]).float().sum(0).mean())


def aurocs(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """Return the AUROC of two scores: one minus the largest mean probability (BMA), and PDS."""
    scores = {"BMA": OOD_SCORES["max_probability"], "PDS": OOD_SCORES["pds"]}
    found = compare(*({n: score(t).numpy() for n, score in scores.items()} for t in (inside, outside)))
    return {name: each["auroc"].value for name, each in found.items()}


def foreign(count: int) -> tuple[InMemorySource, InMemorySource]:
    """Return Tiny-ImageNet images of classes that CIFAR-100 lacks: `count` for training, the others for tests."""
    made = registry.dataset.get("tinyimagenet32")()
    allowed = torch.tensor([name not in ALSO_IN_CIFAR100 for name in made.labels])
    ids = allowed[made.test.y].nonzero().flatten()
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(derive_seed("foreign")))]
    x, y = made.test.fetch(ids)
    return InMemorySource(x[:count].clone(), y[:count].clone()), InMemorySource(x[count:].clone(), y[count:].clone())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the study folder, or a results file with --table or --json")
    parser.add_argument("--quick", action="store_true", help="a few images, one epoch, 32 px: to see that it runs")
    parser.add_argument("--pixels", type=int, default=128, help="the size of images before the backbone")
    parser.add_argument("--features", action="store_true", help="only compute the features of the backbone")
    parser.add_argument("--table", action="store_true", help="only print the results so far")
    parser.add_argument("--json", action="store_true", help="only print the results so far, as JSON")
    parser.add_argument("--results", type=Path, help="only write the results so far to this file")
    args = parser.parse_args()
    configure_runtime(threads=1)
    warnings.filterwarnings("ignore", message="Not loaded from")
    warnings.filterwarnings("ignore", message=".*looks at no unlabelled")
    if args.root.is_file():
        show(Found(read_numbers(args.root, STUDY)), as_json=args.json)
        return
    few, pixels = (1, 32) if args.quick else (3, args.pixels)
    study = Study(args.root, quick=args.quick, repetitions=few, pixels=pixels)
    if args.features:
        study.prepare()
        return
    if not (args.table or args.json or args.results):
        study.run()
        write_evidence(evidence(Found(study.results())), args.root / "evidence")
    if args.results:
        command = "python studies/joint_cifar100.py runs/joint"
        write_numbers(args.results, study=STUDY, command=command, numbers=study.results())
        return
    show(Found(study.results()), as_json=args.json)


def show(found: Found, *, as_json: bool) -> None:
    print(json.dumps({"numbers": found.runs, "comparisons": comparisons(found)}) if as_json else markdown(found))


if __name__ == "__main__":
    main()
