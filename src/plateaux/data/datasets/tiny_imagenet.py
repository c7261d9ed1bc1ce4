"""Tiny ImageNet in its official folder layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from plateaux.core.errors import DataError
from plateaux.core.registry import dataset
from plateaux.data.files import (
    ImageFiles,
    channels,
    data_root,
    interleave_classes,
    limited_count,
    missing_data_error,
    read_lines,
)
from plateaux.data.sources import DataSplits, InMemorySource

PAGE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


@dataset
def tiny_imagenet(
    *,
    root: str | None = None,
    limit: int | None = None,
    test_limit: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> DataSplits:
    """Tiny ImageNet: 100,000 + 10,000 colour photographs of 64 x 64 pixels in 200 classes; its val part is the test."""
    folder = data_root(root) / "tiny-imagenet-200"
    for file in ("wnids.txt", "val/val_annotations.txt", "train"):
        if not (folder / file).exists():
            raise missing_data_error("Tiny ImageNet", wanted=file, where=folder, get=PAGE)
    classes = sorted(read_lines(folder / "wnids.txt"))
    train, test = _train(folder, classes), _validation(folder, classes)
    counts = ((len(train), 100_000, "train"), (len(test), 10_000, "test"))
    return DataSplits(
        "tiny_imagenet",
        train=_decoded(train, limit),
        test=_decoded(test, test_limit),
        classes=len(classes),
        shape=(3, 64, 64),
        mean=channels(mean, (0.480, 0.448, 0.397), 3),
        std=channels(std, (0.276, 0.269, 0.282), 3),
        labels=_words(folder, classes),
        remarks=tuple(f"{n:,} of {published:,} {split} images" for n, published, split in counts if n != published),
    )


def _train(folder: Path, classes: Sequence[str]) -> ImageFiles:
    groups = [sorted(path.name for path in (folder / "train" / name / "images").glob("*.JPEG")) for name in classes]
    empty = [name for name, files in zip(classes, groups, strict=True) if not files]
    if empty:
        where = folder / "train" / empty[0] / "images"
        raise missing_data_error("Tiny ImageNet", wanted=f"*.JPEG of {len(empty)} classes", where=where, get=PAGE)
    named = [[f"{name}/images/{file}" for file in files] for name, files in zip(classes, groups, strict=True)]
    return ImageFiles(folder / "train", *interleave_classes(named))


def _validation(folder: Path, classes: Sequence[str]) -> ImageFiles:
    """Read the lines `val_0.JPEG <tab> n03444034 <tab> box`; the file's order is the samples' order."""
    number = {name: i for i, name in enumerate(classes)}
    rows = [line.split("\t")[:2] for line in read_lines(folder / "val" / "val_annotations.txt")]
    if not rows or any(len(row) != 2 or row[1] not in number for row in rows):
        raise DataError(
            f"{folder / 'val' / 'val_annotations.txt'} has lines without a file and one of the {len(classes)} class "
            f"names in wnids.txt; get it again from {PAGE}."
        )
    return ImageFiles(folder / "val" / "images", [row[0] for row in rows], [number[row[1]] for row in rows])


def _decoded(files: ImageFiles, limit: int | None) -> InMemorySource:
    count = limited_count(len(files), limit)
    x = torch.empty(count, 3, 64, 64, dtype=torch.uint8)
    for i in range(count):
        image, _ = files[i]
        if image.shape != x.shape[1:]:
            raise DataError(
                f"{files.root / files.names[i]} has shape {list(image.shape)}; Tiny ImageNet has [3, 64, 64]."
            )
        x[i] = image
    return InMemorySource(x, torch.tensor(files.labels[:count]))


def _words(folder: Path, classes: Sequence[str]) -> tuple[str, ...]:
    if not (folder / "words.txt").is_file():
        return tuple(classes)
    pairs = (line.partition("\t") for line in read_lines(folder / "words.txt"))
    words = {name: text for name, _, text in pairs}
    return tuple(words.get(name, name) for name in classes)
