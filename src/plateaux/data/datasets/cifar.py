"""CIFAR-10 and CIFAR-100 in both published formats: binary records, or else Python pickles."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import md5
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.ranges import Count, CountOrZero, Number, Positive
from plateaux.core.registry import dataset
from plateaux.data.files import (
    check_labels,
    data_root,
    missing_data_error,
    per_channel,
    read_lines,
    size_remarks,
    take,
    try_read,
)
from plateaux.data.sources import DataSplits

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32


MEAN_AND_STD = {
    10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


@dataset("cifar10", kind=10, coarse=False)
@dataset("cifar100", kind=100)
def cifar(
    *,
    kind: Literal[10, 100],
    coarse: bool = False,
    root: str | None = None,
    start: CountOrZero = 0,
    limit: Count | None = None,
    test_start: CountOrZero = 0,
    test_limit: Count | None = None,
    mean: Sequence[Number] | None = None,
    std: Sequence[Positive] | None = None,
) -> DataSplits:
    """CIFAR-10 or CIFAR-100: 50,000 + 10,000 color photographs of 32 x 32 pixels in 10 or 100 classes.

    `coarse` selects the 20 coarse classes of CIFAR-100. `start` and `limit` select training images in the order of the
    files, `test_start` and `test_limit` test images.
    """
    layout = CIFAR10 if kind == 10 else replace(CIFAR100, classes=20, kind="coarse") if coarse else CIFAR100
    folder, read, suffix = _find(layout, data_root(root))
    train = [try_read(folder / f"{file}{suffix}", read) for file in layout.train]
    x, y = torch.cat([part[0] for part in train]), torch.cat([part[1] for part in train])
    test_x, test_y = try_read(folder / f"{layout.test}{suffix}", read)
    default_mean, default_std = MEAN_AND_STD[kind]
    return DataSplits(
        f"cifar{kind}",
        train=take(x, y, start, limit),
        test=take(test_x, test_y, test_start, test_limit, key="test_start"),
        classes=layout.classes,
        shape=(3, 32, 32),
        mean=per_channel(mean, default_mean, 3),
        std=per_channel(std, default_std, 3),
        labels=_class_names(layout, folder),
        remarks=(
            *size_remarks(len(y), len(test_y), (50_000, 10_000)),
            *([] if suffix else _hash_remarks(layout, folder)),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    title: str
    binary: str
    pickled: str
    train: tuple[str, ...]
    test: str
    classes: int
    kind: str = ""  # "fine" or "coarse" for CIFAR-100, which has both

    @property
    def names_file(self) -> str:
        return f"{self.kind}_label_names.txt" if self.kind else "batches.meta.txt"


BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10 = _Layout("CIFAR-10", "cifar-10-batches-bin", "cifar-10-batches-py", BATCHES, "test_batch", 10)
CIFAR100 = _Layout("CIFAR-100", "cifar-100-binary", "cifar-100-python", ("train",), "test", 100, "fine")
Images = tuple[Tensor, Tensor]  # uint8 [N, 3, 32, 32], int64 [N]


def _find(layout: _Layout, root: Path) -> tuple[Path, Callable[[Path], Images], str]:
    """Return the folder, the function that reads its files, and their suffix."""
    for folder, suffix, read in (
        (root / layout.binary, ".bin", lambda path: _read_binary(path, layout)),
        (root / layout.pickled, "", lambda path: _read_pickle(path, layout)),
    ):
        if folder.is_dir():
            missing = [f + suffix for f in (*layout.train, layout.test) if not (folder / f"{f}{suffix}").is_file()]
            if missing:
                raise missing_data_error(layout.title, expected=", ".join(missing), folder=folder, url=PAGE)
            return folder, read, suffix
    raise missing_data_error(layout.title, expected=f"{layout.binary} or {layout.pickled}", folder=root, url=PAGE)


def _read_binary(path: Path, layout: _Layout) -> Images:
    """Read records of label bytes (coarse and fine for CIFAR-100) and three color planes."""
    label_bytes = 2 if layout.kind else 1
    record = label_bytes + PIXELS
    size = path.stat().st_size
    if size == 0 or size % record:
        raise DataError(
            f"{path} has {size} bytes, which is not a multiple of the record size {record}. "
            f"Download it again from {PAGE}."
        )
    records = torch.from_numpy(np.fromfile(path, dtype=np.uint8)).view(-1, record)
    y = records[:, 0 if layout.kind == "coarse" else label_bytes - 1].long()
    check_labels(y, layout.classes, path=path)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), y


def _read_pickle(path: Path, layout: _Layout) -> Images:
    contents = _unpickle(path)
    field = f"{layout.kind}_labels" if layout.kind else "labels"
    missing = [name for name in ("data", field) if not isinstance(contents, dict) or name not in contents]
    if missing:
        raise DataError(f"{path} does not contain {' and '.join(missing)}. Download it again from {PAGE}.")
    if not isinstance(contents["data"], _Array):
        raise DataError(f"{path} contains no array of images. Download it again from {PAGE}.")
    images, y = contents["data"].pixels(), torch.tensor(contents[field], dtype=torch.int64)
    if images.shape != (len(y), PIXELS):
        raise DataError(
            f"{path} contains images of shape {images.shape}; {len(y)} labels need {(len(y), PIXELS)}. "
            f"Download it again from {PAGE}."
        )
    check_labels(y, layout.classes, path=path)
    return torch.from_numpy(np.ascontiguousarray(images)).view(-1, 3, 32, 32), y


class _Array:
    """Stand-in for a NumPy array while unpickling: stores only the shape and the raw bytes."""

    shape: Any = ()
    raw: Any = b""
    order: Any = "C"

    def __setstate__(self, state: Any) -> None:
        _, self.shape, _, fortran, self.raw = state
        self.order = "F" if fortran else "C"

    def pixels(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        raw = self.raw.encode("latin1") if isinstance(self.raw, str) else bytes(self.raw)
        return np.frombuffer(bytearray(raw), dtype=np.uint8).reshape(self.shape, order=self.order)


class _Type:
    """Stand-in for a NumPy dtype: accepts only uint8."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        if code != "u1":
            raise DataError(
                f"The pickle contains an array of dtype {code!r}; CIFAR images have 'u1'. Download it from {PAGE}."
            )

    def __setstate__(self, state: Any) -> None:
        pass


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _from_buffer(raw: Any, kind: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.shape, array.raw, array.order = shape, raw, order
    return array


def _latin(text: str, _: str) -> bytes:
    return text.encode("latin1")


STAND_INS = {  # every global that a CIFAR pickle of any NumPy and Python version refers to
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "numpy._core.numeric._frombuffer": _from_buffer,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Type,
    "_codecs.encode": _latin,  # Python 3 pickles bytes this way in old protocols
}


class _OnlyArrays(pickle.Unpickler):
    """A restricted unpickler for containers and uint8 arrays; it never imports or calls code outside this file."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return STAND_INS[f"{module}.{name}"]
        except KeyError:
            raise DataError(
                f"The pickle refers to {module}.{name}, which no CIFAR file needs. It was not loaded because it may "
                f"be malicious. Download the data set again from {PAGE}."
            ) from None


def _unpickle(path: Path) -> Any:
    try:
        # Python 2 pickled str as bytes; latin1 restores both names and pixels.
        return _OnlyArrays(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    except (pickle.UnpicklingError, AttributeError, IndexError, ImportError) as error:
        raise DataError(f"{path} is not a CIFAR pickle ({error}). Download it again from {PAGE}.") from error


def _class_names(layout: _Layout, folder: Path) -> tuple[str, ...]:
    if (folder / layout.names_file).is_file():
        names = read_lines(folder / layout.names_file)
    else:
        meta = folder / ("meta" if layout.kind else "batches.meta")
        contents = try_read(meta, _unpickle) if meta.is_file() else {}
        names = list(contents.get(f"{layout.kind}_label_names" if layout.kind else "label_names", ()))
    return tuple(names) if len(names) == layout.classes else ()


PUBLISHED = {  # md5 of the published pickles
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}


def _hash_remarks(layout: _Layout, folder: Path) -> list[str]:
    files = (*layout.train, layout.test)
    changed = [f for f in files if md5((folder / f).read_bytes(), usedforsecurity=False).hexdigest() != PUBLISHED[f]]
    return [f"md5 differs from the published files: {', '.join(changed)}"] if changed else []
