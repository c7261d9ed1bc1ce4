"""CIFAR-10 and CIFAR-100 in the layouts their publisher offers: binary records, else Python pickles."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.registry import dataset
from plateaux.data.files import channels, check_labels, data_root, head, missing_data_error, read_lines, try_read
from plateaux.data.sources import DataSplits

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32


@dataset
def cifar10(
    *,
    root: str | None = None,
    limit: int | None = None,
    test_limit: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> DataSplits:
    """CIFAR-10: 50,000 + 10,000 colour photographs of 32 x 32 pixels in 10 classes."""
    batches = tuple(f"data_batch_{i}" for i in range(1, 6))
    layout = _Layout("CIFAR-10", "cifar-10-batches-bin", "cifar-10-batches-py", batches, "test_batch", 10)
    usual = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return _load(layout, "cifar10", root, (limit, test_limit), (mean, std), usual)


@dataset
def cifar100(
    *,
    coarse: bool = False,
    root: str | None = None,
    limit: int | None = None,
    test_limit: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> DataSplits:
    """CIFAR-100: 50,000 + 10,000 colour photographs of 32 x 32 pixels in 100 classes, or 20 coarse ones."""
    kind, classes = ("coarse", 20) if coarse else ("fine", 100)
    layout = _Layout("CIFAR-100", "cifar-100-binary", "cifar-100-python", ("train",), "test", classes, kind)
    usual = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return _load(layout, "cifar100", root, (limit, test_limit), (mean, std), usual)


@dataclass(frozen=True, slots=True)
class _Layout:
    title: str
    binary: str
    pickled: str
    train: tuple[str, ...]
    test: str
    classes: int
    kind: str = ""  # "fine" or "coarse": CIFAR-100 has both

    @property
    def names_file(self) -> str:
        return f"{self.kind}_label_names.txt" if self.kind else "batches.meta.txt"


Images = tuple[Tensor, Tensor]  # uint8 [N, 3, 32, 32], int64 [N]
Pair = tuple[Sequence[float] | None, Sequence[float] | None]


def _load(
    layout: _Layout,
    name: str,
    root: str | None,
    limits: tuple[int | None, int | None],
    given: Pair,
    usual: tuple[tuple[float, ...], tuple[float, ...]],
) -> DataSplits:
    folder, read, suffix = _find(layout, data_root(root))
    train = [try_read(folder / f"{file}{suffix}", read) for file in layout.train]
    x, y = torch.cat([part[0] for part in train]), torch.cat([part[1] for part in train])
    test_x, test_y = try_read(folder / f"{layout.test}{suffix}", read)
    return DataSplits(
        name,
        train=head(x, y, limits[0]),
        test=head(test_x, test_y, limits[1]),
        classes=layout.classes,
        shape=(3, 32, 32),
        mean=channels(given[0], usual[0], 3),
        std=channels(given[1], usual[1], 3),
        labels=_names(layout, folder),
        remarks=(*_counted(len(y), len(test_y)), *([] if suffix else _unpublished(layout, folder))),
    )


def _find(layout: _Layout, root: Path) -> tuple[Path, Callable[[Path], Images], str]:
    """Return the folder, how to read its files, and what their names end in."""
    for folder, suffix, read in (
        (root / layout.binary, ".bin", lambda path: _binary(path, layout)),
        (root / layout.pickled, "", lambda path: _pickled(path, layout)),
    ):
        if folder.is_dir():
            absent = [f + suffix for f in (*layout.train, layout.test) if not (folder / f"{f}{suffix}").is_file()]
            if absent:
                raise missing_data_error(layout.title, wanted=", ".join(absent), where=folder, get=PAGE)
            return folder, read, suffix
    raise missing_data_error(layout.title, wanted=f"{layout.binary} or {layout.pickled}", where=root, get=PAGE)


def _binary(path: Path, layout: _Layout) -> Images:
    """Read records of label bytes (coarse and fine for CIFAR-100) and the three colour planes."""
    label_bytes = 2 if layout.kind else 1
    record = label_bytes + PIXELS
    size = path.stat().st_size
    if size == 0 or size % record:
        raise DataError(f"{path} has {size} bytes, not a multiple of its record's {record}; get it again from {PAGE}.")
    records = torch.from_numpy(np.fromfile(path, dtype=np.uint8)).view(-1, record)
    y = records[:, 0 if layout.kind == "coarse" else label_bytes - 1].long()
    check_labels(y, layout.classes, where=path)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), y


def _pickled(path: Path, layout: _Layout) -> Images:
    held = _unpickle(path)
    field = f"{layout.kind}_labels" if layout.kind else "labels"
    absent = [name for name in ("data", field) if not isinstance(held, dict) or name not in held]
    if absent:
        raise DataError(f"{path} does not hold {' and '.join(absent)}; get it again from {PAGE}.")
    if not isinstance(held["data"], _Array):
        raise DataError(f"{path} holds no array of images; get it again from {PAGE}.")
    images, y = held["data"].pixels(), torch.tensor(held[field], dtype=torch.int64)
    if images.shape != (len(y), PIXELS):
        raise DataError(f"{path} holds images {images.shape}; {len(y)} labels need {(len(y), PIXELS)}.")
    check_labels(y, layout.classes, where=path)
    return torch.from_numpy(np.ascontiguousarray(images)).view(-1, 3, 32, 32), y


class _Array:
    """What stands in for a numpy array while unpickling: it only keeps what the file says."""

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
    """What stands in for a numpy dtype: only bytes are let through."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        if code != "u1":
            raise DataError(f"The pickle holds an array of type {code!r}; CIFAR's images are of type 'u1'. Refused.")

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


STAND_INS = {  # all that a CIFAR pickle, by any version of numpy and Python, asks for by name
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "numpy._core.numeric._frombuffer": _from_buffer,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Type,
    "_codecs.encode": _latin,  # how Python 3 writes bytes in an old protocol
}


class _OnlyArrays(pickle.Unpickler):
    """Unpickles plain containers and arrays of bytes; nothing outside this file is ever looked up or called."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return STAND_INS[f"{module}.{name}"]
        except KeyError:
            raise DataError(
                f"The pickle asks for {module}.{name}, which no CIFAR file needs: refused, for it may be hostile. "
                f"Get the set again from {PAGE}."
            ) from None


def _unpickle(path: Path) -> Any:
    try:
        # Python 2 wrote bytes for text; latin1 turns both names and pixels into what they were.
        return _OnlyArrays(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    except (pickle.UnpicklingError, AttributeError, IndexError, ImportError) as error:
        raise DataError(f"{path} is not a CIFAR pickle ({error}); get it again from {PAGE}.") from error


def _names(layout: _Layout, folder: Path) -> tuple[str, ...]:
    if (folder / layout.names_file).is_file():
        names = read_lines(folder / layout.names_file)
    else:
        meta = folder / ("meta" if layout.kind else "batches.meta")
        held = try_read(meta, _unpickle) if meta.is_file() else {}
        names = list(held.get(f"{layout.kind}_label_names" if layout.kind else "label_names", ()))
    return tuple(names) if len(names) == layout.classes else ()


def _counted(train: int, test: int) -> list[str]:
    counts = ((train, 50_000, "train"), (test, 10_000, "test"))
    return [f"{n:,} of {published:,} {split} images" for n, published, split in counts if n != published]


PUBLISHED = {  # md5 of the pickles as their publisher packed them
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}


def _unpublished(layout: _Layout, folder: Path) -> list[str]:
    files = (*layout.train, layout.test)
    other = [f for f in files if md5((folder / f).read_bytes(), usedforsecurity=False).hexdigest() != PUBLISHED[f]]
    return [f"other than the published files by md5: {', '.join(other)}"] if other else []
