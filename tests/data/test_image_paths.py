"""Images by path: folders, lists of files, and the published layouts of large image sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_runs import train_digits
from PIL import Image

import plateaux
from plateaux.core.errors import DataError
from plateaux.core.registry import dataset
from plateaux.data.image_paths import is_image_path, open_images

scipy_io = pytest.importorskip("scipy.io")


def write_image(file: Path, value: int, size: tuple[int, int] = (40, 48)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(file)


def values(source: Any) -> list[int]:
    x, _ = source.fetch(torch.arange(len(source)))
    return [int(image[0, 0, 0]) for image in x]


def test_a_folder_is_searched_and_ordered_by_name(tmp_path: Path) -> None:
    for number, name in enumerate(["b/2.png", "a/x/1.png", "a/0.png", "c.png"]):
        write_image(tmp_path / "photos" / name, 10 * number)
    (tmp_path / "photos" / "notes.txt").write_text("no image")
    source = open_images("./photos", size=32, root=str(tmp_path))
    assert values(source) == [20, 10, 0, 30]
    x, y = source.fetch(torch.tensor([0]))
    assert isinstance(x, torch.Tensor)
    assert (tuple(x.shape), x.dtype, y.tolist()) == ((1, 3, 32, 32), torch.uint8, [0])
    assert len(open_images("./photos", size=32, root=str(tmp_path), limit=2)) == 2


@pytest.mark.parametrize("place", ["lists", ".", "images_largescale", "images_classic"])
def test_a_list_names_files_with_or_without_labels(tmp_path: Path, place: str) -> None:
    for number, name in enumerate(["one 1.png", "sub/two.png"]):
        write_image(tmp_path / place / name, 50 * number)
    (tmp_path / "lists").mkdir(exist_ok=True)
    (tmp_path / "lists" / "test.txt").write_text("sub/two.png -1\none 1.png 7\n\nsub/two.png\n")
    assert values(open_images("lists/test.txt", size=8, root=str(tmp_path))) == [50, 0, 50]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("../secret.png", "without .."), ("/etc/x.png", "without .."), ("gone.png 1", "in none of")],
)
def test_a_wrong_list_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write_image(tmp_path / "secret.png", 1)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "test.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        open_images("lists/test.txt", size=8, root=str(tmp_path))


def test_missing_and_empty_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no images"):
        open_images("./empty", size=8, root=str(tmp_path))
    with pytest.raises(DataError, match="Expected: a folder of images, or a text file"):
        open_images("./nothing", size=8, root=str(tmp_path))


def test_names_of_data_sets_are_not_paths() -> None:
    assert not any(is_image_path(name) for name in dataset.names())


PAGES = {
    "imagenet_a": "imagenet-a", "imagenet_r": "imagenet-r", "imagenet_o": "imagenet-o", "textures": "dtd/images",
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_class_folders_are_read_in_the_published_layout(tmp_path: Path, name: str) -> None:
    for label, one in enumerate(["n01443537", "n01484850"]):
        for number in range(3):
            write_image(tmp_path / PAGES[name] / one / f"{number}.jpg", 100 * label + 20 * number)
    (tmp_path / PAGES[name] / "README.txt").write_text("published beside the folders")
    data = dataset.get(name)(root=str(tmp_path), size=16, test_limit=5)
    assert data.labels == ("n01443537", "n01484850")
    assert (len(data.train), len(data.test), data.shape, data.classes) == (0, 5, (3, 16, 16), 2)
    x, y = data.test.fetch(torch.arange(5))
    assert y.tolist() == [0, 1, 0, 1, 0]
    assert isinstance(x, torch.Tensor)
    assert x.shape == (5, 3, 16, 16)


@pytest.mark.parametrize(("name", "file"), [("inaturalist", "inaturalist"), ("openimages_o", "openimage_o")])
def test_image_lists_of_openood_are_read_in_the_published_layout(tmp_path: Path, name: str, file: str) -> None:
    folder = tmp_path / "benchmark_imglist" / "imagenet"
    folder.mkdir(parents=True)
    for number in range(3):
        write_image(tmp_path / "images_largescale" / name / "images" / f"{number}.jpg", 10 * number)
    lines = [f"{name}/images/{number}.jpg -1" for number in (2, 0, 1)]
    (folder / f"test_{file}.txt").write_text("\n".join(lines))
    data = dataset.get(name)(root=str(tmp_path), size=16)
    found = values(data.test)
    assert [abs(value - expected) <= 3 for value, expected in zip(found, [20, 0, 10], strict=True)] == [True] * 3


@pytest.mark.parametrize("folder", ["places365_standard/val/airfield", "val_256"])
def test_places365_is_read_in_both_published_layouts(tmp_path: Path, folder: str) -> None:
    for number in range(2):
        write_image(tmp_path / folder / f"Places365_val_{number:08d}.png", number)
    assert values(dataset.get("places365")(root=str(tmp_path), size=16).test) == [0, 1]


def test_svhn_is_read_from_its_published_file(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    (tmp_path / "svhn").mkdir()
    scipy_io.savemat(tmp_path / "svhn" / "test_32x32.mat", {"X": x, "y": np.array([[1], [10], [9], [10]])})
    data = dataset.get("svhn")(root=str(tmp_path), test_limit=3)
    found, y = data.test.fetch(torch.arange(3))
    assert y.tolist() == [1, 0, 9]
    assert torch.equal(found, torch.from_numpy(x.transpose(3, 2, 0, 1)[:3].copy()))
    (tmp_path / "svhn" / "test_32x32.mat").write_bytes(b"damaged")
    with pytest.raises(DataError, match="cannot be read"):
        dataset.get("svhn")(root=str(tmp_path))


@pytest.mark.parametrize("name", [*PAGES, "inaturalist", "openimages_o", "places365", "svhn"])
def test_the_error_for_missing_files_names_folder_and_download_page(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"was not found: looked for .* in '.*'\. Download it from http"):
        dataset.get(name)(root=str(tmp_path))


def test_a_path_can_be_an_ood_set_and_unlabeled_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    for number in range(40):
        pixels = generator.integers(0, 256, (20, 20, 3), dtype=np.uint8)
        (tmp_path / "noise").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "noise" / f"{number}.png")
    (tmp_path / "noise" / "list.txt").write_text("\n".join(f"{number}.png" for number in range(10)))
    monkeypatch.chdir(tmp_path)
    run = train_digits(tmp_path / "run", model={"name": "mlp", "hidden_sizes": [8]})
    found = plateaux.detect_ood(run, {"far": ["./noise", "noise/list.txt"]})
    names = {result.split for result in found}
    assert any("./noise" in name for name in names)
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 2,
            "data": {"name": "digits", "batch_size": 64, "unlabeled": "./noise@16", "unlabeled_batch_size": 8},
            "model": {"name": "mlp", "hidden_sizes": [8]},
            "method": {"name": "divdis"},
            "train": {"epochs": 1},
        }
    )
    plateaux.train(recipe, tmp_path / "joint")
