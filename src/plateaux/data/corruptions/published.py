"""The published corrupted sets, where they are on disk: CIFAR-10-C, CIFAR-100-C, Tiny-ImageNet-C, ImageNet-C.

    <root>/CIFAR-10-C/fog.npy                  uint8 [50000, 32, 32, 3], severity s in rows (s - 1) 10000 .. s 10000
    <root>/CIFAR-10-C/labels.npy               [50000]
    <root>/Tiny-ImageNet-C/fog/3/<class>/*.JPEG
    <root>/ImageNet-C/fog/3/<class>/*.JPEG

Tiny-ImageNet-C was made from cuts of ImageNet's validation photographs, which are not the images of Tiny ImageNet's own
test: its accuracies have no clean counterpart there, and image i of one has nothing to do with image i of the other.
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
    """Return the published images of one corruption and severity, or None where `root` has none that fit.

    With `classes`, a CIFAR file whose labels are of another number of classes does not fit (CIFAR-100-C has no coarse
    labels). `folders` names the class folders in the order of their labels, as `Data.labels` of a `folder` set does;
    else they count in sorted order. `size` cuts images in folders to another size than the published one.
    """
    check_kind(name, severity)
    if data_name in ARRAYS:
        return _rows_of_arrays(data_name, Path(root), name, severity, classes)
    if data_name in FOLDERS:
        return _files_in_folders(data_name, Path(root), name, severity, folders, size)
    return None


class PublishedArrays(Source):
    """A source over a run of rows of two numpy files, images `[N, H, W, 3]` and labels `[N]`, mapped when read."""

    def __init__(self, images: Path, labels: Tensor, rows: slice) -> None:
        self.images, self.y, self.rows = images, labels[rows], rows

    def __len__(self) -> int:
        return len(self.y)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        x = _mapped(self.images)[self.rows][ids.cpu().numpy()]
        return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), self.y[ids.cpu()]

    def fingerprint(self) -> str:
        x = np.ascontiguousarray(_mapped(self.images)[self.rows])
        digest = blake2b(f"{x.shape}".encode(), digest_size=8)
        digest.update(x.tobytes())
        digest.update(self.y.numpy().tobytes())
        return digest.hexdigest()


def _rows_of_arrays(data_name: str, root: Path, name: str, severity: int, classes: int | None) -> Source | None:
    title, published = ARRAYS[data_name]
    file = root / title / f"{name}.npy"
    if not file.is_file() or classes not in (None, published):
        return None
    images, labels = _mapped(file), _labels(root / title / "labels.npy", published)
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3) or len(images) % 5 or len(images) != len(labels):
        raise DataError(
            f"{file} holds {images.dtype} {list(images.shape)} beside {len(labels)} labels; {title} has uint8 "
            f"[50000, 32, 32, 3], five severities of as many images as labels. Get it again from {PAGE}."
        )
    count = len(images) // 5
    return PublishedArrays(file, labels, slice((severity - 1) * count, severity * count))


def _labels(file: Path, classes: int) -> Tensor:
    if not file.is_file():
        raise DataError(f"{file} is missing beside the images; get it from {PAGE}.")
    held = _mapped(file)
    if held.ndim != 1 or held.dtype.kind not in "iu":
        raise DataError(f"{file} holds {held.dtype} {list(held.shape)}; labels are whole numbers [50000].")
    labels = torch.from_numpy(np.array(held, dtype=np.int64))
    check_labels(labels, classes, where=file)
    return labels


def _mapped(file: Path) -> Any:
    return try_read(file, lambda path: np.load(path, mmap_mode="r", allow_pickle=False))


def _files_in_folders(
    data_name: str, root: Path, name: str, severity: int, folders: Sequence[str], size: int | None
) -> Source | None:
    title, published = FOLDERS[data_name]
    place = root / title / name / str(severity)
    if not place.is_dir():
        return None
    present = sorted(entry.name for entry in place.iterdir() if entry.is_dir())
    classes = list(folders) or _known(data_name, root) or present
    if not present or set(present) != set(classes):
        absent, strange = sorted(set(classes) - set(present)), sorted(set(present) - set(classes))
        raise DataError(
            f"{place} has {len(present)} class folders for {len(classes)} classes: {absent[:3]} are missing, "
            f"{strange[:3]} are unknown. Labels would not fit; get it again from {PAGE}, or give its folders."
        )
    groups = [sorted(f"{label}/{path.name}" for path in (place / label).glob("*.JPEG")) for label in classes]
    names, labels = interleave_classes(groups)
    if not names:
        raise DataError(f"{place} holds no *.JPEG in its class folders; get it again from {PAGE}.")
    return DatasetSource(ImageFiles(place, names, labels, size=size or published), name=f"{title}/{name}/{severity}")


def _known(data_name: str, root: Path) -> list[str]:
    """Return Tiny ImageNet's classes in the order of its labels, where the set itself lies beside."""
    file = root / "tiny-imagenet-200" / "wnids.txt"
    return sorted(read_lines(file)) if data_name == "tiny_imagenet" and file.is_file() else []
