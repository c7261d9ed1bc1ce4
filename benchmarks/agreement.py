"""Agreement of a run with its bundle, ONNX and .pt2, on real samples: probabilities, and every decision.

| part | ensemble | samples |
|---|---|---|
| resnets | published ResNets of depth 20, 32, 44, 56, and a fifth that was trained briefly | 2,000 CIFAR-10 images |
| vit | three ViT-tiny of timm at 32 x 32 pixels, trained briefly | 2,000 CIFAR-10 images |
| heads | 200 linear heads over one published resnet20 | 2,000 CIFAR-10 images |
| mrpc | two LoRA adapters over MiniLM | MRPC's 1,725 test pairs |

Every run is calibrated on test samples, so that sets and abstentions vary. The quick form uses two small networks on
digits. The other parts need CIFAR-10, MRPC, and the weights in PLATEAUX_DATA.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import Results, at_most, flag_parser, selected

import plateaux
from plateaux.config.builders.data import build_data
from plateaux.deploy.agreement import Agreement, compare_answers
from plateaux.deploy.inputs import PreparedInputs, prepare
from plateaux.deploy.predictor import MAX_BATCH, Predictor

PARTS = ("resnets", "vit", "heads", "mrpc")
DEPTHS = (20, 32, 44, 56)
CIFAR = {"name": "cifar10", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "limit": 1000}
RISKS = {
    "resnets": 0.02,
    "vit": 0.8,
    "heads": 0.05,
    "mrpc": 0.35,
    "digits": 0.3,
}  # so that some answers are abstentions
IMAGES = 2000
WEIGHTS = "weights/resnet20_32_44_56_cifar10.safetensors"


def train(folder: Path, name: str, **sections: Any) -> plateaux.Run:
    recipe = {"train": {"epochs": 1}, "optimizer": {"lr": 0.05, "momentum": 0.9}, **sections}
    return plateaux.train(plateaux.Recipe.from_dict(recipe), folder / name)


def resnets(folder: Path) -> plateaux.Run:
    data = {**CIFAR, "test_limit": IMAGES}
    fifth = train(folder, "fifth", members=1, data=data, model={"name": "resnet20"})
    file = Path(os.environ.get("PLATEAUX_DATA", "data")) / WEIGHTS
    recipe = {"members": 5, "data": data, "model": {"name": [f"resnet{depth}" for depth in (*DEPTHS, 20)]}}
    weights = [f"{file}:resnet{depth}." for depth in DEPTHS]
    last = str(Path(str(fifth)) / "members" / "0" / "weights.safetensors")
    return plateaux.import_weights(folder / "run", plateaux.Recipe.from_dict(recipe), [*weights, last])


def vit(folder: Path) -> plateaux.Run:
    data = {**CIFAR, "test_limit": IMAGES}
    adam = {"name": "AdamW", "lr": 1e-3}
    return train(folder, "run", members=3, data=data, model={"name": "timm:vit_tiny_patch16_224"}, optimizer=adam)


def heads(folder: Path) -> plateaux.Run:
    model = {
        "name": "resnet20", "weights": WEIGHTS, "weights_prefix": "resnet20.", "strict": False,
        "backbone": "features", "head": "linear", "cache_features": True,
    }  # fmt: skip
    run = {"feature_cache": str(folder / "features")}
    return train(folder, "run", members=200, data={**CIFAR, "test_limit": IMAGES}, model=model, run=run)


def mrpc(folder: Path) -> plateaux.Run:
    recipe = plateaux.Recipe.load(
        "mrpc_lora", ["members=2", "train.epochs=1", "data.limit=1000", 'method={name="deep_ensemble"}']
    )
    return plateaux.train(recipe, folder / "run")


def digits(folder: Path) -> plateaux.Run:
    model = {"name": "resnet8", "width": 4}
    return train(folder, "run", members=2, data={"name": "digits", "batch_size": 64}, model=model)


def compare(predictor: Predictor, other: Predictor, inputs: PreparedInputs, calibration: Any, name: str) -> Agreement:
    """Compare all answers of two predictors, batch by batch."""
    total = Agreement()
    for start in range(0, len(inputs), MAX_BATCH):
        batch = {key: values[start : start + MAX_BATCH] for key, values in inputs.arrays.items()}
        total += compare_answers(predictor.backend(batch), other.backend(batch), calibration, name)
    return total


def measure(results: Results, part: str, run: plateaux.Run, folder: Path) -> None:
    """Export a calibrated run, and compare its bundle with it."""
    plateaux.calibrate(run, split="test", fraction=0.5, fit=plateaux.CalibrationOptions(target_risk=RISKS[part]))
    begin = time.perf_counter()
    bundle = plateaux.export(run, folder / "bundle")
    results.add(f"{part}: export, seconds", time.perf_counter() - begin)
    predictor = plateaux.load_predictor(run, device="cpu")
    test = build_data(run.recipe).test
    x, _ = test.fetch(torch.arange(min(len(test), IMAGES)))
    inputs = prepare(x, predictor.contract)
    results.add(f"{part}: samples", len(inputs))
    found = predictor.predict_prepared(inputs)
    assert found.abstain is not None
    assert found.prediction_set is not None
    results.add(f"{part}: abstentions", float(found.abstain.sum()))
    results.add(f"{part}: classes of a set, mean", float(found.prediction_set.sum(1).mean()))
    options: dict[str, dict[str, Any]] = {"onnx": {}, "pt2": {"backend": "pt2", "trust": ["model.pt2"]}}
    for name, chosen in options.items():
        other = plateaux.load_predictor(folder / "bundle", **chosen)
        agreement = compare(predictor, other, inputs, bundle.manifest.calibration, f"{part}, {name}")
        limit = at_most(1e-5 * 1e6)
        title = f"{part}: {name}, largest difference of a probability, 1e-6"
        results.add(title, 1e6 * agreement.max_difference, full=limit, quick=limit)
        results.add(f"{part}: {name}, decisions that differ next to a threshold", agreement.near_threshold)
    size = {name: record.bytes for name, record in bundle.manifest.files.items()}
    results.add(f"{part}: model.onnx, MB", size["model.onnx"] / 1e6)


def main() -> None:
    parser = flag_parser(__doc__ or "", PARTS)
    args = selected(parser.parse_args())
    results = Results(args.quick, args.json)
    builders = {"resnets": resnets, "vit": vit, "heads": heads, "mrpc": mrpc, "digits": digits}
    for part in ("digits",) if args.quick else args.parts:
        with tempfile.TemporaryDirectory() as name:
            measure(results, part, builders[part](Path(name)), Path(name))
    results.finish(parts=args.parts, torch=torch.__version__)


if __name__ == "__main__":
    main()
