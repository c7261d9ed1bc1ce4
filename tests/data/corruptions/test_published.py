"""Reader of the published corrupted data sets, with small generated files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError, UnknownNameError
from plateaux.data.corruptions.published import open_published

Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)


def write_cifar_c(root: Path, *, title: str = "CIFAR-10-C", count: int = 4, classes: int = 10) -> tuple[Any, Any]:
    """Write fog.npy and labels.npy with `count` images per severity."""
    (root / title).mkdir()
    images = RNG.integers(0, 256, (5 * count, 32, 32, 3), dtype=np.uint8)
    labels = np.tile(RNG.integers(0, classes, count, dtype=np.uint8), 5)
    np.save(root / title / "fog.npy", images)
    np.save(root / title / "labels.npy", labels)
    return images, labels


def write_folders(root: Path, title: str, side: int, classes: list[str], *, images_per_class: int = 2) -> None:
    for label, name in enumerate(classes):
        folder = root / title / "fog" / "3" / name
        folder.mkdir(parents=True)
        for k in range(images_per_class):
            pixels = np.full((side, side, 3), 40 * label + 10 * k, np.uint8)
            Image.fromarray(pixels).save(folder / f"{name}_{k}.JPEG", quality=100)


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_a_severity_is_a_contiguous_block_of_rows(severity: int, tmp_path: Path) -> None:
    images, labels = write_cifar_c(tmp_path)
    source = open_published("cifar10", tmp_path, "fog", severity)
    assert source is not None
    assert len(source) == 4
    x, y = source.fetch(torch.tensor([2, 0]))
    assert isinstance(x, Tensor)
    assert x.dtype == torch.uint8
    assert x.is_contiguous()
    rows = [(severity - 1) * 4 + 2, (severity - 1) * 4]
    assert np.array_equal(x.permute(0, 2, 3, 1).numpy(), images[rows])
    assert y.dtype == torch.int64
    assert y.tolist() == labels[rows].tolist()


def test_missing_files_give_none(tmp_path: Path) -> None:
    for name in ("cifar10", "cifar100", "tiny_imagenet", "imagenet", "digits"):
        assert open_published(name, tmp_path, "fog", 1) is None
    write_cifar_c(tmp_path)
    assert open_published("cifar10", tmp_path, "snow", 1) is None
    assert open_published("cifar100", tmp_path, "fog", 1) is None


def test_unknown_kinds_and_severities_are_rejected_even_without_files(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'fog'"):
        open_published("cifar10", tmp_path, "fogg", 1)
    with pytest.raises(RecipeError, match="Unknown severity 6"):
        open_published("cifar10", tmp_path, "fog", 6)


def test_a_fingerprint_hashes_only_the_images_of_its_severity(tmp_path: Path) -> None:
    images, _ = write_cifar_c(tmp_path)

    def fingerprints() -> list[str]:
        sources = [open_published("cifar10", tmp_path, "fog", severity) for severity in (1, 2)]
        return [source.fingerprint() for source in sources if source is not None]

    first, second = fingerprints()
    assert first != second
    images[5] ^= 1
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", images)
    assert fingerprints()[0] == first
    assert fingerprints()[1] != second


def test_a_pickled_source_contains_the_path_and_not_the_images(tmp_path: Path) -> None:
    write_cifar_c(tmp_path, count=20)
    source = open_published("cifar10", tmp_path, "fog", 2)
    assert source is not None
    pickled = pickle.dumps(source)
    assert len(pickled) < 3000  # the path and the labels
    assert torch.equal(pickle.loads(pickled).fetch(torch.arange(20))[0], source.fetch(torch.arange(20))[0])


def test_coarse_classes_have_no_published_labels(tmp_path: Path) -> None:
    write_cifar_c(tmp_path, title="CIFAR-100-C", classes=100)
    assert open_published("cifar100", tmp_path, "fog", 1, classes=20) is None
    assert open_published("cifar100", tmp_path, "fog", 1, classes=100) is not None


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((20, 32, 32, 3), np.float32), "float32"),
        (np.zeros((20, 3, 32, 32), np.uint8), r"\[20, 3, 32, 32\]"),
        (np.zeros((19, 32, 32, 3), np.uint8), "20 labels"),
        (np.zeros((25, 32, 32, 3), np.uint8), "20 labels"),
        (np.array([{"a": 1}] * 20), "cannot be read"),  # a pickle
    ],
)
def test_files_with_another_shape_or_dtype_are_rejected(images: Any, message: str, tmp_path: Path) -> None:
    write_cifar_c(tmp_path)
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", images)
    with pytest.raises(DataError, match=rf"fog\.npy.*{message}"):
        open_published("cifar10", tmp_path, "fog", 1)


def test_a_truncated_file_is_rejected(tmp_path: Path) -> None:
    write_cifar_c(tmp_path)
    file = tmp_path / "CIFAR-10-C" / "fog.npy"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(DataError, match=r"fog\.npy cannot be read.*download it again"):
        open_published("cifar10", tmp_path, "fog", 1)


def test_invalid_labels_are_rejected(tmp_path: Path) -> None:
    write_cifar_c(tmp_path)
    file = tmp_path / "CIFAR-10-C" / "labels.npy"
    for labels, message in (
        (np.full(20, 10), "allowed are 0 to 9"),
        (np.zeros((20, 2), np.int64), r"integers \[50000\]"),
        (np.zeros(20), "float64"),
    ):
        np.save(file, labels)
        with pytest.raises(DataError, match=rf"labels\.npy.*{message}"):
            open_published("cifar10", tmp_path, "fog", 1)
    file.unlink()
    with pytest.raises(DataError, match=r"labels\.npy is missing"):
        open_published("cifar10", tmp_path, "fog", 1)


# Folders of images.


def test_tiny_imagenet_c_takes_classes_in_the_order_of_their_labels(tmp_path: Path) -> None:
    write_folders(tmp_path, "Tiny-ImageNet-C", 64, ["n01", "n02", "n03"])
    source = open_published("tiny_imagenet", tmp_path, "fog", 3)
    assert source is not None
    x, y = source.fetch(torch.arange(6))
    assert isinstance(x, Tensor)
    assert x.shape == (6, 3, 64, 64)
    assert y.tolist() == [0, 1, 2, 0, 1, 2]  # interleaved over the classes
    assert x.float().mean((1, 2, 3)).round().tolist() == [0, 40, 80, 10, 50, 90]
    assert open_published("tiny_imagenet", tmp_path, "fog", 2) is None


def test_tiny_imagenet_c_must_have_the_classes_of_tiny_imagenet_in_the_same_root(tmp_path: Path) -> None:
    write_folders(tmp_path, "Tiny-ImageNet-C", 64, ["n01", "n03"])
    (tmp_path / "tiny-imagenet-200").mkdir()
    wnids = tmp_path / "tiny-imagenet-200" / "wnids.txt"
    wnids.write_text("n03\nn01\n")
    source = open_published("tiny_imagenet", tmp_path, "fog", 3)
    assert source is not None
    assert source.fetch(torch.arange(2))[1].tolist() == [0, 1]  # sorted, as in tiny_imagenet.py
    wnids.write_text("n03\nn01\nn02\n")
    with pytest.raises(DataError, match=r"2 class folders for 3 classes: \['n02'\] are missing"):
        open_published("tiny_imagenet", tmp_path, "fog", 3)


def test_imagenet_c_accepts_class_folders_and_a_size(tmp_path: Path) -> None:
    write_folders(tmp_path, "ImageNet-C", 224, ["n01", "n02"], images_per_class=1)
    source = open_published("imagenet", tmp_path, "fog", 3, folders=["n02", "n01"], size=64)
    assert source is not None
    x, y = source.fetch(torch.arange(2))
    assert isinstance(x, Tensor)
    assert x.shape == (2, 3, 64, 64)
    assert x.float().mean((1, 2, 3)).round().tolist() == [40, 0]
    assert y.tolist() == [0, 1]
    some = open_published("imagenet", tmp_path, "fog", 3, folders=["n02"])
    assert some is not None
    x, y = some.fetch(torch.arange(1))
    assert isinstance(x, Tensor)
    assert (len(some), round(float(x.float().mean())), y.tolist()) == (1, 40, [0])
    with pytest.raises(DataError, match=r"\['n03'\] are missing"):
        open_published("imagenet", tmp_path, "fog", 3, folders=["n01", "n03"])
    assert open_published("imagenet", tmp_path, "fog", 3, folders=["cat", "dog"]) is None


def test_empty_folders_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "ImageNet-C" / "fog" / "3" / "n01").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no \*\.JPEG"):
        open_published("imagenet", tmp_path, "fog", 3)
