"""Agreement of a run with its bundle and with the service, on real samples: every answer is compared.

| part | ensemble | samples |
|---|---|---|
| resnets | published ResNets of depth 20, 32, 44, 56, and a fifth that was trained briefly | 2,000 CIFAR-10 images |
| vit | three ViT-tiny of timm at 32 x 32 pixels, trained briefly | 2,000 CIFAR-10 images |
| heads | 200 linear heads over one published resnet20 | 2,000 CIFAR-10 images |
| mrpc | two LoRA adapters over MiniLM | MRPC's 1,725 test pairs |

Every run is calibrated on test samples, so that sets and abstentions vary. The service is `plateaux serve` in a process
of its own, which gets all samples as binary tensors over HTTP. The quick form uses two small networks on digits. The
other parts need CIFAR-10, MRPC, and the weights in PLATEAUX_DATA.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import NETWORKS, Results, at_most, flag_parser, missing_data, selected
from numpy.typing import NDArray
from serve import Server

import plateaux
from plateaux.config.builders.data import build_data
from plateaux.data.files import data_root
from plateaux.deploy.agreement import Agreement, compare_answers
from plateaux.prediction.inputs import prepare

PARTS = ("resnets", "vit", "heads", "mrpc")
NEEDED = {
    "resnets": ("CIFAR-10", "ResNets"),
    "vit": ("CIFAR-10",),
    "heads": ("CIFAR-10", "ResNets"),
    "mrpc": ("MRPC", "MiniLM"),
    "digits": (),
}
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
BATCH = 50  # samples of one forward pass, and of one request
DTYPES = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_}  # of the protocol, for all inputs and answers
Arrays = Mapping[str, NDArray[Any]]


def train(folder: Path, name: str, **sections: Any) -> plateaux.Run:
    recipe = {"train": {"epochs": 1}, "optimizer": {"lr": 0.05, "momentum": 0.9}, **sections}
    return plateaux.train(plateaux.Recipe.from_dict(recipe), folder / name)


def resnets(folder: Path) -> plateaux.Run:
    data = {**CIFAR, "test_limit": IMAGES}
    fifth = train(folder, "fifth", members=1, data=data, model={"name": "resnet20"})
    file = data_root(None) / NETWORKS
    recipe = {"members": 5, "data": data, "model": {"name": [f"resnet{depth}" for depth in (*DEPTHS, 20)]}}
    weights = [f"{file}:resnet{depth}." for depth in DEPTHS]
    last = str(Path(str(fifth)) / str(fifth.progress(0).weights))
    return plateaux.import_weights(folder / "run", plateaux.Recipe.from_dict(recipe), [*weights, last])


def vit(folder: Path) -> plateaux.Run:
    data = {**CIFAR, "test_limit": IMAGES}
    adam = {"name": "AdamW", "lr": 1e-3}
    return train(folder, "run", members=3, data=data, model={"name": "timm:vit_tiny_patch16_224"}, optimizer=adam)


def heads(folder: Path) -> plateaux.Run:
    model = {
        "name": "resnet20", "weights": NETWORKS, "weights_prefix": "resnet20.", "strict": False,
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


def answers_of_service(bundle: Path, batches: Sequence[Arrays], outputs: Sequence[str]) -> list[Arrays]:
    """Start the service of a bundle, send it all batches, and return its answers."""
    server = Server(bundle, bundle.with_name("serve.log"))
    try:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
        found = [infer(connection, batch, outputs) for batch in batches]
        connection.close()
        return found
    finally:
        server.stop()


def infer(connection: HTTPConnection, batch: Arrays, outputs: Sequence[str]) -> Arrays:
    """Send one batch as binary tensors of the Open Inference Protocol, and return the answers by name."""
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    inputs = [
        {
            "name": name,
            "shape": values.shape,
            "datatype": names[values.dtype],
            "parameters": {"binary_data_size": values.nbytes},
        }
        for name, values in batch.items()
    ]
    tree = {"inputs": inputs, "outputs": [{"name": n} for n in outputs], "parameters": {"binary_data_output": True}}
    header = json.dumps(tree).encode()
    body = header + b"".join(values.tobytes() for values in batch.values())
    length = "Inference-Header-Content-Length"
    connection.request("POST", "/v2/models/model/infer", body, {length: str(len(header))})
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise SystemExit(f"The service answered {response.status}: {content.decode(errors='replace')[:300]}")
    start, found = int(response.headers[length]), {}
    for item in json.loads(content[:start])["outputs"]:
        end = start + item["parameters"]["binary_data_size"]
        found[item["name"]] = np.frombuffer(content[start:end], DTYPES[item["datatype"]]).reshape(item["shape"])
        start = end
    return found


def measure(results: Results, part: str, run: plateaux.Run, folder: Path) -> None:
    """Export a calibrated run, and compare its bundle and the service with it."""
    plateaux.calibrate(run, split="test", fraction=0.5, target_risk=RISKS[part])
    begin = time.perf_counter()
    bundle = plateaux.export(run, folder / "bundle")
    results.add(f"{part}: export, seconds", time.perf_counter() - begin)
    predictor = plateaux.load_predictor(run, device="cpu")
    test = build_data(run.recipe).test
    x, _ = test.fetch(torch.arange(min(len(test), IMAGES)))
    inputs = prepare(x, predictor.contract)
    rows = range(0, len(inputs), BATCH)
    batches = [{name: values[row : row + BATCH] for name, values in inputs.arrays.items()} for row in rows]
    expected = [predictor.backend(batch) for batch in batches]
    results.add(f"{part}: samples", len(inputs))
    results.add(f"{part}: abstentions", float(sum(each["abstain"].sum() for each in expected)))
    sizes = np.concatenate([each["prediction_set"].sum(1) for each in expected])
    results.add(f"{part}: classes of a set, mean", float(sizes.mean()))
    onnx = plateaux.load_predictor(folder / "bundle").backend
    forms = {
        "onnx": lambda: [onnx(batch) for batch in batches],
        "service": lambda: answers_of_service(folder / "bundle", batches, predictor.outputs),
    }
    for name, answer in forms.items():
        agreement = Agreement()
        for one, other in zip(expected, answer(), strict=True):
            agreement += compare_answers(one, other, bundle.manifest.calibration, f"{part}, {name}")
        limit = at_most(1e-5 * 1e6)
        title = f"{part}: {name}, largest difference of a probability, 1e-6"
        results.add(title, 1e6 * agreement.max_difference, full=limit, quick=limit)
        results.add(f"{part}: {name}, decisions that differ next to a threshold", agreement.near_threshold)
    results.add(f"{part}: model.onnx, MB", bundle.manifest.files["model.onnx"].bytes / 1e6)


def main() -> None:
    parser = flag_parser(__doc__ or "", PARTS)
    args = selected(parser.parse_args())
    results = Results(args.quick, args.json)
    builders = {"resnets": resnets, "vit": vit, "heads": heads, "mrpc": mrpc, "digits": digits}
    for part in ("digits",) if args.quick else args.parts:
        if reason := missing_data(*NEEDED[part]):
            results.cannot_tell(f"{part}: {reason}")
            continue
        with tempfile.TemporaryDirectory() as name:
            measure(results, part, builders[part](Path(name)), Path(name))
    results.finish(parts=args.parts, torch=torch.__version__)


if __name__ == "__main__":
    main()
