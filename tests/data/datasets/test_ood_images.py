"""Out-of-distribution images: small generated files, damaged files, and the real files if available."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.registry import dataset
from plateaux.data.datasets.ood_images import notmnist, textures32, tinyimagenet32
from plateaux.data.sources import DataSplits, InMemorySource

REAL = Path(os.environ.get("PLATEAUX_DATA", "/nonexistent")) / "ood"
RNG = np.random.default_rng(0)
COLOR = RNG.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
GRAY = RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8)
Y = np.array([1, 1, 0, 1, 2, 0], dtype=np.uint8)
INTERLEAVED = [2, 0, 4, 5, 1, 3]  # the first of classes 0, 1, 2, then the second of 0 and 1, then the third of 1
NAMES = np.array(["banded", "dotty", "meshed"])


def write_npz(root: Path, name: str, **arrays: Any) -> Path:
    file = root / "ood" / f"{name}.npz"
    file.parent.mkdir(exist_ok=True)
    np.savez_compressed(file, **arrays)
    return file


def samples(data: DataSplits) -> tuple[Tensor, Tensor]:
    assert isinstance(data.test, InMemorySource)
    assert isinstance(data.test.x, Tensor)
    return data.test.x, data.test.y


def test_color_images_are_channels_first_and_interleaved_over_classes(tmp_path: Path) -> None:
    write_npz(tmp_path, "textures32", x=COLOR, y=Y, names=NAMES)
    data = textures32(root=str(tmp_path))
    x, y = samples(data)
    assert torch.equal(x, torch.from_numpy(COLOR[INTERLEAVED]).permute(0, 3, 1, 2))
    assert y.tolist() == Y[INTERLEAVED].tolist() == [0, 1, 2, 0, 1, 1]
    assert x.is_contiguous()
    assert (data.name, data.classes, data.shape, data.labels) == ("textures32", 3, (3, 32, 32), tuple(NAMES))
    assert (data.mean, data.std) == ((), ())  # normalized like the training data of the model


def test_grayscale_images_get_a_channel_and_notmnist_its_class_names(tmp_path: Path) -> None:
    write_npz(tmp_path, "notmnist", x=GRAY, y=Y)
    data = notmnist(root=str(tmp_path))
    x, y = samples(data)
    assert torch.equal(x, torch.from_numpy(GRAY[INTERLEAVED])[:, None])
    assert (data.classes, data.shape, data.labels) == (10, (1, 28, 28), tuple("ABCDEFGHIJ"))
    assert y.dtype == torch.int64


def test_without_labels_all_samples_have_one_unknown_class(tmp_path: Path) -> None:
    write_npz(tmp_path, "tinyimagenet32", x=COLOR)
    data = tinyimagenet32(root=str(tmp_path))
    x, y = samples(data)
    assert torch.equal(x, torch.from_numpy(COLOR).permute(0, 3, 1, 2))
    assert y.tolist() == [0] * 6
    assert (data.classes, data.labels) == (1, ("unknown",))


def test_the_number_of_classes_defaults_to_the_largest_label_plus_one(tmp_path: Path) -> None:
    write_npz(tmp_path, "tinyimagenet32", x=COLOR, y=Y)
    data = tinyimagenet32(root=str(tmp_path))
    assert (data.classes, data.labels) == (3, ())


def test_the_train_source_is_empty(tmp_path: Path) -> None:
    write_npz(tmp_path, "textures32", x=COLOR, y=Y, names=NAMES)
    data = textures32(root=str(tmp_path))
    assert len(data.train) == 0
    assert data.remarks == ("test only: there are no train images",)
    x, y = data.train.fetch(torch.zeros(0, dtype=torch.int64))
    assert isinstance(x, Tensor)
    assert (x.shape, x.dtype, y.dtype) == ((0, 3, 32, 32), torch.uint8, torch.int64)


def test_a_limit_selects_the_first_samples_of_every_class(tmp_path: Path) -> None:
    write_npz(tmp_path, "textures32", x=COLOR, y=Y, names=NAMES)
    full, few = textures32(root=str(tmp_path)), textures32(root=str(tmp_path), test_limit=3)
    assert samples(few)[1].tolist() == [0, 1, 2]
    assert torch.equal(samples(few)[0], samples(full)[0][:3])
    assert few.classes == 3
    assert few.test.fingerprint() != full.test.fingerprint() == textures32(root=str(tmp_path)).test.fingerprint()
    with pytest.raises(RecipeError, match="limit = 0"):
        textures32(root=str(tmp_path), test_limit=0)


def test_the_root_defaults_to_the_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npz(tmp_path, "notmnist", x=GRAY, y=Y)
    monkeypatch.setenv("PLATEAUX_DATA", str(tmp_path))
    assert len(notmnist().test) == 6


@pytest.mark.parametrize("name", ["textures32", "tinyimagenet32", "notmnist"])
def test_data_sets_are_registered_and_report_the_searched_folder(name: str, tmp_path: Path) -> None:
    build = dataset.get(name)
    assert dataset.describe()[name].endswith(".")
    with pytest.raises(DataError) as raised:
        build(root=str(tmp_path))
    for part in (f"{name}.npz", str(tmp_path / "ood"), "PLATEAUX_DATA", "http", "uint8"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": Y}, "contains x of"),
        ({"x": COLOR[:0], "y": Y[:0]}, r"\[0, 32, 32, 3\]"),
        ({"x": COLOR.astype(np.float32), "y": Y}, "float32"),
        ({"x": np.moveaxis(COLOR, 3, 1), "y": Y}, r"\[6, 3, 32, 32\]"),
        ({"x": COLOR[..., 0], "y": Y}, r"\[N, 32, 32, 3\]"),
        ({"x": COLOR, "y": Y[:4]}, r"y of uint8 \[4\]"),
        ({"x": COLOR, "y": Y / 2}, "float64"),
        ({"x": COLOR, "y": Y, "names": NAMES[:2]}, "labels from 0 to 2"),
        ({"x": COLOR, "y": Y.astype(np.int64) - 1}, "labels from -1"),
        ({"x": COLOR, "y": Y, "names": np.array(["a", None, 3])}, "cannot be read"),  # pickled objects are never loaded
    ],
)
def test_invalid_arrays_are_rejected(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    write_npz(tmp_path, "textures32", **arrays)
    with pytest.raises(DataError, match=message) as raised:
        textures32(root=str(tmp_path))
    assert "textures32.npz" in str(raised.value)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


def _overwrite_bytes(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[100:120] = b"\xff" * 20  # inside the compressed bytes of x: zlib fails before zipfile does
    file.write_bytes(raw)


def _replace_by_text(file: Path) -> None:
    file.write_bytes(b"nonsense")


def _replace_by_npy(file: Path) -> None:
    with file.open("wb") as out:
        np.save(out, COLOR)


@pytest.mark.parametrize(
    "damage", [_truncate, _overwrite_bytes, _replace_by_text, _replace_by_npy], ids=lambda f: f.__name__
)
def test_a_damaged_file_raises_a_data_error_with_its_name(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    stripes = np.broadcast_to(np.arange(32, dtype=np.uint8)[:, None], COLOR.shape)
    damage(write_npz(tmp_path, "textures32", x=stripes, y=Y, names=NAMES))
    with pytest.raises(DataError, match=r"textures32\.npz"):
        textures32(root=str(tmp_path))


@pytest.mark.parametrize(
    ("build", "count", "classes"), [(textures32, 1200, 10), (tinyimagenet32, 2000, 200), (notmnist, 10_000, 10)]
)
def test_the_real_files_are_read(build: Callable[..., DataSplits], count: int, classes: int) -> None:
    file = REAL / f"{build.__name__}.npz"
    if not file.is_file():
        pytest.skip(f"PLATEAUX_DATA has no ood/{file.name}")
    data = build(root=str(REAL.parent))
    x, y = samples(data)
    assert (len(x), data.classes, x.dtype) == (count, classes, torch.uint8)
    assert tuple(x.shape[1:]) == data.shape
    assert len(data.labels) == classes
    with np.load(file) as arrays:  # the same images in another order
        assert torch.equal(y.bincount(), torch.from_numpy(arrays["y"].astype(np.int64)).bincount())
        assert int(x.long().sum()) == int(arrays["x"].sum(dtype=np.int64))
    few = samples(build(root=str(REAL.parent), test_limit=100))[1]
    assert len(few.unique()) == min(100, len(y.unique()))
