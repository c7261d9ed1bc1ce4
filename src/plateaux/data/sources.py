"""Where samples come from: a Source hands out rows by their stable ids, a Data set has a train and a test source."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.types import Inputs, key, map_inputs


class Source(Protocol):
    """Samples with stable ids 0 .. N-1: the same sample under the same id in every epoch, order and process."""

    def __len__(self) -> int: ...

    def fetch(self, ids: Tensor) -> tuple[Inputs, Tensor]:
        """Return inputs `[B, ...]` and labels `[B]` of the samples `ids`."""

    def fingerprint(self) -> str:
        """Return a short hash of the samples and their order."""


@dataclass(frozen=True, slots=True)
class Extra:
    """Some samples of another set, without their labels, to train beside the labelled ones."""

    name: str
    source: Source
    ids: Tensor  # [n] which of the source's samples


@dataclass(frozen=True, slots=True)
class Data:
    """A data set: where its samples come from and what a model must know of them."""

    name: str
    train: Source
    test: Source
    classes: int
    shape: tuple[int, ...]  # of one input, channels first
    mean: tuple[float, ...] = ()  # per channel, of inputs in [0, 1]; empty: inputs are taken as they are
    std: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()  # the classes' names
    remarks: tuple[str, ...] = ()  # what differs from the published set: "20,000 of 50,000 train images"
    unlabelled: Extra | None = None  # what a recipe asks for besides


class Resident:
    """A source held whole in memory, on whatever device it was put.

    Images are kept as uint8 `[N, C, H, W]`: a quarter of the memory, and augmentation moves a quarter of the bytes.
    """

    def __init__(self, x: Inputs, y: Tensor) -> None:
        lengths = {len(t) for t in ([x] if isinstance(x, Tensor) else x.values())}
        assert lengths == {len(y)}, (lengths, len(y))
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.y)

    def fetch(self, ids: Tensor) -> tuple[Inputs, Tensor]:
        ids = ids.to(self.y.device)
        # index_select copies whole rows: twenty times as fast as x[ids] for images.
        return map_inputs(self.x, lambda t: t.index_select(0, ids)), self.y.index_select(0, ids)

    def to(self, device: torch.device) -> Resident:
        """Return this source with its samples on `device`."""
        return Resident(map_inputs(self.x, lambda t: t.to(device)), self.y.to(device))

    def fingerprint(self) -> str:
        digest = blake2b(digest_size=8)
        named = {"": self.x} if isinstance(self.x, Tensor) else dict(sorted(self.x.items()))
        for name, tensor in [*named.items(), ("", self.y)]:
            digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


class Streamed:
    """A source over any map-style `torch.utils.data.Dataset`, whose samples are read when they are asked for.

    With a `key`, every sample is read with the generators of torch, numpy and `random` seeded from (key, id): random
    transforms of the data set's own give the same sample in any batch, worker or process.
    """

    keyed = True

    def __init__(self, dataset: Any, *, name: str = "") -> None:
        self.dataset = dataset
        self.name = name or type(dataset).__name__

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, ids: Tensor, *, key: int | None = None) -> tuple[Inputs, Tensor]:
        if not len(ids):  # an empty share of a batch still has the shape of a sample
            x, y = self.fetch(torch.zeros(1, dtype=torch.int64), key=key)
            return map_inputs(x, lambda t: t[:0]), y[:0]
        if key is None:
            return collate([self.dataset[i] for i in ids.tolist()])
        with _generators_kept():
            return collate([self._seeded(i, key) for i in ids.tolist()])

    @property
    def told_apart(self) -> bool:
        """Whether the fingerprint is of the samples themselves, and not only of their number and kind."""
        return callable(getattr(self.dataset, "fingerprint", None))

    def fingerprint(self) -> str:
        own = getattr(self.dataset, "fingerprint", None)
        if callable(own):
            return str(own())
        return blake2b(f"{self.name}:{len(self)}".encode(), digest_size=8).hexdigest()

    def _seeded(self, i: int, base: int) -> Any:
        seed = key(base, i)
        # Only the CPU generator: torch.manual_seed would reset those of every accelerator too.
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return self.dataset[i]


@contextmanager
def _generators_kept() -> Iterator[None]:
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def collate(samples: Sequence[tuple[Any, Any]]) -> tuple[Inputs, Tensor]:
    """Lay `(input, label)` pairs side by side as torch's own loader does."""
    from torch.utils.data import default_collate

    x, y = default_collate(list(samples))
    return x, torch.as_tensor(y)


def from_dataset(
    train: Any,
    test: Any,
    *,
    classes: int,
    shape: Sequence[int],
    name: str = "",
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    labels: Sequence[str] = (),
) -> Data:
    """Make a Data set of two map-style `torch.utils.data.Dataset`s that give `(input, label)` pairs."""
    for role, given in (("train", train), ("test", test)):
        if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
            raise DataError(
                f"The {role} set is a {type(given).__name__} without a length or an index; samples need stable ids, "
                "so give a map-style Dataset with __len__ and __getitem__."
            )
    name = name or type(train).__name__
    sources = Streamed(train, name=f"{name}.train"), Streamed(test, name=f"{name}.test")
    return Data(name, *sources, classes, tuple(shape), tuple(mean), tuple(std), tuple(labels))


def from_tensors(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    classes: int,
    name: str = "tensors",
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    labels: Sequence[str] = (),
) -> Data:
    """Make a Data set of tensors in memory: `(inputs, labels)` to train on and to test on, channels first."""
    sources = Resident(*train), Resident(*test)
    return Data(name, *sources, classes, tuple(train[0].shape[1:]), tuple(mean), tuple(std), tuple(labels))


# What data/*.py share.


def data_root(root: str | None) -> Path:
    """Return the folder data sets lie in: the option, else PLATEAUX_DATA, else `data`."""
    return Path(root or os.environ.get("PLATEAUX_DATA") or "data").expanduser()


def weights_file(name: str) -> Path:
    """Return where a file of weights lies: here, else under PLATEAUX_DATA, where data sets lie too."""
    path = Path(name).expanduser()
    return path if path.exists() or not (data_root(None) / path).exists() else data_root(None) / path


def missing(name: str, *, wanted: str, where: Path, get: str) -> DataError:
    """Return the error for a set that is not there: what was looked for, where, and how to get it."""
    return DataError(
        f"{name} was not found: looked for {wanted} in {str(where.absolute())!r}. Get it from {get} and unpack it "
        "there, or point the option data.root or the environment variable PLATEAUX_DATA at the folder that holds it."
    )


def first(x: Tensor, y: Tensor, limit: int | None) -> Resident:
    """Return the first `limit` samples as a source, all of them when there is no limit."""
    count = kept(len(y), limit)
    # A slice would keep the whole set in memory.
    return Resident(x[:count].clone(), y[:count].clone()) if count < len(y) else Resident(x, y)


def kept(count: int, limit: int | None) -> int:
    """Return how many of `count` samples a limit leaves."""
    if limit is not None and limit < 1:
        raise RecipeError(f"A limit of {limit} samples leaves none; give at least 1, or no limit.")
    return count if limit is None else min(count, limit)


def channels(given: Sequence[float] | None, usual: Sequence[float], count: int) -> tuple[float, ...]:
    """Return the mean or std given for `count` channels, else the usual one."""
    values = tuple(float(v) for v in (usual if given is None else given))
    if len(values) not in (0, count):
        raise RecipeError(f"mean and std need one number for each of the {count} channels; {len(values)} were given.")
    return values


def check_labels(y: Tensor, classes: int, *, where: object) -> None:
    """Refuse labels outside 0 .. classes-1."""
    if len(y) and not (int(y.min()) >= 0 and int(y.max()) < classes):
        raise DataError(
            f"{where} holds labels from {int(y.min())} to {int(y.max())}; {classes} classes need 0 to {classes - 1}. "
            "The file is damaged or of another set: get it again."
        )


class ImageFiles:
    """Image files and their labels as a map-style data set of uint8 `[3, H, W]`, decoded by Pillow when asked for.

    With a `size`, the shorter side is scaled to it and the middle square is kept.
    """

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int], *, size: int | None = None) -> None:
        assert len(names) == len(labels), (len(names), len(labels))
        self.root, self.names, self.labels, self.size = root, tuple(names), tuple(labels), size

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return decode(self.root / self.names[i], size=self.size), self.labels[i]

    def fingerprint(self) -> str:
        digest = blake2b(f"{self.size}".encode(), digest_size=8)
        for name, label in zip(self.names, self.labels, strict=True):
            digest.update(f"{name}\x1f{label}\x1f{(self.root / name).stat().st_size}\n".encode())
        return digest.hexdigest()


def decode(path: Path, *, size: int | None = None) -> Tensor:
    """Return an image file as uint8 `[3, H, W]`."""
    image_module = _pillow()
    try:
        with image_module.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} cannot be read as an image ({error}); replace the file or take it out.") from error
    if size is not None and image.size != (size, size):
        scale = size / min(image.size)
        width, height = (max(size, round(side * scale)) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), image_module.Resampling.BILINEAR)
        image = image.crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("Image files are decoded by Pillow; install it with: pip install 'plateaux[vision]'") from error
    return Image


def balanced(groups: Sequence[Sequence[str]]) -> tuple[list[str], list[int]]:
    """Return names and labels of the classes' files in turn: the first of every class, the second of every class ...

    So the first n samples are a fair small set, whatever n.
    """
    ranked = [(rank, label, name) for label, names in enumerate(groups) for rank, name in enumerate(names)]
    ranked.sort(key=lambda entry: entry[:2])
    return [name for _, _, name in ranked], [label for _, label, _ in ranked]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file that are not empty."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def try_read(path: Path, read: Callable[[Path], Any]) -> Any:
    """Read a file, turning whatever its damage raises into a DataError that names it."""
    try:
        return read(path)
    except DataError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, MemoryError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); it is damaged or incomplete: get it again.") from error
