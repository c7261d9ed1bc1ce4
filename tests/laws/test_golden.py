"""Golden numbers: what tiny recipes compute must stay the same when the code around them is renamed or moved.

The numbers are projections of float64 results on one thread, stored without names. Write them again, after a change
that is meant to alter them, with `PLATEAUX_GOLDEN=write pytest tests/laws/test_golden.py`, and say so in the changelog.
"""

from __future__ import annotations

import ast
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import GIVEN, recipe

import plateaux
from plateaux.config.recipe import Recipe
from plateaux.core.types import TensorTree
from plateaux.data.corruptions.corrupt import CORRUPTIONS, EXTRA, corrupt
from plateaux.evaluation.evaluate import evaluate
from plateaux.loss_landscape.probe import get_probes
from plateaux.loss_landscape.run_probes import probe_landscape
from plateaux.prediction.calibration import calibrate, evaluate_calibration
from plateaux.storage.run import Run, sam_set_path, sharpness_path
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study
from plateaux.training.train import train

FILE = Path(__file__).with_name("golden.json")
IMAGES = {"data": {"crop": 1, "flip": True, "mixup": 0.4}}
SEARCH = {
    "optimizer": {"lr": {"low": 0.01, "high": 0.3, "log": True}, "max_grad_norm": {"low": 0.5, "high": 2.0}},
    "method": {"rho": {"low": 0.02, "high": 0.2}},
}
BALANCED = {"name": "sharpbalance", "rho": 0.2, "partition_epoch": 2}

# Stable label -> the row of cases.METHODS; the labels name what is stored, so only the rows may be renamed.
ROWS = {
    "deep ensemble": "deep_ensemble",
    "SAM": "sam",
    "SAM, m-sharpness": "sam in groups",
    "SAM, one radius a member": "sam, a radius each",
    "SAM, one perturbation a worker": "sam per worker",
    "ASAM": "asam",
    "ASAM, elementwise": "asam elementwise",
    "GSAM": "gsam",
    "GSAM, elementwise": "gsam elementwise",
    "SharpBalance": "sharpbalance",
    "SharpBalance, GSAM": "sharpbalance by gsam",
    "A2D": "a2d",
    "A2D, sequential": "a2d, sequential",
    "A2D, SAM on labeled samples": "a2d on labelled, climbing",
    "DivDis": "divdis",
    "SED": "sed",
    "SED, SAM": "sed, climbing",
    "snapshot": "snapshot",
    "own joint method": "apart",
    "own joint method, SAM": "apart, climbing",
    "own whole-batch method": "balanced",
    "own whole-batch method, SAM": "balanced, climbing",
}

# Stable label -> (method row, net, changes of the recipe): everything that draws or trains in its own way.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{label: (row, "mlp", {}) for label, row in ROWS.items()},
    "convolutions with BatchNorm": ("sam", "conv_bn", {}),
    "dropout": ("sam", "dropout", {}),
    "LoRA": ("deep_ensemble", "adapted", {}),
    "augmented images": ("deep_ensemble", "conv", IMAGES),
    "CutMix": ("deep_ensemble", "conv", {"data": {"cutmix": 1.0}}),
    "bootstrap": ("deep_ensemble", "mlp", {"data": {"bootstrap": 1.0}}),
    "validation": ("sam", "mlp", {"data": {"validation_split": 4}, "train": {"select": "best:nll", "epochs": 3}}),
    "averaged weights": ("sam", "conv_bn", {"train": {"swa_start": 1, "epochs": 3}}),
    "search": ("sam", "mlp", {"search": SEARCH}),
    "search of SharpBalance": ("sharpbalance", "mlp", {"search": {"method": {"rho": [0.05, 0.1, 0.2]}}}),
    "shared order": ("sam", "mlp", {"data": {"shuffle": "shared"}}),
    "backbone": ("sam", "conv", {"model": {"backbone": "0", "head": "linear"}}),
    "frozen": ("deep_ensemble", "mlp", {"model": {"freeze": ["1"]}}),
    "pruned": ("sam", "mlp", {"model": {"hidden_sizes": [6, 6], "sparsity": 0.5}}),
    "pruned convolutions": ("sharpbalance", "conv_bn", {"model": {"channels": [3, 4, 5], "sparsity": 0.6}}),
}
RULES = ("paper", "released", "released_boost", "random", "same", "all", "none")


@pytest.fixture(scope="module")
def golden() -> Mapping[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def same(golden: Mapping[str, Any], name: str, found: Any, *, rel: float = 1e-9) -> None:
    """Compare with what is stored under `name`; write it where that was asked for."""
    if os.environ.get("PLATEAUX_GOLDEN") == "write":
        whole = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        FILE.write_text(json.dumps({**whole, name: found}, indent=0, sort_keys=True) + "\n", encoding="utf-8")
        return
    wanted = golden[name]
    if isinstance(found, list) and all(isinstance(each, float) for each in found):
        assert len(found) == len(wanted)
        np.testing.assert_allclose(found, wanted, rtol=rel, atol=1e-9)
    else:
        assert found == wanted


def projections(values: torch.Tensor) -> list[float]:
    flat = values.double().flatten()
    at = torch.arange(1, len(flat) + 1, dtype=torch.float64)
    return [float(flat.sum()), float(flat @ torch.cos(at)), float(flat @ torch.sin(0.7 * at))]


def of_weights(tree: TensorTree) -> list[float]:
    return projections(torch.cat([tree[name].double().flatten() for name in sorted(tree)]))


def trained(row: Recipe, out: Path) -> Run:
    return train(row, out, **GIVEN.keywords())


@pytest.mark.parametrize("label", CASES)
def test_final_weights_equal_the_golden_values(label: str, golden: Mapping[str, Any], tmp_path: Path) -> None:
    method, net, changes = CASES[label]
    run = trained(recipe(method, net, precision="fp64", **changes), tmp_path / "run")
    found = [number for member in range(3) for number in of_weights(run.weights(member))]
    same(golden, f"weights, {label}", found)


@pytest.mark.parametrize("rule", RULES)
def test_scores_and_sam_sets_equal_the_golden_values(rule: str, golden: Mapping[str, Any], tmp_path: Path) -> None:
    method = {**BALANCED, "rule": rule, "repartition_every": 1}
    row = recipe("deep_ensemble", "mlp", method=method, train={"epochs": 4}, precision="fp64", samples=40)
    run = trained(row, tmp_path / "run")
    scores, sets = [], []
    for epoch in (2, 3):
        for member in range(3):
            scores += projections(torch.from_numpy(np.array(run.store.get_array(sharpness_path(epoch, member))[1])))
            sets.append(bytes(run.store.get_array(sam_set_path(epoch, member))[1]).hex())
    same(golden, f"scores, {rule}", scores, rel=1e-6)  # they are stored in float32
    same(golden, f"sets, {rule}", sets)
    same(golden, f"weights, {rule}", [number for member in range(3) for number in of_weights(run.weights(member))])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    data = {"validation_split": 16, "test_samples": 40}
    row = recipe("sam", "mlp", precision="fp64", samples=60, data=data, train={"epochs": 3})
    return trained(row, tmp_path_factory.mktemp("golden") / "run")


def numbers(found: Sequence[Any]) -> list[float]:
    """Return the values and errors of measurements, sorted: their names and their order do not count."""
    rows = [row for each in found for row in each.to_dict()["rows"].values()]
    values = [value for row in rows for value in row.values()]
    return sorted(float(value) for value in values if isinstance(value, float) and math.isfinite(value))


def test_an_evaluation_equals_the_golden_values(golden: Mapping[str, Any], run: Run) -> None:
    root = run.store.root
    same(
        golden,
        "evaluation",
        numbers(evaluate(plateaux.Run.open(root, GIVEN), metrics=["all"], ensemble_sizes=True)),
    )


SMALLEST = {"kind": "aps", "allow_empty": True}


def test_a_calibration_equals_the_golden_values(golden: Mapping[str, Any], run: Run) -> None:
    root = run.store.root
    evaluate(plateaux.Run.open(root, GIVEN))  # its float32 logits are what is calibrated
    calibrate(plateaux.Run.open(root, GIVEN), fraction=0.75, bound="none", conformal=SMALLEST)
    same(golden, "calibration", numbers(evaluate_calibration(plateaux.Run.open(root, GIVEN))))


def test_probes_and_landscapes_equal_the_golden_values(golden: Mapping[str, Any], run: Run) -> None:
    # The stored numbers of SAM-sharpness are those of the paper's form.
    probes = [name if name != "sam_sharpness" else "sam_sharpness(form=paper)" for name in get_probes(["all"])]
    same(
        golden,
        "landscape",
        numbers(probe_landscape(plateaux.open_run(run, trust=GIVEN.trust), probes=probes, limit=20)),
        rel=1e-6,
    )


def test_a_study_equals_the_golden_values(golden: Mapping[str, Any], tmp_path: Path) -> None:
    base = recipe("sam", "mlp", precision="fp64", train={"epochs": 3}).to_dict()
    ways = {"plain": {"method": {"rho": 0.0}}, "sam": {}, "paper": {"method": BALANCED}}
    asked = {"base": base, "grid": {"method": ways}, "repetitions": 2, "evaluate": {"metrics": ["accuracy", "nll"]}}
    results = StudyRunner(Study.from_dict(asked), tmp_path).run()
    found = [row for run in results["runs"].values() for each in run["metrics"] for row in each["rows"].values()]
    values = sorted(float(v) for row in found for v in row.values() if isinstance(v, float) and math.isfinite(v))
    same(golden, "study", values)


def test_corrupted_images_equal_the_golden_values(golden: Mapping[str, Any]) -> None:
    pytest.importorskip("scipy")
    images = torch.arange(2 * 3 * 32 * 32).remainder(251).to(torch.uint8).view(2, 3, 32, 32)
    found = [corrupt(images, torch.tensor([3, 11]), name, 3) for name in (*CORRUPTIONS, *EXTRA)]
    # Their means: libraries of other versions round some pixels another way.
    same(golden, "corruptions", [float(each.double().mean()) for each in found], rel=1e-3)


SEED_LABELS = {
    *(
        "adapters",
        "arrays",
        "augment",
        "average_",
        "bag",
        "calibrate",
        "cascade",
        "check",
        "conformal",
        "corruption",
        "digits",
    ),
    *(
        "evaluation",
        "features",
        "feed",
        "generated",
        "fingerprint",
        "forward",
        "from",
        "init",
        "input_curvature",
        "label noise",
        "landscape",
        "meeting",
    ),
    *("ood", "order", "pass", "present", "random", "relative_flatness", "sam_sharpness", "same", "sampled ids"),
    *("search", "shared", "slice", "spectrum", "statistics", "unlabelled", "validation", "worst_"),
}
SEEDING = {"derive_seed", "generator", "_random_vectors"}  # the functions whose strings are parts of a seed


def seed_labels(source: str) -> set[str]:
    """Return the string constants that a source passes to a function that derives a seed."""
    found: set[str] = set()
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in SEEDING:
            inside = [node for argument in call.args for node in ast.walk(argument)]
            found |= {node.value for node in inside if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return found - {" sketch"}


def test_the_labels_that_seeds_are_derived_from_have_not_changed() -> None:
    """A label is part of a hash: to rename one changes every number, and nothing else would say so."""
    sources = Path(plateaux.__file__).parent.rglob("*.py")
    assert set().union(*(seed_labels(path.read_text(encoding="utf-8")) for path in sources)) == SEED_LABELS


def test_a_seed_label_is_found_in_any_kind_of_call() -> None:
    assert seed_labels('f(derive_seed(1, "a"), x.generator(f"b{n}", 2), other("c"))') == {"a", "b"}
