"""Published image sets for the evaluation of ImageNet networks, read on demand from their published layouts.

| data set | folder below the data root | layout |
|---|---|---|
| `imagenet_a`, `imagenet_r`, `imagenet_o` | `imagenet-a`, `imagenet-r`, `imagenet-o` | one folder per WordNet id |
| `inaturalist`, `openimages_o` | lists of OpenOOD 1.5 in `benchmark_imglist/imagenet` | images in `images_largescale` |
| `textures` | `dtd/images` | one folder per texture |
| `places365` | `places365_standard/val`, or `val_256` | one folder per scene, or files |
| `svhn` | `svhn/test_32x32.mat` | a file of MATLAB |

All samples are in the test source; the train source is empty.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from plateaux.core.errors import DataError
from plateaux.core.imports import optional_import
from plateaux.core.ranges import Count, Size
from plateaux.core.registry import dataset
from plateaux.data.files import (
    ImageFiles,
    check_labels,
    data_root,
    head,
    list_class_folders,
    missing_data_error,
)
from plateaux.data.image_paths import open_images
from plateaux.data.preprocessing import Preprocessing
from plateaux.data.sources import DatasetSource, DataSplits, InMemorySource, Source

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LISTS = "benchmark_imglist/imagenet"


@dataset
def imagenet_a(*, size: Size = 224, root: str | None = None, test_limit: Count | None = None) -> DataSplits:
    """ImageNet-A: 7,500 natural adversarial images of 200 ImageNet classes; test only."""
    page = "https://github.com/hendrycks/natural-adv-examples"
    return _by_class("imagenet_a", "imagenet-a", size, root, test_limit, page, classes=200)


@dataset
def imagenet_r(*, size: Size = 224, root: str | None = None, test_limit: Count | None = None) -> DataSplits:
    """ImageNet-R: 30,000 renditions (art, cartoons, toys, ...) of 200 ImageNet classes; test only."""
    return _by_class(
        "imagenet_r", "imagenet-r", size, root, test_limit, "https://github.com/hendrycks/imagenet-r", classes=200
    )


@dataset
def imagenet_o(*, size: Size = 224, root: str | None = None, test_limit: Count | None = None) -> DataSplits:
    """ImageNet-O: 2,000 images of classes outside of ImageNet-1k; test only, OOD for ImageNet."""
    page = "https://github.com/hendrycks/natural-adv-examples"
    return _by_class("imagenet_o", "imagenet-o", size, root, test_limit, page, classes=200)


@dataset
def textures(*, size: Size = 224, root: str | None = None, test_limit: Count | None = None) -> DataSplits:
    """DTD: 5,640 images of 47 textures; test only, far-OOD."""
    return _by_class("textures", "dtd/images", size, root, test_limit, "https://www.robots.ox.ac.uk/~vgg/data/dtd/", 47)


@dataset
def inaturalist(*, size: Size = 224, root: str | None = None, test_limit: Count | None = None) -> DataSplits:
    """Plants of iNaturalist: 10,000 images, in the list of OpenOOD; test only, far-OOD for ImageNet."""
    return _by_list("inaturalist", "test_inaturalist.txt", size, root, test_limit)


@dataset
def openimages_o(*, size: Size = 224, root: str | None = None, test_limit: Count | None = None) -> DataSplits:
    """OpenImage-O: 17,632 images, in the list of OpenOOD; test only, far-OOD for ImageNet."""
    return _by_list("openimages_o", "test_openimage_o.txt", size, root, test_limit)


@dataset
def places365(*, size: Size = 224, root: str | None = None, test_limit: Count | None = None) -> DataSplits:
    """Places365: 36,500 validation images of scenes; test only, far-OOD."""
    base = data_root(root)
    found = next((name for name in ("places365_standard/val", "val_256", "places365") if (base / name).is_dir()), None)
    if found is None:
        raise missing_data_error(
            "places365", expected="places365_standard/val or val_256", folder=base, url="http://places2.csail.mit.edu"
        )
    return _splits("places365", open_images(f"./{found}", size=size, root=str(base), limit=test_limit), size)


@dataset
def svhn(*, root: str | None = None, test_limit: Count | None = None) -> DataSplits:
    """SVHN: 26,032 test images of house numbers, 32 x 32 color pixels; test only, far-OOD for CIFAR."""
    file = data_root(root) / "svhn" / "test_32x32.mat"
    if not file.is_file():
        url = "http://ufldl.stanford.edu/housenumbers"
        raise missing_data_error("svhn", expected=file.name, folder=file.parent, url=url)
    loadmat = optional_import("scipy.io", extra="vision").loadmat
    try:
        tree = loadmat(file, variable_names=["X", "y"])
        x, y = np.asarray(tree["X"]), np.asarray(tree["y"]).reshape(-1)
    except Exception as problem:  # scipy has no common base class for its errors
        raise DataError(f"{file} cannot be read ({problem}). Download it again") from None
    if x.dtype != np.uint8 or x.shape[:3] != (32, 32, 3) or x.shape[3:] != y.shape:
        raise DataError(f"{file} contains X of {x.dtype} {list(x.shape)}. Expected: uint8 [32, 32, 3, N] and y [N]")
    images = torch.from_numpy(np.ascontiguousarray(x.transpose(3, 2, 0, 1)))
    labels = torch.from_numpy(y.astype(np.int64) % 10)  # the digit 0 has the label 10
    check_labels(labels, 10, path=file)
    empty = InMemorySource(images[:0].clone(), labels[:0].clone())
    return DataSplits(
        "svhn",
        train=empty,
        test=head(images, labels, test_limit),
        classes=10,
        shape=(3, 32, 32),
        labels=tuple("0123456789"),
        remarks=("test only: there are no train images",),
    )


def _by_class(
    name: str, folder: str, size: int, root: str | None, limit: int | None, page: str, classes: int
) -> DataSplits:
    place = data_root(root) / folder
    names = sorted(entry.name for entry in place.iterdir() if entry.is_dir()) if place.is_dir() else []
    files = list_class_folders(place, names, size=size, limit=limit)
    if not len(files):
        raise missing_data_error(name, expected=f"{classes} folders of images", folder=place, url=page)
    return _splits(name, DatasetSource(files, name=name), size, names)


def _by_list(name: str, file: str, size: int, root: str | None, limit: int | None) -> DataSplits:
    place = data_root(root) / LISTS / file
    if not place.is_file():
        url = "https://github.com/Jingkang50/OpenOOD (its script downloads lists and images)"
        raise missing_data_error(name, expected=file, folder=place.parent, url=url)
    return _splits(name, open_images(f"./{LISTS}/{file}", size=size, root=str(data_root(root)), limit=limit), size)


def _splits(name: str, test: Source, size: int, labels: list[str] | None = None) -> DataSplits:
    names = tuple(labels or ("unknown",))
    empty = DatasetSource(ImageFiles(Path(), [], [], size=size), name=f"{name} train")
    return DataSplits(
        name,
        train=empty,
        test=test,
        classes=len(names),
        shape=(3, size, size),
        mean=MEAN,
        std=STD,
        labels=names,
        preprocessing=Preprocessing(resize=size),
        remarks=("test only: there are no train images",),
    )
