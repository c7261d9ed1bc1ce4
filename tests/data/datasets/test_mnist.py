"""MNIST and Fashion-MNIST: small generated IDX files, and the real files if available."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.registry import dataset
from plateaux.data.sources import DataSplits, InMemorySource

mnist, fashion_mnist = dataset.get("mnist"), dataset.get("fashion_mnist")
REAL = os.environ.get("PLATEAUX_DATA", "")
X = np.random.default_rng(0).integers(0, 256, (7, 28, 28), dtype=np.uint8)
Y = np.arange(7, dtype=np.uint8)


def to_idx(array: np.ndarray) -> bytes:  # type: ignore[type-arg]
    return struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_files(folder: Path, *, compressed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, rows in (("train", slice(0, 5)), ("t10k", slice(5, 7))):
        for name, array in ((f"{stem}-images-idx3-ubyte", X[rows]), (f"{stem}-labels-idx1-ubyte", Y[rows])):
            raw = to_idx(array)
            (folder / (name + ".gz" * compressed)).write_bytes(gzip.compress(raw) if compressed else raw)
    return folder


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("folder_name", ["MNIST/raw", "MNIST", "mnist", "."])
def test_idx_files_are_read_as_images_and_labels(tmp_path: Path, folder_name: str, compressed: bool) -> None:
    write_files(tmp_path / folder_name, compressed=compressed)
    data = mnist(root=str(tmp_path))
    assert isinstance(data.train, InMemorySource)
    assert isinstance(data.train.x, Tensor)
    assert torch.equal(data.train.x, torch.from_numpy(X[:5])[:, None])
    assert data.train.y.tolist() == [0, 1, 2, 3, 4]
    assert data.test.fetch(torch.tensor([1]))[1].tolist() == [6]
    assert data.remarks[0] == "5 of 60,000 train images"
    assert any("md5" in remark for remark in data.remarks) == compressed


def test_fashion_mnist_has_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATEAUX_DATA", str(tmp_path))
    write_files(tmp_path / "MNIST" / "raw")
    write_files(tmp_path)  # files directly in the default root could belong to either data set
    with pytest.raises(DataError, match="FashionMNIST/raw"):
        fashion_mnist()
    write_files(tmp_path / "FashionMNIST" / "raw")
    assert fashion_mnist(limit=2).labels[9] == "Ankle boot"


@pytest.mark.parametrize(("factory", "folder_name"), [(mnist, "MNIST"), (fashion_mnist, "FashionMNIST")])
def test_a_range_of_images_is_selected(tmp_path: Path, factory: Callable[..., DataSplits], folder_name: str) -> None:
    write_files(tmp_path / folder_name)
    data = factory(root=str(tmp_path), start=1, limit=3, test_start=1)
    assert isinstance(data.train, InMemorySource)
    assert isinstance(data.train.x, Tensor)
    assert torch.equal(data.train.x, torch.from_numpy(X[1:4])[:, None])
    assert data.train.y.tolist() == [1, 2, 3]
    assert isinstance(data.test, InMemorySource)
    assert data.test.y.tolist() == [6]
    with pytest.raises(RecipeError, match=r"^start = 5 leaves out all 5 samples\. Set it to at most 4"):
        factory(root=str(tmp_path), start=5)
    with pytest.raises(RecipeError, match=r"^test_start = 2 leaves out all 2 samples\. Set it to at most 1"):
        factory(root=str(tmp_path), test_start=2)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("train-images-idx3-ubyte", to_idx(X[:5])[:-1]),
        ("train-images-idx3-ubyte", b"\x00\x00\x0d" + to_idx(X[:5])[3:]),
        ("train-images-idx3-ubyte", to_idx(X[:5].reshape(5, 784))),
        ("train-images-idx3-ubyte", to_idx(X[:4])),
        ("train-images-idx3-ubyte", to_idx(X[:5, :, :14])),
        ("train-labels-idx1-ubyte", to_idx(Y[:5] + 6)),
        ("train-labels-idx1-ubyte", b"\x00"),
    ],
)
def test_a_damaged_file_raises_a_data_error_with_its_name(tmp_path: Path, name: str, raw: bytes) -> None:
    (write_files(tmp_path / "MNIST", compressed=False) / name).write_bytes(raw)
    with pytest.raises(DataError, match=name):
        mnist(root=str(tmp_path))


def test_a_truncated_archive_raises_a_data_error(tmp_path: Path) -> None:
    path = write_files(tmp_path / "MNIST") / "train-images-idx3-ubyte.gz"
    complete = path.read_bytes()
    for damaged in (complete[: len(complete) // 2], b"nonsense", complete[:50] + b"x" * 200 + complete[250:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="train-images"):
            mnist(root=str(tmp_path))


@pytest.mark.skipif(not (Path(REAL) / "MNIST").is_dir(), reason="PLATEAUX_DATA has no MNIST")
def test_the_real_mnist_has_the_documented_mean_and_std() -> None:
    data = mnist(root=REAL)
    assert isinstance(data.train, InMemorySource)
    assert isinstance(data.train.x, Tensor)
    x = data.train.x.double() / 255
    assert x.mean().item() == pytest.approx(data.mean[0], abs=2e-3)
    assert x.std().item() == pytest.approx(data.std[0], abs=2e-3)
