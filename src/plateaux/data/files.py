"""Helpers of data sets: find, read, decode and check files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.data.sources import InMemorySource


def data_root(root: str | None) -> Path:
    """Return the folder data sets lie in: the option, else PLATEAUX_DATA, else `data`."""
    return Path(root or os.environ.get("PLATEAUX_DATA") or "data").expanduser()


def weights_file(name: str) -> Path:
    """Return where a file of weights lies: here, else under PLATEAUX_DATA, where data sets lie too."""
    path = Path(name).expanduser()
    return path if path.exists() or not (data_root(None) / path).exists() else data_root(None) / path


def missing_data_error(name: str, *, wanted: str, where: Path, get: str) -> DataError:
    """Return the error for a set that is not there: what was looked for, where, and how to get it."""
    return DataError(
        f"{name} was not found: looked for {wanted} in {str(where.absolute())!r}. Get it from {get} and unpack it "
        "there, or point the option data.root or the environment variable PLATEAUX_DATA at the folder that holds it."
    )


def head(x: Tensor, y: Tensor, limit: int | None) -> InMemorySource:
    """Return the first `limit` samples as a source, all of them when there is no limit."""
    count = limited_count(len(y), limit)
    # A slice would keep the whole set in memory.
    return InMemorySource(x[:count].clone(), y[:count].clone()) if count < len(y) else InMemorySource(x, y)


def limited_count(count: int, limit: int | None) -> int:
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


def interleave_classes(groups: Sequence[Sequence[str]]) -> tuple[list[str], list[int]]:
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
