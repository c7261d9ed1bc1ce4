"""Invalid data and models are refused before anything is written, with what was found, what is expected, and why."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DataError, PlateauxError, RunError
from plateaux.data.sources import DataSplits, from_dataset, from_tensors
from plateaux.storage.run import Run

TEXT = """
members = 2
[data]
name = "given"
batch_size = 8
[model]
name = "given"
[train]
epochs = 1
[executor]
threads = 1
"""
N, CLASSES = 32, 3
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % CLASSES


def linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(shape[0], classes)


def normalized(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.Linear(5, classes))


class Counting(nn.Linear):
    """Counts its calls in a buffer that it replaces."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__(4, CLASSES)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, input: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(input)


class Samples:
    """A map-style data set of rows."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self.x[i], self.y[i]


def tensors(x: Any = X, y: Any = Y, **options: Any) -> DataSplits:
    return from_tensors((x, y), (x, y), **{"classes": CLASSES, **options})


def on_demand(x: Any = X, y: Any = Y, **options: Any) -> DataSplits:
    return from_dataset(Samples(x, y), Samples(x, y), **{"classes": CLASSES, "shape": (4,), **options})


class Named(nn.Linear):
    """Returns a dict, as some networks of libraries do."""

    def __init__(self) -> None:
        super().__init__(4, CLASSES)

    def forward(self, input: Tensor) -> Any:
        return {"logits": super().forward(input)}


def squared(outputs: Tensor, batch: Any) -> Tensor:
    """A loss of a regression."""
    return (outputs[:, :, 0] - batch.y.flatten(1)[:, 0]) ** 2


def changed(values: Tensor, index: int, value: float) -> Tensor:
    values = values.clone()
    values[index] = value
    return values


def train(out: Path, data: Callable[[], DataSplits] = tensors, model: Any = linear, *changes: str, **more: Any) -> Run:
    return plateaux.train(Recipe.parse(TEXT, changes), out, data=data(), model=model, **more)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "labels of -100": (
        {"data": lambda: tensors(y=changed(Y, 3, -100))},
        r"1 of 32 train labels .* range from -100 to 2\. Expected: .* 0 to 2\. -100 marks .* remove these samples",
    ),
    "a label of -100 in a Dataset": (
        {"data": lambda: on_demand(y=changed(Y, 3, -100))},
        r"Sample 3 of 'Samples.train' has label -100\. Expected: 0 to 2.*remove these samples",
    ),
    "labels from 1 to C": (
        {"data": lambda: tensors(y=Y + 1)},
        r"labels range from 1 to 3\. Expected: .* from 0 to 2\. The labels seem to start at 1: subtract 1",
    ),
    "too few classes": ({"data": lambda: tensors(classes=2)}, "set classes to at least 3"),
    "float labels": (
        {"data": lambda: tensors(y=Y.float())},
        r"labels of 'tensors' are float32 of shape \[32\]\. Expected: integer .* Regression is not .* y\.long\(\)",
    ),
    "float labels in a Dataset": (
        {"data": lambda: on_demand(y=Y.float())},
        r"labels of 'Samples.train' are float32 of shape \[32\]\. Expected: integer .* Regression is not supported",
    ),
    "one-hot labels": (
        {"data": lambda: tensors(y=nn.functional.one_hot(Y))},
        r"int64 of shape \[32, 3\]\. Expected: integer .* one-hot: use y\.argmax\(1\)",
    ),
    "one-hot float labels": ({"data": lambda: tensors(y=nn.functional.one_hot(Y).float())}, "seem to be one-hot"),
    "targets of a regression": (
        {"data": lambda: tensors(y=X.sum(1), classes=1), "loss": squared},
        "Expected: at least 2 classes. Regression is not supported yet",
    ),
    "mean and log-variance": (
        {"data": lambda: tensors(y=X.sum(1), classes=2), "loss": squared},
        "float32 of shape .*Regression is not supported yet",
    ),
    "multi-label targets": (
        {"data": lambda: tensors(y=(X[:, :3] > 0).float()), "loss": squared},
        "Multi-label classification is not supported yet",
    ),
    "labels of tokens": ({"data": lambda: tensors(y=Y[:, None].expand(-1, 5)), "loss": squared}, "for each token"),
    "masks": ({"data": lambda: tensors(y=Y[:, None, None].expand(-1, 5, 5)), "loss": squared}, "segmentation"),
    "other outputs with a custom loss": (
        {"model": lambda: nn.Linear(4, CLASSES + 1), "loss": squared},
        r"returned outputs of shape \[2, 4\] for 2 samples\. Expected: \[2, 3\]",
    ),
    "a network that returns a dict": (
        {"model": Named},
        r"Named returned a dict\. Expected: a tensor of logits .* Wrap",
    ),
    "a single class": (
        {"data": lambda: tensors(y=torch.zeros_like(Y))},
        r"All 32 training labels .* have the value 0\. Expected: at least 2 classes\. The usual cause is .* sorted",
    ),
    "classes = 1": ({"data": lambda: tensors(y=torch.zeros_like(Y), classes=1)}, "Expected: at least 2 classes"),
    "x and y of unequal length": (
        {"data": lambda: tensors(x=X[:-1])},
        r"Inputs of shape \[31, 4\] and labels of shape \[32\] were given\. Expected: one label for each input",
    ),
    "a test set of another shape": (
        {"data": lambda: from_tensors((X, Y), (X[:, :3], Y), classes=CLASSES)},
        r"A test input of 'tensors' has shape \[3\]\. Expected: \[4\].* The usual cause",
    ),
    "a test set of another dtype": (
        {"data": lambda: from_tensors((X, Y), (X.to(torch.uint8), Y), classes=CLASSES)},
        "Train inputs are float, test inputs are uint8",
    ),
    "a Dataset of another shape than it says": (
        {"data": lambda: on_demand(shape=(2, 2))},
        r"A train input of 'Samples' has shape \[4\]\. Expected: \[2, 2\]",
    ),
    "no samples": ({"data": lambda: tensors(X[:0], Y[:0])}, "training set of 'tensors' is empty"),
    "text as input": ({"data": lambda: tensors(x=np.array([["a"]] * N))}, "cannot become a tensor"),
    "data that are no DataSplits": ({"data": lambda: (X, Y)}, "data= is a tuple. Expected: plateaux.DataSplits"),
    "NaN inputs": (
        {"data": lambda: tensors(x=changed(X, 5, torch.nan))},
        r"1 training inputs of 'tensors' contain NaN or infinity \(samples 5\)\. Expected: finite numbers\. The usual",
    ),
    "five outputs too many": (
        {"model": lambda shape, classes: nn.Linear(4, classes + 5)},
        r"returned outputs of shape \[2, 8\] for 2 samples\. Expected: \[2, 3\].* The usual cause",
    ),
    "a module instead of a function": (
        {"model": nn.Linear(4, CLASSES)},
        r"model= is a module, Linear\(\.\.\.\)\. Expected: a function that builds one",
    ),
    "the name of a model instead of a function": ({"model": "mlp"}, "model= is a str. Expected: a function"),
    "a function that returns no module": ({"model": lambda: 3}, "must return a torch.nn.Module"),
    "a function that fails": (
        {"model": lambda: nn.Linear(4)},  # type: ignore[call-arg]
        "The model cannot be built: TypeError: .*out_features.* Expected: a function",
    ),
    "a network for other inputs": (
        {"model": lambda: nn.Linear(5, CLASSES)},
        r"cannot process two training samples, float32\[2, 4\]: RuntimeError.* Expected: .* The usual cause",
    ),
    "a network without weights": ({"model": lambda: nn.Identity()}, "has no parameter to train"),
    "a batch of one for BatchNorm": (
        {"data": lambda: tensors(X[:25], Y[:25]), "model": normalized},
        r"has a single sample \(25 training samples in batches of 8\).*Set data\.drop_last = true",
    ),
    "a network that replaces its buffer": (
        {"model": lambda: Counting(persistent=True)},
        r"The model Counting assigns a new tensor to its buffer 'calls'.* Write self\.calls\.copy_\(value\)",
    ),
    "an averaged loss": (
        {"loss": lambda outputs, batch: nn.functional.cross_entropy(outputs[0], batch.y)},
        r"The loss returned \[\] for outputs \[1, 2, 3\]\. Expected: .* reduction='none'",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_invalid_input_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    arguments, message = CASES[name]
    with pytest.raises(PlateauxError, match=f"(?s){message}"):
        train(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("build", [tensors, on_demand])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int16, torch.bool])
def test_integer_labels_of_any_width_give_the_same_weights(build: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    y = Y.clamp(max=1)
    runs = [train(tmp_path / str(t), lambda t=t: build(y=y.to(t))) for t in (torch.int64, dtype)]  # type: ignore[misc]
    weights = [run.weights(0)["weight"] for run in runs]
    assert torch.equal(*weights)
    data = build(y=y.to(dtype))
    assert 0 < plateaux.evaluate(plateaux.open_run(runs[1], data=data, model=linear))["accuracy"].ensemble.value <= 1


def test_numpy_arrays_are_accepted_wherever_tensors_are(tmp_path: Path) -> None:
    arrays = X.double().numpy(), Y.numpy()
    assert not arrays[0].setflags(write=False)
    data = from_tensors(arrays, (X.numpy()[::-1], Y.numpy()[::-1]), classes=CLASSES)
    run = train(tmp_path, lambda: data)
    ensemble = plateaux.load_predictor(plateaux.open_run(run, model=linear)).ensemble
    assert torch.equal(ensemble.predict(X.numpy()), ensemble.predict(X))
    assert torch.equal(ensemble(X.double().numpy()), ensemble.predict(X))


@pytest.mark.parametrize("scale", [255.0, 1.0])
def test_floats_from_0_to_255_are_trained_with_a_warning(
    scale: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = (X - X.min()) / (X.max() - X.min()) * scale
    train(tmp_path, lambda: tensors(x=x))
    texts = [each.getMessage() for each in caplog.records if "floats from" in each.getMessage()]
    assert len(texts) == (scale > 1)
    assert all("floats from 0 to 255" in text and "divide by 255" in text for text in texts)


def test_scaled_floats_with_their_own_mean_are_not_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, lambda: replace(tensors(x=X * 255), mean=(0.0,), std=(255.0,)))
    assert "floats from" not in caplog.text


@pytest.mark.parametrize(
    ("labels", "classes"),
    [({"dtype": "float32", "shape": []}, 2), ({"dtype": "int64", "shape": [3]}, 3), ({}, 1)],
    ids=["regression", "multi-label", "one output"],
)
def test_a_stored_run_whose_labels_are_no_classes_is_refused_everywhere(
    labels: dict[str, Any], classes: int, tmp_path: Path
) -> None:
    """Runs of older versions, which answered probability 1.0, or a softmax over targets that are no classes."""
    run = train(tmp_path / "run", lambda: tensors())
    tree = run.store.get_json("run.json")
    tree["inputs"]["labels"] |= labels
    tree["data"]["classes"] = classes
    run.store.put_json("run.json", tree)
    opened = plateaux.open_run(tmp_path / "run", data=tensors(), model=linear)
    for use in (
        plateaux.evaluate,
        plateaux.load_predictor,
        plateaux.calibrate,
        plateaux.probe_landscape,
        partial(plateaux.export, out=tmp_path / "bundle"),
        partial(plateaux.predict, split="test"),
    ):
        with pytest.raises(RunError, match=r"are not classes .* Only classification is supported"):
            use(opened)  # type: ignore[operator]


def test_evaluation_data_with_other_labels_than_classes_are_refused(tmp_path: Path) -> None:
    run = train(tmp_path, lambda: tensors())
    for data in (tensors(y=Y + 0.5), tensors(y=nn.functional.one_hot(Y))):
        with pytest.raises(DataError, match=r"Expected: integer class numbers of shape \[N\]"):
            plateaux.evaluate(plateaux.open_run(run, data=data, model=linear))


def test_a_network_that_handles_missing_values_is_trained(tmp_path: Path) -> None:
    class Robust(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.nan_to_num())

    data = tensors(x=changed(X, 5, torch.nan))
    assert train(tmp_path, lambda: data, lambda: Robust(4, CLASSES)).progress(0).finished


def test_a_buffer_that_is_not_saved_may_be_replaced(tmp_path: Path) -> None:
    assert train(tmp_path, model=lambda: Counting(persistent=False)).progress(0).finished


def test_the_summary_of_the_inputs_is_stored_in_the_run(tmp_path: Path) -> None:
    run = train(tmp_path, lambda: tensors(y=Y.to(torch.uint8)))
    stored = run.store.get_json("run.json")["inputs"]
    low, high = float(X.min()), float(X.max())
    assert stored == {
        "inputs": {"x": {"dtype": "float32", "shape": [4], "low": low, "high": high}},
        "labels": {"dtype": "int64", "shape": [], "low": 0.0, "high": 2.0},
        "classes": 3, "classes_found": 3, "checked_inputs": N, "checked_labels": N,
    }  # fmt: skip
    assert Run.open(tmp_path).info.inputs == run.info.inputs
    del stored["labels"]
    run.store.put_json("run.json", {**run.store.get_json("run.json"), "inputs": stored})
    with pytest.raises(RunError, match="lacks the field"):
        Run.open(tmp_path)


def test_only_a_fixed_sample_of_a_large_data_set_is_checked() -> None:
    from plateaux.data.data_check import check_data

    class Large:
        def __init__(self) -> None:
            self.read: list[int] = []

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            self.read.append(i)
            return torch.zeros(4), i % 3

    large = Large()
    data = from_dataset(large, Samples(X, Y), classes=CLASSES, shape=(4,))
    summary = check_data(data).summary
    assert summary.checked_inputs == len(large.read) <= 32
    assert {0, 10**9 - 1} <= set(large.read)
    first, large.read = large.read, []
    check_data(data)
    assert large.read == first


def test_recipe_check_runs_the_checks_on_request(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X.numpy(), y=np.zeros(N, int))
    data = f'name = "arrays"\npath = "a.npz"\nclasses = 3\nroot = "{tmp_path}"'
    text = TEXT.replace('[data]\nname = "given"', f"[data]\n{data}").replace('name = "given"', 'name = "mlp"')
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    words = ["recipe", "check", str(tmp_path / "recipe.toml")]
    assert CliRunner().invoke(app, words).exit_code == 0
    refused = CliRunner().invoke(app, [*words, "--data"])
    assert refused.exit_code == 3
    assert "Expected: at least 2 classes" in refused.stderr
    np.savez(tmp_path / "a.npz", x=X.numpy(), y=Y.numpy())
    assert CliRunner().invoke(app, [*words, "--data"]).exit_code == 0


def png(width: int, height: int) -> bytes:
    """Return the start of a PNG file whose header promises that many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [b"IHDR" + header, b"IDAT" + zlib.compress(b"")]
    sized = [struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(sized)


@pytest.mark.parametrize("side", [10_000, 20_000])
def test_an_image_of_400_megapixels_is_refused_before_it_is_decoded(side: int, tmp_path: Path) -> None:
    from plateaux.data.files import decode

    file = tmp_path / "large.png"
    file.write_bytes(png(side, side))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            DataError, match=r"large\.png is too large to decode: .*Expected: at most 89,478,485 pixels"
        ):
            decode(file)


def test_a_resume_with_another_architecture_is_refused_with_the_shapes(tmp_path: Path) -> None:
    def wide(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 7), nn.Linear(7, classes))

    stop = Stop()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, tensors, linear, "train.epochs=3", progress=stop)
    with pytest.raises(RunError, match=r"(?s)weight: \[3, 4\] -> \(unset\)|layers.*Linear"):
        train(tmp_path, tensors, wide, "train.epochs=3")


class Stop:
    """A progress callback that interrupts the process after the first epoch."""

    def __call__(self, event: Any) -> None:
        if getattr(event, "completed_epoch", None) == 2:
            raise KeyboardInterrupt
