"""Reader of the published corrupted data sets: CIFAR-10-C, CIFAR-100-C, Tiny-ImageNet-C, ImageNet-C.

    <root>/CIFAR-10-C/fog.npy                  uint8 [50000, 32, 32, 3], severity s in rows (s - 1) 10000 .. s 10000
    <root>/CIFAR-10-C/labels.npy               [50000]
    <root>/Tiny-ImageNet-C/fog/3/<class>/*.JPEG
    <root>/ImageNet-C/fog/3/<class>/*.JPEG

Tiny-ImageNet-C was generated from crops of ImageNet validation images, which differ from the test images of Tiny
ImageNet: its accuracies have no clean counterpart there, and image i of one is unrelated to image i of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.types import Inputs
from plateaux.data.corruptions.severities import check_kind
from plateaux.data.files import ImageFiles, check_labels, interleave_classes, read_lines, try_read
from plateaux.data.sources import DatasetSource, Source

ARRAYS = {"cifar10": ("CIFAR-10-C", 10), "cifar100": ("CIFAR-100-C", 100)}
FOLDERS = {"tiny_imagenet": ("Tiny-ImageNet-C", 64), "imagenet": ("ImageNet-C", 224)}  # and their pixels
PAGE = "https://github.com/hendrycks/robustness"


def open_published(
    data_name: str,
    root: Path,
    name: str,
    severity: int,
    *,
    classes: int | None = None,
    folders: Sequence[str] = (),
    size: int | None = None,
) -> Source | None:
    """Return a source of the published images of one corruption and severity, or None if `root` has no matching files.

    With `classes`, a CIFAR file with another number of classes does not match (CIFAR-100-C has no coarse labels).
    `folders` lists the class folders in the order of their labels, like `DataSplits.labels` of an `image_folder`; they
    may be some of the published ones, and the default is all in sorted order. If none of them is published, nothing
    matches. `size` resizes images in folders to another size than the published one.
    """
    check_kind(name, severity)
    if data_name in ARRAYS:
        return _open_arrays(data_name, Path(root), name, severity, classes)
    if data_name in FOLDERS:
        return _open_folders(data_name, Path(root), name, severity, folders, size)
    return None


class PublishedArrays(Source):
    """A source over a slice of rows of a NumPy file of images `[N, H, W, 3]`, memory-mapped, and labels `[N]`."""

    def __init__(self, images: Path, labels: Tensor, rows: slice) -> None:
        self.images, self.y, self.rows = images, labels[rows], rows

    def __len__(self) -> int:
        return len(self.y)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        x = _load_memmap(self.images)[self.rows][ids.cpu().numpy()]
        return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), self.y[ids.cpu()]

    def fingerprint(self) -> str:
        x = np.ascontiguousarray(_load_memmap(self.images)[self.rows])
        digest = blake2b(f"{x.shape}".encode(), digest_size=8)
        digest.update(x.tobytes())
        digest.update(self.y.numpy().tobytes())
        return digest.hexdigest()


def _open_arrays(data_name: str, root: Path, name: str, severity: int, classes: int | None) -> Source | None:
    title, published = ARRAYS[data_name]
    file = root / title / f"{name}.npy"
    if not file.is_file() or classes not in (None, published):
        return None
    images, labels = _load_memmap(file), _load_labels(root / title / "labels.npy", published)
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3) or len(images) % 5 or len(images) != len(labels):
        raise DataError(
            f"{file} contains {images.dtype} {list(images.shape)} and there are {len(labels)} labels; {title} has "
            f"uint8 [50000, 32, 32, 3] and one label per image. Download it again from {PAGE}."
        )
    count = len(images) // 5
    return PublishedArrays(file, labels, slice((severity - 1) * count, severity * count))


def _load_labels(file: Path, classes: int) -> Tensor:
    if not file.is_file():
        raise DataError(f"{file} is missing. Download it from {PAGE}.")
    array = _load_memmap(file)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{file} contains {array.dtype} {list(array.shape)}; labels are integers [50000]. "
            f"Download it again from {PAGE}."
        )
    labels = torch.from_numpy(np.array(array, dtype=np.int64))
    check_labels(labels, classes, path=file)
    return labels


def _load_memmap(file: Path) -> Any:
    return try_read(file, lambda path: np.load(path, mmap_mode="r", allow_pickle=False))


def _open_folders(
    data_name: str, root: Path, name: str, severity: int, folders: Sequence[str], size: int | None
) -> Source | None:
    title, published = FOLDERS[data_name]
    folder = root / title / name / str(severity)
    if not folder.is_dir():
        return None
    present = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if folders and present and not set(folders) & set(present):
        return None  # images of other classes
    classes = list(folders) or _known_classes(data_name, root) or present
    missing, unknown = sorted(set(classes) - set(present)), sorted(set(present) - set(classes))
    if not present or missing or (unknown and not folders):
        raise DataError(
            f"{folder} has {len(present)} class folders for {len(classes)} classes: {missing[:3]} are missing, "
            f"{unknown[:3]} are unknown. Download it again from {PAGE}, or pass its class folders."
        )
    groups = [sorted(f"{label}/{path.name}" for path in (folder / label).glob("*.JPEG")) for label in classes]
    names, labels = interleave_classes(groups)
    if not names:
        raise DataError(f"{folder} contains no *.JPEG in its class folders. Download it again from {PAGE}.")
    return DatasetSource(ImageFiles(folder, names, labels, size=size or published), name=f"{title}/{name}/{severity}")


def _known_classes(data_name: str, root: Path) -> list[str]:
    """Return the classes of Tiny ImageNet in the order of its labels, if the data set is in `root` too."""
    file = root / "tiny-imagenet-200" / "wnids.txt"
    return sorted(read_lines(file)) if data_name == "tiny_imagenet" and file.is_file() else []
