"""Labeled images for a run: class folders and lists by path, with labels by the names of the run's classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from plateaux.core.errors import DataError
from plateaux.data.labeled_images import RelabeledSource, class_numbers, open_labeled_images
from plateaux.data.sources import InMemorySource

NAMES = ("cat", "dog", "great white shark", "owl", "shark")


def write_image(file: Path, value: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (value, value, value)).save(file)


def read(root: Path, path: str, names: tuple[str, ...] = NAMES) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Return the gray values of the images, their labels, and the classes of the set."""
    images = open_labeled_images(path, names, size=8, root=str(root))
    x, y = images.source.fetch(torch.arange(len(images.source)))
    assert isinstance(x, torch.Tensor)
    return [int(image[0, 0, 0]) for image in x], y.tolist(), images.classes


def test_class_folders_have_the_numbers_of_the_run_and_are_interleaved(tmp_path: Path) -> None:
    for value, name in enumerate(["shark/1.png", "shark/0.png", "dog/deep/b.png", "dog/a.png", "dog/c.png"]):
        write_image(tmp_path / "set" / name, 10 * value)
    (tmp_path / "set" / "owl").mkdir()  # a class without images is a class
    write_image(tmp_path / "set" / ".cache" / "x.png", 99)
    (tmp_path / "set" / "README.txt").write_text("published beside the folders")
    assert read(tmp_path, "./set") == ([30, 10, 40, 0, 20], [1, 4, 1, 4, 1], (1, 3, 4))


@pytest.mark.parametrize(
    ("lines", "labels"),
    [
        (["a.png dog", "my owls/b 1.png great white shark", "a.png shark"], [1, 2, 4]),
        (["a.png 4", "my owls/b 1.png 0", "a.png 4"], [4, 0, 4]),
    ],
)
def test_a_list_has_names_or_numbers_of_classes(tmp_path: Path, lines: list[str], labels: list[int]) -> None:
    write_image(tmp_path / "lists" / "a.png", 10)
    write_image(tmp_path / "lists" / "my owls" / "b 1.png", 20)
    (tmp_path / "lists" / "test.txt").write_text("\n".join(lines))
    assert read(tmp_path, "lists/test.txt") == ([10, 20, 10], labels, tuple(sorted(set(labels))))


def test_names_that_are_numbers_are_names(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", 10)
    (tmp_path / "test.txt").write_text("a.png 1\na.png 2\n")
    assert read(tmp_path, "test.txt", ("2", "0", "1"))[1] == [2, 0]


def test_classes_of_the_same_name_need_numbers(tmp_path: Path) -> None:
    names = ("crane", "owl", "crane")
    write_image(tmp_path / "set" / "owl" / "a.png", 10)
    (tmp_path / "test.txt").write_text("set/owl/a.png 2\nset/owl/a.png 0\n")
    assert read(tmp_path, "./set", names)[1:] == ([1], (1,))
    assert read(tmp_path, "test.txt", names)[1] == [2, 0]
    write_image(tmp_path / "set" / "crane" / "a.png", 10)
    with pytest.raises(DataError, match=r"several classes of this run are called 'crane'.*class numbers"):
        read(tmp_path, "./set", names)


def test_unknown_classes_are_named_with_those_of_the_run(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d", "dog", "e", "f"):
        write_image(tmp_path / "set" / name / "1.png", 1)
    with pytest.raises(DataError) as problem:
        read(tmp_path, "./set", (*NAMES, "whale"))
    text = str(problem.value)
    assert "has 6 of 7 classes that are not classes of this run: 'a', 'b', 'c', 'd', 'e', ..." in text
    assert "The run has 6 classes: 'cat', 'dog', 'great white shark', 'owl', 'shark', ..." in text
    assert "--ood far=" in text


def write_flat(root: Path) -> str:
    write_image(root / "flat" / "1.png", 1)
    return "./flat"


def write_empty(root: Path) -> str:
    (root / "empty" / "dog").mkdir(parents=True)
    return "./empty"


def write_linked(root: Path) -> str:
    write_image(root / "elsewhere" / "1.png", 1)
    write_image(root / "linked" / "cat" / "1.png", 1)
    (root / "linked" / "dog").symlink_to(root / "elsewhere", target_is_directory=True)
    return "./linked"


def write_list(text: str) -> Any:
    def write(root: Path) -> str:
        write_image(root / "a b.png", 1)
        (root / "test.txt").write_text(text)
        return "test.txt"

    return write


def write_bytes(root: Path) -> str:
    (root / "test.txt").write_bytes(b"\xff\xfe\x00\x81")
    return "test.txt"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda root: "./gone", "gone was not found in .* nor in the current folder"),
        (lambda root: root.mkdir(exist_ok=True) or (root / "none").mkdir() or "./none", "none contains no images"),
        (write_empty, "empty contains no images"),
        (write_flat, "no class folders, so the images have no labels.*--ood far="),
        (write_linked, "links, which are not followed: 'dog'"),
        (write_list("a b.png\n"), "1 images without a label, such as 'a b.png'.*--ood far="),
        (write_list("a b.png dog\na b.png -1\n"), "1 of 2 classes that are not classes of this run: '-1'"),
        (write_list("a b.png 5\n"), "not classes of this run: '5'. The run has 5 classes"),
        (write_list("a b.png dog\ngone.png cat\n"), "1 files that are missing.*'gone.png'"),
        (write_list("../a b.png dog\n"), "without .."),
        (write_list("\n"), "is empty"),
        (write_bytes, "cannot be read"),
    ],
)
def test_images_without_labels_of_the_run_are_refused(tmp_path: Path, write: Any, message: str) -> None:
    path = write(tmp_path)
    with pytest.raises(DataError, match=message):
        read(tmp_path, path)


def test_a_path_in_the_current_folder_is_found_although_the_run_has_a_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image(tmp_path / "here" / "set" / "dog" / "1.png", 7)
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "root").mkdir()
    assert read(tmp_path / "root", "./set") == ([7], [1], (1,))


def test_another_data_set_is_relabeled_and_its_fingerprint_has_the_labels() -> None:
    inner = InMemorySource(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1]))
    numbers = class_numbers(["shark", "cat"], NAMES, "other")
    source = RelabeledSource(inner, numbers)
    assert source.fetch(torch.tensor([2, 0]))[1].tolist() == [0, 4]
    assert len(source) == 3
    assert source.fingerprint() != RelabeledSource(inner, [3, 0]).fingerprint()
