"""MNIST and Fashion-MNIST from IDX files, compressed or not."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from hashlib import md5
from pathlib import Path

import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.registry import dataset
from plateaux.data.files import channels, check_labels, data_root, head, missing_data_error, try_read
from plateaux.data.sources import DataSplits

PUBLISHED = {  # md5 of the archives, for a remark only: a set with fewer images is a set too
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
GARMENTS = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"


@dataset
def mnist(
    *,
    root: str | None = None,
    limit: int | None = None,
    test_limit: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> DataSplits:
    """MNIST: 60,000 + 10,000 handwritten digits of 28 x 28 grey pixels."""
    folder = _find("mnist", root, ("MNIST/raw", "MNIST", "mnist"), "http://yann.lecun.com/exdb/mnist/")
    return _load("mnist", folder, (limit, test_limit), channels(mean, (0.1307,), 1), channels(std, (0.3081,), 1))


@dataset
def fashion_mnist(
    *,
    root: str | None = None,
    limit: int | None = None,
    test_limit: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> DataSplits:
    """Fashion-MNIST: 60,000 + 10,000 pictures of garments of 28 x 28 grey pixels in 10 classes."""
    places = ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "fashion_mnist")
    folder = _find("fashion_mnist", root, places, "https://github.com/zalandoresearch/fashion-mnist")
    mean, std = channels(mean, (0.2860,), 1), channels(std, (0.3530,), 1)
    return _load("fashion_mnist", folder, (limit, test_limit), mean, std)


def _find(name: str, root: str | None, places: tuple[str, ...], get: str) -> Path:
    base = data_root(root)
    # Both sets use the same file names: a bare root counts only where the user named it.
    candidates = [base / place for place in places] + ([base] if root else [])
    for folder in candidates:
        if all(_file(folder, stem) for stem in PUBLISHED[name]):
            return folder
    wanted = f"{', '.join(PUBLISHED[name])} (each also as .gz) under {' or '.join(places)}"
    raise missing_data_error(name, wanted=wanted, where=base, get=get)


def _file(folder: Path, stem: str) -> Path | None:
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def _load(
    name: str,
    folder: Path,
    limits: tuple[int | None, int | None],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> DataSplits:
    (x, y), (test_x, test_y) = (_split(folder, stem) for stem in ("train", "t10k"))
    counts = ((len(y), 60_000, "train"), (len(test_y), 10_000, "test"))
    return DataSplits(
        name,
        train=head(x, y, limits[0]),
        test=head(test_x, test_y, limits[1]),
        classes=10,
        shape=(1, 28, 28),
        mean=mean,
        std=std,
        labels=tuple("0123456789") if name == "mnist" else tuple(GARMENTS.split(",")),
        remarks=(
            *(f"{n:,} of {published:,} {split} images" for n, published, split in counts if n != published),
            *_unpublished(name, folder),
        ),
    )


def _split(folder: Path, stem: str) -> tuple[Tensor, Tensor]:
    images, labels = _file(folder, f"{stem}-images-idx3-ubyte"), _file(folder, f"{stem}-labels-idx1-ubyte")
    assert images is not None
    assert labels is not None
    x, y = try_read(images, lambda path: _idx(path, 3)), try_read(labels, lambda path: _idx(path, 1)).long()
    if x.shape[1:] != (28, 28) or len(x) != len(y):
        raise DataError(f"{images} holds {list(x.shape)} and {labels} {list(y.shape)}; [N, 28, 28] and [N] are needed.")
    check_labels(y, 10, where=labels)
    return x[:, None], y


def _idx(path: Path, dims: int) -> Tensor:
    """Read an IDX file of bytes: two zeros, type 8, the number of dimensions, their sizes, then the numbers."""
    try:
        raw = bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    except zlib.error as error:
        raise DataError(f"{path} cannot be unpacked ({error}); it is damaged: get it again.") from error
    start = 4 + 4 * dims
    if len(raw) < start or raw[:4] != bytes((0, 0, 8, dims)):
        raise DataError(
            f"{path} starts with {bytes(raw[:4])!r}; an IDX file here starts with {bytes((0, 0, 8, dims))!r}."
        )
    shape = struct.unpack(f">{dims}I", raw[4:start])
    size = torch.Size(shape).numel()
    if size == 0 or len(raw) - start != size:
        raise DataError(f"{path} promises {list(shape)}, {size} bytes, and holds {len(raw) - start}; get it again.")
    return torch.frombuffer(raw, dtype=torch.uint8, offset=start).view(shape)


def _unpublished(name: str, folder: Path) -> list[str]:
    archives = [(path, md5sum) for stem, md5sum in PUBLISHED[name].items() if (path := _file(folder, stem))]
    other = [
        path.name
        for path, published in archives
        if path.suffix == ".gz" and md5(path.read_bytes(), usedforsecurity=False).hexdigest() != published
    ]
    return [f"other than the published archives by md5: {', '.join(other)}"] if other else []
