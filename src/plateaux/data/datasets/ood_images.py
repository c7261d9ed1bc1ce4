"""Out-of-distribution images, for evaluation only.

Each data set is one file, `ood/<name>.npz`, with images `x` (uint8 `[N, H, W]` or `[N, H, W, 3]`) and optionally class
labels `y` and class `names`. All samples are in the test source; the train source is empty, so that no image is used
for both training and testing. Samples are interleaved over the classes, so that the first n are balanced. Without `y`,
every sample has class 0.

There is no mean or std: a model normalizes these images like its training data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plateaux.core.errors import DataError
from plateaux.core.ranges import Count
from plateaux.core.registry import dataset
from plateaux.data.files import check_labels, data_root, head, missing_data_error, read_npz, try_read
from plateaux.data.sources import DataSplits, InMemorySource

Arrays = Mapping[str, NDArray[Any]]


@dataset
def textures32(*, root: str | None = None, test_limit: Count | None = None) -> DataSplits:
    """Color textures at 32 x 32 pixels, a subset of the categories of DTD; test only, far-OOD for CIFAR."""
    return _load("textures32", root, test_limit, (3, 32, 32), "https://www.robots.ox.ac.uk/~vgg/data/dtd/")


@dataset
def tinyimagenet32(*, root: str | None = None, test_limit: Count | None = None) -> DataSplits:
    """Tiny ImageNet photographs at 32 x 32 pixels of classes not in CIFAR-10; test only, near-OOD for CIFAR."""
    page = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    return _load("tinyimagenet32", root, test_limit, (3, 32, 32), page)


@dataset
def notmnist(*, root: str | None = None, test_limit: Count | None = None) -> DataSplits:
    """Letters A to J in many fonts, 28 x 28 grayscale pixels; test only, OOD for MNIST."""
    page = "http://yaroslavvb.blogspot.com/2011/09/notmnist-dataset.html"
    return _load("notmnist", root, test_limit, (1, 28, 28), page, tuple("ABCDEFGHIJ"))


def _load(
    name: str, root: str | None, limit: int | None, shape: tuple[int, ...], page: str, names: tuple[str, ...] = ()
) -> DataSplits:
    file = data_root(root) / "ood" / f"{name}.npz"
    if not file.is_file():
        url = f"{page} (as an .npz with uint8 images x, class labels y, and class names)"
        raise missing_data_error(name, expected=file.name, folder=file.parent, url=url)
    arrays: Arrays = try_read(file, lambda path: read_npz(path, ("x", "y", "names")))
    x, y = _to_images(arrays, file, shape), _to_labels(arrays, file)
    names = tuple(str(class_name) for class_name in arrays.get("names", names)) if "y" in arrays else ("unknown",)
    classes = len(names) or int(y.max()) + 1
    check_labels(torch.from_numpy(y), classes, path=file)
    order = _interleaved_order(y)
    images, labels = torch.from_numpy(x[order]), torch.from_numpy(y[order])
    return DataSplits(
        name,
        train=InMemorySource(images[:0].clone(), labels[:0].clone()),
        test=head(images, labels, limit),
        classes=classes,
        shape=shape,
        labels=names,
        remarks=("test only: there are no train images",),
    )


def _to_images(arrays: Arrays, file: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return uint8 `[N, C, H, W]`."""
    x = arrays.get("x", np.zeros(0))
    layout = (*shape[1:], shape[0]) if shape[0] > 1 else shape[1:]
    if x.dtype != np.uint8 or x.shape[1:] != layout or not len(x):
        raise DataError(
            f"{file} contains x of {x.dtype} {list(x.shape)}. uint8 [N, {', '.join(map(str, layout))}] is needed."
        )
    return x[:, None] if shape[0] == 1 else np.ascontiguousarray(np.moveaxis(x, -1, 1))


def _to_labels(arrays: Arrays, file: Path) -> NDArray[np.int64]:
    count = len(arrays["x"])
    y = arrays.get("y", np.zeros(count, dtype=np.int64))
    if y.dtype.kind not in "iu" or y.shape != (count,):
        raise DataError(f"{file} contains y of {y.dtype} {list(y.shape)}. Integer class labels [{count}] are needed.")
    return y.astype(np.int64)


def _interleaved_order(y: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return positions: the first sample of each class, the second of each class ..."""
    by_class = np.argsort(y, kind="stable")
    starts = np.searchsorted(y[by_class], y[by_class])
    rank = np.empty_like(y)
    rank[by_class] = np.arange(len(y)) - starts
    return np.lexsort((y, rank))
