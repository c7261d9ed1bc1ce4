"""Sets from elsewhere: files made small, damaged ones, and the real ones where they are."""

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
COLOUR = RNG.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
GREY = RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8)
Y = np.array([1, 1, 0, 1, 2, 0], dtype=np.uint8)
TURNS = [2, 0, 4, 5, 1, 3]  # the first of classes 0, 1, 2, then the second of 0 and 1, then the third of 1
NAMES = np.array(["banded", "dotty", "meshed"])


def write(root: Path, name: str, **arrays: Any) -> Path:
    file = root / "ood" / f"{name}.npz"
    file.parent.mkdir(exist_ok=True)
    np.savez_compressed(file, **arrays)
    return file


def samples(data: DataSplits) -> tuple[Tensor, Tensor]:
    assert isinstance(data.test, InMemorySource)
    assert isinstance(data.test.x, Tensor)
    return data.test.x, data.test.y


def test_colour_images_come_channels_first_and_in_turns(tmp_path: Path) -> None:
    write(tmp_path, "textures32", x=COLOUR, y=Y, names=NAMES)
    data = textures32(root=str(tmp_path))
    x, y = samples(data)
    assert torch.equal(x, torch.from_numpy(COLOUR[TURNS]).permute(0, 3, 1, 2))
    assert y.tolist() == Y[TURNS].tolist() == [0, 1, 2, 0, 1, 1]
    assert x.is_contiguous()
    assert (data.name, data.classes, data.shape, data.labels) == ("textures32", 3, (3, 32, 32), tuple(NAMES))
    assert (data.mean, data.std) == ((), ())  # what is met is normalised as what was trained on


def test_grey_images_get_their_channel_and_letters_their_names(tmp_path: Path) -> None:
    write(tmp_path, "notmnist", x=GREY, y=Y)
    data = notmnist(root=str(tmp_path))
    x, y = samples(data)
    assert torch.equal(x, torch.from_numpy(GREY[TURNS])[:, None])
    assert (data.classes, data.shape, data.labels) == (10, (1, 28, 28), tuple("ABCDEFGHIJ"))
    assert y.dtype == torch.int64


def test_without_labels_all_samples_are_of_one_unknown_class(tmp_path: Path) -> None:
    write(tmp_path, "tinyimagenet32", x=COLOUR)
    data = tinyimagenet32(root=str(tmp_path))
    x, y = samples(data)
    assert torch.equal(x, torch.from_numpy(COLOUR).permute(0, 3, 1, 2))
    assert y.tolist() == [0] * 6
    assert (data.classes, data.labels) == (1, ("unknown",))


def test_labels_without_names_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "tinyimagenet32", x=COLOUR, y=Y)
    data = tinyimagenet32(root=str(tmp_path))
    assert (data.classes, data.labels) == (3, ())


def test_there_is_nothing_to_train_on(tmp_path: Path) -> None:
    write(tmp_path, "textures32", x=COLOUR, y=Y, names=NAMES)
    data = textures32(root=str(tmp_path))
    assert len(data.train) == 0
    assert data.remarks == ("only to test on: there are no train images",)
    x, y = data.train.fetch(torch.zeros(0, dtype=torch.int64))
    assert isinstance(x, Tensor)
    assert (x.shape, x.dtype, y.dtype) == ((0, 3, 32, 32), torch.uint8, torch.int64)


def test_a_limit_keeps_the_first_and_they_are_of_every_class(tmp_path: Path) -> None:
    write(tmp_path, "textures32", x=COLOUR, y=Y, names=NAMES)
    whole, few = textures32(root=str(tmp_path)), textures32(root=str(tmp_path), test_limit=3)
    assert samples(few)[1].tolist() == [0, 1, 2]
    assert torch.equal(samples(few)[0], samples(whole)[0][:3])
    assert few.classes == 3
    assert few.test.fingerprint() != whole.test.fingerprint() == textures32(root=str(tmp_path)).test.fingerprint()
    with pytest.raises(RecipeError, match="limit of 0"):
        textures32(root=str(tmp_path), test_limit=0)


def test_the_root_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "notmnist", x=GREY, y=Y)
    monkeypatch.setenv("PLATEAUX_DATA", str(tmp_path))
    assert len(notmnist().test) == 6


@pytest.mark.parametrize("name", ["textures32", "tinyimagenet32", "notmnist"])
def test_sets_are_found_by_name_and_say_where_they_were_looked_for(name: str, tmp_path: Path) -> None:
    make = dataset.get(name)
    assert dataset.describe()[name].endswith(".")
    with pytest.raises(DataError) as caught:
        make(root=str(tmp_path))
    for part in (f"{name}.npz", str(tmp_path / "ood"), "PLATEAUX_DATA", "http", "uint8"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": Y}, "holds x of"),
        ({"x": COLOUR[:0], "y": Y[:0]}, r"\[0, 32, 32, 3\]"),
        ({"x": COLOUR.astype(np.float32), "y": Y}, "float32"),
        ({"x": np.moveaxis(COLOUR, 3, 1), "y": Y}, r"\[6, 3, 32, 32\]"),
        ({"x": COLOUR[..., 0], "y": Y}, r"\[N, 32, 32, 3\]"),
        ({"x": COLOUR, "y": Y[:4]}, r"y of uint8 \[4\]"),
        ({"x": COLOUR, "y": Y / 2}, "float64"),
        ({"x": COLOUR, "y": Y, "names": NAMES[:2]}, "labels from 0 to 2"),
        ({"x": COLOUR, "y": Y.astype(np.int64) - 1}, "labels from -1"),
        ({"x": COLOUR, "y": Y, "names": np.array(["a", None, 3])}, "cannot be read"),  # pickled: never loaded
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    write(tmp_path, "textures32", **arrays)
    with pytest.raises(DataError, match=words) as caught:
        textures32(root=str(tmp_path))
    assert "textures32.npz" in str(caught.value)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


def _scribbled(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[100:120] = b"\xff" * 20  # within the packed bytes of x: zlib gives up before zipfile does
    file.write_bytes(raw)


def _nonsense(file: Path) -> None:
    file.write_bytes(b"nonsense")


def _lone(file: Path) -> None:
    with file.open("wb") as out:
        np.save(out, COLOUR)


@pytest.mark.parametrize("damage", [_cut, _scribbled, _nonsense, _lone], ids=lambda f: f.__name__)
def test_a_damaged_file_is_a_data_error_that_names_it(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    stripes = np.broadcast_to(np.arange(32, dtype=np.uint8)[:, None], COLOUR.shape)
    damage(write(tmp_path, "textures32", x=stripes, y=Y, names=NAMES))
    with pytest.raises(DataError, match=r"textures32\.npz"):
        textures32(root=str(tmp_path))


@pytest.mark.parametrize(
    ("make", "count", "classes"), [(textures32, 1200, 10), (tinyimagenet32, 2000, 200), (notmnist, 10_000, 10)]
)
def test_the_real_sets_are_read(make: Callable[..., DataSplits], count: int, classes: int) -> None:
    file = REAL / f"{make.__name__}.npz"
    if not file.is_file():
        pytest.skip(f"PLATEAUX_DATA holds no ood/{file.name}")
    data = make(root=str(REAL.parent))
    x, y = samples(data)
    assert (len(x), data.classes, x.dtype) == (count, classes, torch.uint8)
    assert tuple(x.shape[1:]) == data.shape
    assert len(data.labels) == classes
    with np.load(file) as held:  # the same images, in another order
        assert torch.equal(y.bincount(), torch.from_numpy(held["y"].astype(np.int64)).bincount())
        assert int(x.long().sum()) == int(held["x"].sum(dtype=np.int64))
    few = samples(make(root=str(REAL.parent), test_limit=100))[1]
    assert len(few.unique()) == min(100, len(y.unique()))
