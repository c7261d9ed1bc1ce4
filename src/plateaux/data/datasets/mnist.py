"""MNIST and Fashion-MNIST from IDX files, compressed or not."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from hashlib import md5
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.ranges import Count, CountOrZero, Number, Positive
from plateaux.core.registry import dataset
from plateaux.data.files import check_labels, data_root, missing_data_error, per_channel, size_remarks, take, try_read
from plateaux.data.sources import DataSplits

PUBLISHED = {  # md5 of the archives; a difference is only a remark, because subsets are allowed
    "mnist": {
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
    },
}
FASHION_CLASSES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"


FOLDERS = {
    "mnist": ("MNIST/raw", "MNIST", "mnist"),
    "fashion_mnist": ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "fashion_mnist"),
}
PAGES = {
    "mnist": "http://yann.lecun.com/exdb/mnist/",
    "fashion_mnist": "https://github.com/zalandoresearch/fashion-mnist",
}
MEAN_AND_STD = {"mnist": ((0.1307,), (0.3081,)), "fashion_mnist": ((0.2860,), (0.3530,))}


@dataset("mnist", kind="mnist")
@dataset("fashion_mnist", kind="fashion_mnist")
def idx_images(
    *,
    kind: Literal["mnist", "fashion_mnist"],
    root: str | None = None,
    start: CountOrZero = 0,
    limit: Count | None = None,
    test_start: CountOrZero = 0,
    test_limit: Count | None = None,
    mean: Sequence[Number] | None = None,
    std: Sequence[Positive] | None = None,
) -> DataSplits:
    """MNIST or Fashion-MNIST: 60,000 + 10,000 grayscale images of 28 x 28 pixels, of digits or of clothing.

    `start` and `limit` select training images in the order of the files, `test_start` and `test_limit` test images.
    """
    folder = _find(kind, root)
    (x, y), (test_x, test_y) = (_read_split(folder, stem) for stem in ("train", "t10k"))
    default_mean, default_std = MEAN_AND_STD[kind]
    return DataSplits(
        kind,
        train=take(x, y, start, limit),
        test=take(test_x, test_y, test_start, test_limit, key="test_start"),
        classes=10,
        shape=(1, 28, 28),
        mean=per_channel(mean, default_mean, 1),
        std=per_channel(std, default_std, 1),
        labels=tuple("0123456789") if kind == "mnist" else tuple(FASHION_CLASSES.split(",")),
        remarks=(*size_remarks(len(y), len(test_y), (60_000, 10_000)), *_hash_remarks(kind, folder)),
    )


def _find(name: str, root: str | None) -> Path:
    base, folders = data_root(root), FOLDERS[name]
    # Both data sets use the same file names, so files directly in the root are used only if the user set it.
    candidates = [base / folder for folder in folders] + ([base] if root else [])
    for folder in candidates:
        if all(_find_file(folder, stem) for stem in PUBLISHED[name]):
            return folder
    expected = f"{', '.join(PUBLISHED[name])} (each also as .gz) under {' or '.join(folders)}"
    raise missing_data_error(name, expected=expected, folder=base, url=PAGES[name])


def _find_file(folder: Path, stem: str) -> Path | None:
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def _read_split(folder: Path, stem: str) -> tuple[Tensor, Tensor]:
    images, labels = _find_file(folder, f"{stem}-images-idx3-ubyte"), _find_file(folder, f"{stem}-labels-idx1-ubyte")
    assert images is not None
    assert labels is not None
    x, y = try_read(images, lambda path: _read_idx(path, 3)), try_read(labels, lambda path: _read_idx(path, 1)).long()
    if x.shape[1:] != (28, 28) or len(x) != len(y):
        raise DataError(
            f"{images} has shape {list(x.shape)} and {labels} {list(y.shape)}. [N, 28, 28] and [N] are needed."
        )
    check_labels(y, 10, path=labels)
    return x[:, None], y


def _read_idx(path: Path, dims: int) -> Tensor:
    """Read an IDX file of bytes: two zeros, type 8, the number of dimensions, their sizes, then the data."""
    try:
        raw = bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    except zlib.error as error:
        raise DataError(f"{path} cannot be decompressed ({error}). It is damaged; download it again.") from error
    start = 4 + 4 * dims
    if len(raw) < start or raw[:4] != bytes((0, 0, 8, dims)):
        raise DataError(
            f"{path} starts with {bytes(raw[:4])!r}; this IDX file must start with {bytes((0, 0, 8, dims))!r}. "
            "Download it again."
        )
    shape = struct.unpack(f">{dims}I", raw[4:start])
    size = torch.Size(shape).numel()
    if size == 0 or len(raw) - start != size:
        raise DataError(
            f"{path} declares the shape {list(shape)}, {size} bytes, but contains {len(raw) - start} bytes. "
            "Download it again."
        )
    return torch.frombuffer(raw, dtype=torch.uint8, offset=start).view(shape)


def _hash_remarks(name: str, folder: Path) -> list[str]:
    archives = [(path, md5sum) for stem, md5sum in PUBLISHED[name].items() if (path := _find_file(folder, stem))]
    changed = [
        path.name
        for path, published in archives
        if path.suffix == ".gz" and md5(path.read_bytes(), usedforsecurity=False).hexdigest() != published
    ]
    return [f"md5 differs from the published archives: {', '.join(changed)}"] if changed else []
