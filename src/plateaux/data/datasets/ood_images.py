"""Images from elsewhere, to be met by networks that never saw their like: for tests of alarm, not to train on.

Each set is one file, `ood/<name>.npz`, with images `x` (uint8 `[N, H, W]` or `[N, H, W, 3]`) and, where it has them,
class numbers `y` and the classes' `names`. All samples are in the test source; the train source is empty, so that
nothing is trained and tested on the same images. Samples lie in turns, the first of every class, then the second of
every class, so that the first n are a fair small set. Without `y`, every sample is of the one class 0.

There is no mean or std: what a network meets is normalised as what it was trained on.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plateaux.core.errors import DataError
from plateaux.core.registry import dataset
from plateaux.data.files import check_labels, data_root, head, missing_data_error, try_read
from plateaux.data.sources import DataSplits, InMemorySource

Arrays = Mapping[str, NDArray[Any]]


@dataset
def textures32(*, root: str | None = None, test_limit: int | None = None) -> DataSplits:
    """Textures at 32 x 32 pixels in colour, some of the categories of DTD; only to test on, far from CIFAR."""
    return _load("textures32", root, test_limit, (3, 32, 32), "https://www.robots.ox.ac.uk/~vgg/data/dtd/")


@dataset
def tinyimagenet32(*, root: str | None = None, test_limit: int | None = None) -> DataSplits:
    """Tiny ImageNet photographs at 32 x 32 pixels of classes that CIFAR-10 lacks; only to test on, near CIFAR."""
    page = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    return _load("tinyimagenet32", root, test_limit, (3, 32, 32), page)


@dataset
def notmnist(*, root: str | None = None, test_limit: int | None = None) -> DataSplits:
    """Letters A to J in many typefaces, 28 x 28 grey pixels; only to test on, for networks that know MNIST."""
    page = "http://yaroslavvb.blogspot.com/2011/09/notmnist-dataset.html"
    return _load("notmnist", root, test_limit, (1, 28, 28), page, tuple("ABCDEFGHIJ"))


def _load(
    name: str, root: str | None, limit: int | None, shape: tuple[int, ...], page: str, names: tuple[str, ...] = ()
) -> DataSplits:
    file = data_root(root) / "ood" / f"{name}.npz"
    if not file.is_file():
        get = f"{page} (as an .npz of uint8 images x, class numbers y and their names)"
        raise missing_data_error(name, wanted=file.name, where=file.parent, get=get)
    held: Arrays = try_read(file, _npz)
    x, y = _images(held, file, shape), _labels(held, file)
    names = tuple(str(each) for each in held.get("names", names)) if "y" in held else ("unknown",)
    classes = len(names) or int(y.max()) + 1
    check_labels(torch.from_numpy(y), classes, where=file)
    order = _in_turns(y)
    images, labels = torch.from_numpy(x[order]), torch.from_numpy(y[order])
    return DataSplits(
        name,
        train=InMemorySource(images[:0].clone(), labels[:0].clone()),
        test=head(images, labels, limit),
        classes=classes,
        shape=shape,
        labels=names,
        remarks=("only to test on: there are no train images",),
    )


def _npz(file: Path) -> Arrays:
    try:
        with np.load(file, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files if name in ("x", "y", "names")}
    except (zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file} is not a whole .npz ({error}); get it again.") from error


def _images(held: Arrays, file: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return uint8 `[N, C, H, W]`."""
    x = held.get("x", np.zeros(0))
    layout = (*shape[1:], shape[0]) if shape[0] > 1 else shape[1:]
    if x.dtype != np.uint8 or x.shape[1:] != layout or not len(x):
        raise DataError(
            f"{file} holds x of {x.dtype} {list(x.shape)}; uint8 [N, {', '.join(map(str, layout))}] is needed."
        )
    return x[:, None] if shape[0] == 1 else np.ascontiguousarray(np.moveaxis(x, -1, 1))


def _labels(held: Arrays, file: Path) -> NDArray[np.int64]:
    count = len(held["x"])
    y = held.get("y", np.zeros(count, dtype=np.int64))
    if y.dtype.kind not in "iu" or y.shape != (count,):
        raise DataError(f"{file} holds y of {y.dtype} {list(y.shape)}; class numbers [{count}] are needed.")
    return y.astype(np.int64)


def _in_turns(y: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return positions: the first sample of every class, the second of every class ..."""
    by_class = np.argsort(y, kind="stable")
    starts = np.searchsorted(y[by_class], y[by_class])
    turn = np.empty_like(y)
    turn[by_class] = np.arange(len(y)) - starts
    return np.lexsort((y, turn))
