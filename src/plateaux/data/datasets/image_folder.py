"""Images in one folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plateaux.core.errors import DataError
from plateaux.core.ranges import Count, Number, Positive, Size
from plateaux.core.registry import dataset
from plateaux.data.files import (
    data_path,
    list_class_folders,
    missing_data_error,
    per_channel,
)
from plateaux.data.images import SUFFIXES
from plateaux.data.preprocessing import Preprocessing
from plateaux.data.sources import DatasetSource, DataSplits


@dataset
def image_folder(
    *,
    path: str = ".",
    size: Size = 224,
    root: str | None = None,
    limit: Count | None = None,
    test_limit: Count | None = None,
    mean: Sequence[Number] | None = None,
    std: Sequence[Positive] | None = None,
) -> DataSplits:
    """Images in class folders, `train/<class>/*.png` and `test/<class>/*.png` (or val), read on demand.

    The shorter side is resized to `size`, and the center square is cropped. Samples are interleaved over the classes,
    so that a limit keeps them balanced. The default mean and std are ImageNet's.
    """
    folder = data_path(path, root)
    test_split = next((name for name in ("test", "val") if (folder / name).is_dir()), None)
    if test_split is None or not (folder / "train").is_dir():
        raise missing_data_error(
            "The image folder",
            expected="train and test (or val)",
            folder=folder,
            also_here=root is None and path != ".",
        )
    classes = sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir())
    unknown = sorted({entry.name for entry in (folder / test_split).iterdir() if entry.is_dir()} - set(classes))
    if not classes or unknown:
        raise DataError(
            f"{folder / test_split} has classes {unknown} that are missing in {folder / 'train'} ({len(classes)} "
            "classes). Every class needs a folder in train."
        )
    return DataSplits(
        "folder",
        train=_build_source(folder / "train", classes, size, limit),
        test=_build_source(folder / test_split, classes, size, test_limit),
        classes=len(classes),
        shape=(3, size, size),
        mean=per_channel(mean, (0.485, 0.456, 0.406), 3),
        std=per_channel(std, (0.229, 0.224, 0.225), 3),
        labels=tuple(classes),
        preprocessing=Preprocessing(resize=size),
    )


def _build_source(folder: Path, classes: Sequence[str], size: int, limit: int | None) -> DatasetSource:
    files = list_class_folders(folder, classes, size=size, limit=limit)
    if not len(files):
        raise DataError(f"{folder} contains no images in its class folders. Supported suffixes: {sorted(SUFFIXES)}.")
    return DatasetSource(files, name=folder.name)
