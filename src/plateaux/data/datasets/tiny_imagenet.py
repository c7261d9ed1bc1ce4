"""Tiny ImageNet in its published folder layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from plateaux.core.errors import DataError
from plateaux.core.ranges import Count, Number, Positive
from plateaux.core.registry import dataset
from plateaux.data.files import (
    ImageFiles,
    data_root,
    interleave_classes,
    limited_count,
    missing_data_error,
    per_channel,
    read_lines,
    size_remarks,
)
from plateaux.data.sources import DataSplits, InMemorySource

PAGE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


@dataset
def tiny_imagenet(
    *,
    root: str | None = None,
    limit: Count | None = None,
    test_limit: Count | None = None,
    mean: Sequence[Number] | None = None,
    std: Sequence[Positive] | None = None,
) -> DataSplits:
    """Tiny ImageNet: 100,000 + 10,000 color photographs of 64 x 64 pixels in 200 classes; the test split is `val`."""
    folder = data_root(root) / "tiny-imagenet-200"
    for file in ("wnids.txt", "val/val_annotations.txt", "train"):
        if not (folder / file).exists():
            raise missing_data_error("Tiny ImageNet", expected=file, folder=folder, url=PAGE)
    classes = sorted(read_lines(folder / "wnids.txt"))
    train, test = _list_train(folder, classes), _list_validation(folder, classes)
    return DataSplits(
        "tiny_imagenet",
        train=_decode_all(train, limit),
        test=_decode_all(test, test_limit),
        classes=len(classes),
        shape=(3, 64, 64),
        mean=per_channel(mean, (0.480, 0.448, 0.397), 3),
        std=per_channel(std, (0.276, 0.269, 0.282), 3),
        labels=_class_names(folder, classes),
        remarks=tuple(size_remarks(len(train), len(test), (100_000, 10_000))),
    )


def _list_train(folder: Path, classes: Sequence[str]) -> ImageFiles:
    groups = [sorted(path.name for path in (folder / "train" / name / "images").glob("*.JPEG")) for name in classes]
    empty = [name for name, files in zip(classes, groups, strict=True) if not files]
    if empty:
        class_folder = folder / "train" / empty[0] / "images"
        raise missing_data_error(
            "Tiny ImageNet", expected=f"*.JPEG of {len(empty)} classes", folder=class_folder, url=PAGE
        )
    paths = [[f"{name}/images/{file}" for file in files] for name, files in zip(classes, groups, strict=True)]
    return ImageFiles(folder / "train", *interleave_classes(paths))


def _list_validation(folder: Path, classes: Sequence[str]) -> ImageFiles:
    """Read lines `val_0.JPEG <tab> n03444034 <tab> box`; samples keep the order of the file."""
    label = {name: i for i, name in enumerate(classes)}
    rows = [line.split("\t")[:2] for line in read_lines(folder / "val" / "val_annotations.txt")]
    if not rows or any(len(row) != 2 or row[1] not in label for row in rows):
        raise DataError(
            f"{folder / 'val' / 'val_annotations.txt'} has a line without a file name and one of the {len(classes)} "
            f"class names in wnids.txt. Download it again from {PAGE}."
        )
    return ImageFiles(folder / "val" / "images", [row[0] for row in rows], [label[row[1]] for row in rows])


def _decode_all(files: ImageFiles, limit: int | None) -> InMemorySource:
    count = limited_count(len(files), limit)
    x = torch.empty(count, 3, 64, 64, dtype=torch.uint8)
    for i in range(count):
        image, _ = files[i]
        if image.shape != x.shape[1:]:
            raise DataError(
                f"{files.root / files.names[i]} has shape {list(image.shape)}; Tiny ImageNet images have [3, 64, 64]. "
                f"Download it again from {PAGE}."
            )
        x[i] = image
    return InMemorySource(x, torch.tensor(files.labels[:count]))


def _class_names(folder: Path, classes: Sequence[str]) -> tuple[str, ...]:
    if not (folder / "words.txt").is_file():
        return tuple(classes)
    pairs = (line.partition("\t") for line in read_lines(folder / "words.txt"))
    descriptions = {name: text for name, _, text in pairs}
    return tuple(descriptions.get(name, name) for name in classes)
