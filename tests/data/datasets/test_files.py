"""Image folders, Tiny ImageNet, and NumPy files, with small generated files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.data.datasets.arrays import arrays
from plateaux.data.datasets.image_folder import image_folder
from plateaux.data.datasets.tiny_imagenet import tiny_imagenet
from plateaux.data.loader import MemberLoader
from plateaux.data.sources import InMemorySource

Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)


def write_image(path: Path, pixels: Any) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def write_random_image(path: Path, *shape: int) -> Any:
    return write_image(path, RNG.integers(0, 256, shape, dtype=np.uint8))


def write_tiny_imagenet(root: Path) -> tuple[Path, list[str]]:
    base, names = root / "tiny-imagenet-200", ["n02", "n01", "n03"]
    base.mkdir()
    (base / "wnids.txt").write_text("\n".join(names) + "\n")
    (base / "words.txt").write_text("n01\tone, uno\nn02\ttwo\nn99\tother\n")
    for i, name in enumerate(sorted(names)):
        for k in range(3):
            write_image(
                base / f"train/{name}/images/{name}_{k}.JPEG",
                np.full((64, 64, 3), 40 * i + 10 * k, np.uint8),
            )
    lines = []
    for k, name in enumerate(["n03", "n01", "n01"]):
        write_image(base / f"val/images/val_{k}.JPEG", np.full((64, 64), 50 * k, np.uint8))  # grayscale
        lines.append(f"val_{k}.JPEG\t{name}\t0\t0\t63\t63")
    (base / "val/val_annotations.txt").write_text("\n".join(lines) + "\n")
    return base, sorted(names)


def test_tiny_imagenet_reads_its_published_layout(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    data = tiny_imagenet(root=str(tmp_path))
    assert isinstance(data.train, InMemorySource)
    assert isinstance(data.train.x, Tensor)
    assert data.train.x.shape == (9, 3, 64, 64)
    assert data.train.y.tolist() == [0, 1, 2] * 3
    gray = torch.tensor([40 * i + 10 * k for k in range(3) for i in range(3)])
    assert torch.equal(data.train.x.float().mean((1, 2, 3)).round().long(), gray)
    assert data.test.fetch(torch.arange(3))[1].tolist() == [2, 0, 0]
    assert data.labels == ("one, uno", "two", "n03")
    assert data.remarks == ("9 of 100,000 train images", "3 of 10,000 test images")
    assert len(tiny_imagenet(root=str(tmp_path), limit=4, test_limit=2).train) == 4


def test_tiny_imagenet_reports_missing_and_invalid_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"wnids\.txt.*tiny-imagenet-200\.zip"):
        tiny_imagenet(root=str(tmp_path))
    base, _ = write_tiny_imagenet(tmp_path)
    (base / "val/val_annotations.txt").write_text("val_0.JPEG\tn77\n")
    with pytest.raises(DataError, match="val_annotations"):
        tiny_imagenet(root=str(tmp_path))


def write_class_folders(root: Path) -> dict[str, Any]:
    shapes = {"train/cat/b.png": (8, 8, 3), "train/cat/a.png": (8, 8, 3), "train/dog/c.PNG": (8, 8, 3)}
    shapes |= {"test/dog/d.png": (8, 8, 3), "test/cat/e.png": (16, 12, 3)}
    (root / "train/cat").mkdir(parents=True)
    (root / "train/cat/notes.txt").write_text("not an image")
    return {name: write_random_image(root / name, *shape) for name, shape in shapes.items()}


def test_image_folders_are_read_on_demand(tmp_path: Path) -> None:
    truth = write_class_folders(tmp_path / "pets")
    data = image_folder(root=str(tmp_path), path="pets", size=8)
    assert data.labels == ("cat", "dog")
    assert (len(data.train), len(data.test)) == (3, 2)
    x, y = data.train.fetch(torch.arange(3))
    assert isinstance(x, Tensor)
    assert y.tolist() == [0, 1, 0]
    for image, name in zip(x, ("train/cat/a.png", "train/dog/c.PNG", "train/cat/b.png"), strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), truth[name])
    before = data.train.fingerprint()
    assert image_folder(root=str(tmp_path), path="pets", size=8).train.fingerprint() == before
    (tmp_path / "pets/train/cat/a.png").unlink()
    assert image_folder(root=str(tmp_path), path="pets", size=8).train.fingerprint() != before


def test_the_shorter_side_is_resized_and_the_center_square_cropped(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    bands = np.zeros((32, 16, 3), np.uint8)
    bands[8:24] = 200  # the center square of a tall image
    write_image(tmp_path / "test/cat/e.png", bands)
    x, _ = image_folder(root=str(tmp_path), size=16).test.fetch(torch.tensor([0]))
    assert isinstance(x, Tensor)
    assert (x == 200).all()
    small, _ = image_folder(root=str(tmp_path), size=4).test.fetch(torch.tensor([0, 1]))
    assert isinstance(small, Tensor)
    assert small.shape == (2, 3, 4, 4)


@pytest.mark.process
def test_workers_do_not_change_the_batches_of_an_image_folder(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    data = image_folder(root=str(tmp_path), size=8)
    in_process, in_workers = (
        [
            b.x
            for b in MemberLoader(data.train, torch.arange(3), batch_size=2, seed=1, classes=2, num_workers=w).epoch(0)
        ]
        for w in (0, 1)
    )
    assert all(torch.equal(a, b) for a, b in zip(in_process, in_workers, strict=True))  # type: ignore[arg-type]


def test_an_image_folder_reports_missing_and_invalid_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train and test \(or val\)"):
        image_folder(root=str(tmp_path))
    write_class_folders(tmp_path)
    (tmp_path / "train/cat/a.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"a\.png cannot be decoded as an image"):
        image_folder(root=str(tmp_path), size=8).train.fetch(torch.arange(3))
    (tmp_path / "test/bird").mkdir()
    with pytest.raises(DataError, match="bird"):
        image_folder(root=str(tmp_path))


def test_a_missing_pillow_is_reported_with_its_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_class_folders(tmp_path)
    data = image_folder(root=str(tmp_path), size=8)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"plateaux\[vision\]"):
        data.train.fetch(torch.arange(1))


def random_arrays(count: int = 10, shape: tuple[int, ...] = (5, 4, 3)) -> dict[str, Any]:
    return {"x": RNG.integers(0, 256, (count, *shape), dtype=np.uint8), "y": np.arange(count) % 3}


def random_split_arrays() -> dict[str, Any]:
    train, test = random_arrays(6), random_arrays(4)
    return {"x_train": train["x"], "y_train": train["y"], "x_test": test["x"], "y_test": test["y"]}


@pytest.mark.parametrize("as_folder", [False, True])
def test_arrays_with_a_test_set_are_read_unchanged(tmp_path: Path, as_folder: bool) -> None:
    contents = random_split_arrays()
    if as_folder:
        (tmp_path / "set").mkdir()
        for name, array in contents.items():
            np.save(tmp_path / "set" / f"{name}.npy", array)
    else:
        np.savez(tmp_path / "set.npz", **contents)
    data = arrays(root=str(tmp_path), path="set" if as_folder else "set.npz")
    x, y = data.train.fetch(torch.arange(6))
    assert isinstance(x, Tensor)
    assert np.array_equal(x.permute(0, 2, 3, 1).numpy(), contents["x_train"])
    assert y.tolist() == contents["y_train"].tolist()
    assert (data.shape, data.classes, len(data.test)) == ((3, 5, 4), 3, 4)


def test_arrays_without_a_test_set_are_split_by_the_seed(tmp_path: Path) -> None:
    contents = {"x": np.arange(20.0)[:, None], "y": np.arange(20) % 2, "names": np.array(["even", "odd"])}
    np.savez(tmp_path / "a.npz", **contents)
    data = arrays(root=str(tmp_path), path="a.npz", test=0.25)
    parts = [data.train.fetch(torch.arange(15))[0], data.test.fetch(torch.arange(5))[0]]
    assert torch.cat(parts).flatten().sort().values.tolist() == list(range(20))  # type: ignore[arg-type]
    assert parts[0].dtype == torch.float32  # type: ignore[union-attr]
    assert data.labels == ("even", "odd")
    other = arrays(root=str(tmp_path), path="a.npz", test=0.25, seed=1)
    assert other.train.fingerprint() != data.train.fingerprint()


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((5, 4, 3), "auto", (3, 5, 4)),
        ((3, 5, 4), "auto", (3, 5, 4)),
        ((5, 4), "auto", (1, 5, 4)),
        ((3, 5, 3), "auto", (3, 5, 3)),
        ((3, 5, 3), "channels_last", (3, 3, 5)),
        ((5, 4, 3), "channels_first", (5, 4, 3)),
    ],
)
def test_image_arrays_become_channels_first(tmp_path: Path, shape: Any, layout: Any, expected: Any) -> None:
    np.savez(tmp_path / "a.npz", **random_arrays(10, shape))
    assert arrays(root=str(tmp_path), path="a.npz", layout=layout).shape == expected


@pytest.mark.parametrize(
    "contents",
    [
        {"x": np.zeros((4, 2))},
        {"x": np.zeros((4, 2)), "y": np.zeros(3, int)},
        {"x": np.zeros((4, 2)), "y": np.zeros(4)},
        {"x": np.zeros((4, 2)), "y": np.array([0, 1, -1, 0])},
        {"x": np.array([["a"]] * 4), "y": np.zeros(4, int)},
        {"x": np.array([{}] * 4), "y": np.zeros(4, int)},  # needs pickle, which is disabled
    ],
)
def test_invalid_arrays_are_rejected(tmp_path: Path, contents: dict[str, Any]) -> None:
    np.savez(tmp_path / "a.npz", **contents)
    with pytest.raises(DataError, match=r"a\.npz"):
        arrays(root=str(tmp_path), path="a.npz")


def test_a_damaged_or_missing_array_file_raises_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="PLATEAUX_DATA"):
        arrays(root=str(tmp_path), path="a.npz")
    np.savez(tmp_path / "a.npz", **random_arrays())
    complete = (tmp_path / "a.npz").read_bytes()
    for damaged in (complete[:200], b"nonsense", b"", complete[:100] + b"\0" * 100 + complete[200:]):
        (tmp_path / "a.npz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.npz"):
            arrays(root=str(tmp_path), path="a.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match="single array"):
        arrays(root=str(tmp_path), path="one.npy")


def test_a_path_is_searched_in_the_data_root_and_then_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, here = tmp_path / "root", tmp_path / "here"
    for folder, classes in ((root, 3), (here, 4)):
        folder.mkdir()
        np.savez(folder / "both.npz", x=np.zeros((10, 2), np.float32), y=np.arange(10) % classes)
    np.savez(here / "mine.npz", x=np.zeros((10, 2), np.float32), y=np.arange(10) % 2)
    monkeypatch.setenv("PLATEAUX_DATA", str(root))
    monkeypatch.chdir(here)
    assert arrays(path="mine.npz").classes == 2
    assert arrays(path="both.npz").classes == 3  # the data root comes first
    with pytest.raises(DataError, match=r"looked for none.npz in '.*root' and in the current folder"):
        arrays(path="none.npz")
    with pytest.raises(DataError, match=r"looked for mine.npz in '.*root'\. "):
        arrays(path="mine.npz", root=str(root))
