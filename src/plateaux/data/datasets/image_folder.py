"""Any images that lie in folders named for their classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plateaux.core.errors import DataError
from plateaux.core.registry import dataset
from plateaux.data.files import ImageFiles, channels, data_root, interleave_classes, limited_count, missing_data_error
from plateaux.data.sources import DatasetSource, DataSplits

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}


@dataset
def image_folder(
    *,
    path: str = ".",
    size: int = 224,
    root: str | None = None,
    limit: int | None = None,
    test_limit: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> DataSplits:
    """Images in class folders, `train/<class>/*.png` and `test/<class>/*.png` (or val), read when needed.

    Images are scaled to `size` on their shorter side and cut square. The classes' files take turns in the order of
    ids, so a limit keeps the classes even. Mean and std are ImageNet's unless given.
    """
    place = data_root(root) / path
    test_part = next((name for name in ("test", "val") if (place / name).is_dir()), None)
    if test_part is None or not (place / "train").is_dir():
        raise missing_data_error(
            "The image folder", wanted="train and test (or val)", where=place, get="your own images"
        )
    labels = sorted(entry.name for entry in (place / "train").iterdir() if entry.is_dir())
    strange = sorted({entry.name for entry in (place / test_part).iterdir() if entry.is_dir()} - set(labels))
    if not labels or strange:
        raise DataError(
            f"{place / test_part} has classes {strange} that {place / 'train'} lacks (it has {len(labels)}); "
            "every class needs a folder in train."
        )
    return DataSplits(
        "folder",
        train=_source(place / "train", labels, size, limit),
        test=_source(place / test_part, labels, size, test_limit),
        classes=len(labels),
        shape=(3, size, size),
        mean=channels(mean, (0.485, 0.456, 0.406), 3),
        std=channels(std, (0.229, 0.224, 0.225), 3),
        labels=tuple(labels),
    )


def _source(place: Path, labels: Sequence[str], size: int, limit: int | None) -> DatasetSource:
    groups = [
        sorted(f"{label}/{file.name}" for file in (place / label).glob("*") if file.suffix.lower() in ENDINGS)
        for label in labels
    ]
    names, numbers = interleave_classes(groups)
    if not names:
        raise DataError(f"{place} holds no images in its class folders; names must end in one of {sorted(ENDINGS)}.")
    count = limited_count(len(names), limit)
    return DatasetSource(ImageFiles(place, names[:count], numbers[:count], size=size), name=place.name)
