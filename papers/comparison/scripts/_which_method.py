# A record, not run at HEAD. A part of the scripts of commit a9af4e490407: `git checkout a9af4e490407`, studies/_which_method.py.
"""Tables of *Which method should I use?*: all methods in one setting, and their differences in all other studies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import joint_cifar100
from _method_tables import (
    ACCURACY,
    CORRUPTED,
    ECE,
    ENSEMBLE,
    MEMBERS,
    NLL,
    TOGETHER,
    Column,
    Condition,
    Measured,
    Numbers,
    auroc,
    format_interval,
    table,
)
from _results import read_numbers

from plateaux.core.stats.intervals import Interval
from plateaux.storage.local_store import LocalStore
from plateaux.studies.claims.contrasts import ResultLike
from plateaux.studies.results import read_results, results_from_study

PLAIN = {"method": "deep ensemble"}
OOD = Column("OOD AUROC", "ood", "all", ENSEMBLE)
TRAINING = Column("passes", "total passes", "training", "all", times=1, digits=0, higher_is_better=None)
SOUP = "uniform soup of the deep ensemble"
OOD_SCORES = {"max_probability": "largest probability", "mutual_information": "mutual information"}
OOD_SETS = {"mnist": "MNIST", "notmnist": "notMNIST"}
DETECTION = [auroc(f"{of}, {by}", name, score) for score, by in OOD_SCORES.items() for name, of in OOD_SETS.items()]
# Severities 1, 3 and 5 of noise would not be comparable between studies: each has its own definition of corrupted.
JOINT_OOD = ("Tiny-ImageNet", "CIFAR-10", "textures", "MNIST", "Fashion-MNIST")


@dataclass(frozen=True, slots=True)
class OtherStudy:
    """The methods of a study, compared with its deep ensemble."""

    title: str
    page: str
    results: Sequence[ResultLike]
    baseline: Condition
    methods: Mapping[str, Condition]


def tables(file: Path) -> dict[str, str]:
    """Return the tables of the page, from all results files in the folder of this one."""
    folder = file.parent
    numbers, methods = _one_setting(file)
    shared = _shared_repetitions(numbers, methods)
    columns = [ACCURACY, NLL, ECE, CORRUPTED]
    detecting = {label: each for label, each in methods.items() if label != SOUP}  # soups were not measured
    return {
        "means": table(shared, methods, [*columns, TRAINING]),
        "differences": table(numbers, methods, columns, PLAIN),
        "ood": table(shared, detecting, DETECTION),
        "ood-differences": table(numbers, detecting, DETECTION, PLAIN),
        "others": _others([*_grid_studies(folder), _joint(folder), _sharpbalance(folder)]),
    }


def robustness_and_cost(file: Path) -> list[tuple[str, Interval, float]]:
    """Return every method but the soup, which is far below, with accuracy under corruption and passes to train."""
    numbers, methods = _one_setting(file)
    del methods[SOUP]
    numbers = _shared_repetitions(numbers, methods)
    found = {label: (numbers.mean(each, CORRUPTED), numbers.mean(each, TRAINING)) for label, each in methods.items()}
    return [(label, accuracy, passes.value) for label, (accuracy, passes) in found.items() if accuracy and passes]


def _one_setting(file: Path) -> tuple[Numbers, dict[str, Condition]]:
    """Return the numbers of the test and of the further methods, which share setting and seeds, and their methods."""
    folder = file.parent
    numbers = Numbers(_with_costs([*results_from_study(folder / "sharpbalance_test.json"), *_further(file)]))
    return numbers, {label: each for label, each in _methods(folder).items() if numbers.mean(each, ACCURACY)}


def _shared_repetitions(numbers: Numbers, methods: Mapping[str, Condition]) -> Numbers:
    """Return the numbers of the repetitions that all methods have: means over others cannot be compared."""
    own = [numbers.by_repetition(each, ACCURACY).keys() for each in methods.values()]
    return numbers.only(set.intersection(*map(set, own)))


def _methods(folder: Path) -> dict[str, Condition]:
    """Return the methods of the main table with the settings that were chosen for them."""
    study = read_results(folder / "sharpbalance_test.json")["study"]
    sam_rho = study["base"]["method"]["rho"]
    rules = {"paper": "SharpBalance, paper's rule", "released": "SharpBalance, released rule"}
    balanced = {}
    for rule, label in rules.items():
        radii = study["grid"]["method"][rule]["each"]["method.rho"]
        own = [rho for rho in radii if rho != sam_rho] or radii
        balanced[label] = {"method": rule, "rho": own[0]}
    return {
        "deep ensemble": PLAIN,
        "deep ensemble, 80 epochs": {"method": "deep ensemble, 80 epochs"},
        "deep ensemble, 6 members": {"method": "deep ensemble, 6 members"},
        "SAM": {"method": "SAM"},
        "ASAM": {"method": "ASAM"},
        "GSAM": {"method": "GSAM"},
        **balanced,
        "SED": {"method": "SED"},
        "bagging": {"method": "bagging"},
        "snapshots": {"method": "snapshots"},
        SOUP: {"method": SOUP},
        "one network, 120 epochs": {"method": "one network, 120 epochs"},
        "one network, three times the weights": {"method": "one network, three times the weights"},
    }


def _further(file: Path) -> Iterator[ResultLike]:
    """Yield the results of further methods; those of the deep ensemble are in the test, its soup is a method."""
    for each in results_from_study(file):
        if str(each.condition["method"]).startswith("one network"):
            yield _as_ensemble(each)
        elif each.condition["method"] != "deep ensemble":
            yield each
        elif each.metric.startswith("accuracy of the soup"):
            row = str(each.row).replace("uniform soup", ENSEMBLE)
            metric = each.metric.replace(" of the soup", "")
            yield Measured({"method": SOUP}, each.repetition, metric, each.split, row, each.value)


def _as_ensemble(each: ResultLike) -> Measured:
    """Return a result of a single network under the name that the row of an ensemble has."""
    row = str(each.row).replace(MEMBERS, ENSEMBLE, 1)
    if each.metric == "ood" and "mutual_information" not in row:  # which is zero for one network
        row = row.replace("member 0 ·", f"{TOGETHER} ·", 1)
    return Measured(each.condition, each.repetition, each.metric, each.split, row, each.value)


def _with_costs(results: Sequence[ResultLike]) -> list[ResultLike]:
    """Add the passes of all members of every run; a soup costs what its members cost."""
    totals: dict[tuple[str, int], float] = {}
    conditions: dict[str, Condition] = {}
    for each in results:
        if each.metric == "passes" and str(each.row).startswith("member "):
            key = repr(sorted(each.condition.items()))
            conditions[key] = each.condition
            totals[key, each.repetition] = totals.get((key, each.repetition), 0.0) + each.value
    where = ("total passes", "training", "all")
    found = [Measured(conditions[key], number, *where, total) for (key, number), total in totals.items()]
    soups = [replace(each, condition={"method": SOUP}) for each in found if dict(each.condition) == PLAIN]
    return [*results, *found, *soups]


def _others(studies: Iterable[OtherStudy]) -> str:
    """Return the differences of all methods of other studies from the deep ensemble of the same study."""
    columns = [ACCURACY, NLL, CORRUPTED, OOD]
    head = ["study", "method", *(each.title for each in columns), "passes"]
    lines = [f"| {' | '.join(head)} |", f"|---|---|{'---:|' * (len(head) - 2)}"]
    for study in studies:
        numbers = Numbers(study.results)
        for position, (label, condition) in enumerate(study.methods.items()):
            cells = []
            for column in columns:
                found = numbers.difference(condition, study.baseline, column)
                text = "" if found is None else format_interval(found, column, sign="+")
                cells.append(f"**{text}**" if found is not None and found.excludes_zero else text)
            name = f"[{study.title}]({study.page})" if position == 0 else ""
            lines.append(f"| {' | '.join([name, label, *cells, _relative_cost(numbers, condition, study)])} |")
    return "\n".join(lines)


def _relative_cost(numbers: Numbers, condition: Condition, study: OtherStudy) -> str:
    column = Column("", "passes", "training", "mean of members", times=1)
    ours, theirs = numbers.mean(condition, column), numbers.mean(study.baseline, column)
    return "" if ours is None or theirs is None else f"{ours.value / theirs.value:.1f} x"


def _grid_studies(folder: Path) -> Iterator[OtherStudy]:
    results = results_from_study(folder / "flat_and_diverse.json")
    for width in (8, 16):
        sam = {f"SAM, rho = {rho}": {"width": width, "method": "SAM", "rho": rho} for rho in (0.1, 0.2)}
        rules = ("SharpBalance, paper", "SharpBalance, released")
        balanced = {f"{rule}, rho = 0.1": {"width": width, "method": rule, "rho": 0.1} for rule in rules}
        title = f"CIFAR-10, 1,000 images, resnet8 of width {width}"
        base = {"width": width, "method": "SAM", "rho": 0.0}
        yield OtherStudy(title, "flat-and-diverse.md", results, base, {**sam, **balanced})
    lora = results_from_study(folder / "lora_mrpc.json")
    methods = {name: {"method": name} for name in ("SAM", "SharpBalance")}
    yield OtherStudy("LoRA adapters, MRPC", "lora-mrpc.md", lora, PLAIN, methods)


def _joint(folder: Path) -> OtherStudy:
    """Return the heads on one backbone; they were not measured in passes."""
    stored = read_numbers(folder / "joint_cifar100.json", joint_cifar100.STUDY)
    results: list[ResultLike] = []
    methods: dict[str, Condition] = {}
    for name, values in stored.items():
        method, _, repetition = name.rpartition("/")
        condition = {"method": method}
        methods[method] = condition
        prefix = "accuracy of the prediction ensemble, "
        corrupted = mean(values[f"{prefix}C-{severity}"] for severity in range(1, 6))
        detected = mean(values[f"AUROC BMA, {each}"] for each in JOINT_OOD)
        for column, value in ((ACCURACY, values[f"{prefix}test"]), (CORRUPTED, corrupted), (OOD, detected)):
            results.append(Measured(condition, int(repetition), column.metric, column.split, column.row, value))
    methods.pop("deep ensemble")
    title = "CIFAR-100, five heads on an EfficientNet"
    return OtherStudy(title, "joint-cifar100.md", results, PLAIN, methods)


def _sharpbalance(folder: Path) -> OtherStudy:
    store = LocalStore(folder / "sharpbalance_cifar10")
    stored: Mapping[str, Any] = store.get_json("results.json", has_digest=False)
    results: list[ResultLike] = []
    methods: dict[str, Condition] = {}
    for name, values in stored.items():
        method, _, repetition = name.rpartition("/")
        if method == "rho":
            continue
        condition = {"method": method}
        methods[method] = condition
        accuracy = {float(noise): value / 100 for noise, value in values["accuracies"]["ensemble"].items()}
        noisy = mean(value for noise, value in accuracy.items() if noise)
        where = {ACCURACY: accuracy[0.0], CORRUPTED: noisy}
        found = [(each.metric, each.split, each.row, value) for each, value in where.items()]
        found.append(("passes", "training", "mean of members", values["passes"]))
        results += [Measured(condition, int(repetition), *each) for each in found]
    methods.pop("deep ensemble")
    order = sorted(methods, key=lambda method: (method != "SAM", method))
    title = "CIFAR-10, 20,000 images, resnet8 of width 16; noise"
    return OtherStudy(title, "sharpbalance-cifar10.md", results, PLAIN, {each: methods[each] for each in order})
