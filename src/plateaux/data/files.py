"""Helpers of data sets: find, read, decode, and check files."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.data.images import SUFFIXES, decode_image
from plateaux.data.sources import InMemorySource


def data_root(root: str | None) -> Path:
    """Return the folder that contains the data sets: `root` if given, else $PLATEAUX_DATA, else `data`."""
    return Path(root or os.environ.get("PLATEAUX_DATA") or "data").expanduser()


def weights_file(name: str) -> Path:
    """Return the path of a weights file, looked up first as given, then under the data root ($PLATEAUX_DATA)."""
    path = Path(name).expanduser()
    return path if path.exists() or not (data_root(None) / path).exists() else data_root(None) / path


def data_path(path: str, root: str | None) -> Path:
    """Return the file or folder of a user: `path` in the data root, or in the current folder if it is only there.

    With `root`, only that folder is searched. The path "." is the data root itself.
    """
    in_root, here = data_root(root) / Path(path).expanduser(), Path(path).expanduser()
    return here if root is None and path != "." and not in_root.exists() and here.exists() else in_root


def missing_data_error(name: str, *, expected: str, folder: Path, url: str = "", also_here: bool = False) -> DataError:
    """Build the error for a data set that was not found: which files, in which folder, and where to download them.

    Without a URL it is the user's own, and the path is wrong.
    """
    also = " and in the current folder" if also_here else ""
    return DataError(
        f"{name} was not found: looked for {expected} in {str(folder.absolute())!r}{also}. "
        f"{f'Download it from {url} and unpack it there' if url else 'Correct the path'}, or set data.root or the "
        "environment variable PLATEAUX_DATA to the folder that contains it."
    )


def head(x: Tensor, y: Tensor, limit: int | None) -> InMemorySource:
    """Return the first `limit` samples as a source, or all samples if `limit` is None."""
    count = limited_count(len(y), limit)
    # Clone: a slice would keep the full tensors in memory.
    return InMemorySource(x[:count].clone(), y[:count].clone()) if count < len(y) else InMemorySource(x, y)


def take(x: Tensor, y: Tensor, start: int, limit: int | None, *, key: str = "start") -> InMemorySource:
    """Return `limit` samples from number `start` on, or all of them if `limit` is None.

    `key` is the name of the option `start`, for the error.
    """
    if start >= len(y):
        raise RecipeError(f"{key} = {start} leaves out all {len(y):,} samples. Set it to at most {len(y) - 1}.")
    return head(x[start:].clone(), y[start:].clone(), limit) if start else head(x, y, limit)


def limited_count(count: int, limit: int | None) -> int:
    """Return the number of samples after applying `limit` to `count` samples."""
    if limit is not None and limit < 1:
        raise RecipeError(f"limit = {limit} selects no samples. Set it to at least 1, or leave it unset.")
    return count if limit is None else min(count, limit)


def per_channel(values: Sequence[float] | None, default: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return `values` (a mean or std), or `default` if None, after checking that there is one value per channel."""
    result = tuple(float(v) for v in (default if values is None else values))
    if len(result) not in (0, channels):
        raise RecipeError(f"mean or std has {len(result)} values; images have {channels} channels. Give one each.")
    return result


def size_remarks(train: int, test: int, published: tuple[int, int]) -> list[str]:
    """Return a remark for each split whose number of images is not that of the published data set."""
    counts = ((train, published[0], "train"), (test, published[1], "test"))
    return [f"{n:,} of {wanted:,} {split} images" for n, wanted, split in counts if n != wanted]


def check_labels(y: Tensor, classes: int, *, path: object) -> None:
    """Raise DataError if a label is outside 0 .. classes-1."""
    if len(y) and not (int(y.min()) >= 0 and int(y.max()) < classes):
        raise DataError(
            f"{path} contains labels from {int(y.min())} to {int(y.max())}; allowed are 0 to {classes - 1}. "
            "The file is damaged or belongs to another data set. Download it again."
        )


class ImageFiles:
    """A map-style data set of image files, decoded by Pillow on access to uint8 `[channels, H, W]`.

    With `size`, the shorter side is resized to it and the center square is cropped.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Sequence[int],
        *,
        size: int | None = None,
        channels: int = 3,
    ) -> None:
        assert len(names) == len(labels), (len(names), len(labels))
        self.root, self.names, self.labels, self.size = root, tuple(names), tuple(labels), size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return decode(self.root / self.names[i], size=self.size, channels=self.channels), self.labels[i]

    def fingerprint(self) -> str:
        kind = f"{self.size}" if self.channels == 3 else f"{self.channels}x{self.size}"
        digest = blake2b(kind.encode(), digest_size=8)
        for name, label in zip(self.names, self.labels, strict=True):
            digest.update(f"{name}\x1f{label}\x1f{(self.root / name).stat().st_size}\n".encode())
        return digest.hexdigest()


def list_class_folders(root: Path, classes: Sequence[str], *, size: int, limit: int | None) -> ImageFiles:
    """Return the images of class folders, interleaved over the classes, whose positions are their labels."""
    names, labels = interleave_classes(
        [
            sorted(f"{name}/{file.name}" for file in (root / name).iterdir() if file.suffix.lower() in SUFFIXES)
            for name in classes
        ]
    )
    count = limited_count(len(names), limit)
    return ImageFiles(root, names[:count], labels[:count], size=size)


def decode(path: Path, *, size: int | None = None, channels: int = 3) -> Tensor:
    """Decode an image file to uint8 `[channels, H, W]`."""
    return torch.from_numpy(decode_image(path, size=size, channels=channels))


def interleave_classes(groups: Sequence[Sequence[str]]) -> tuple[list[str], list[int]]:
    """Interleave the files of the classes and return names and labels: the first of each class, the second of each ...

    For every n, the first n samples are then balanced over the classes.
    """
    ranked = [(rank, label, name) for label, names in enumerate(groups) for rank, name in enumerate(names)]
    ranked.sort(key=lambda entry: entry[:2])
    return [name for _, _, name in ranked], [label for _, label, _ in ranked]


def read_lines(path: Path) -> list[str]:
    """Return the non-empty lines of a text file."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def read_npz(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the arrays of these names in an .npz file, as far as it has them."""
    try:
        npz = np.load(path, allow_pickle=False)
        if not isinstance(npz, np.lib.npyio.NpzFile):
            raise DataError(f"{path} is a single array. Use an .npz file, or the folder that contains x.npy and y.npy.")
        with npz:
            return {name: npz[name] for name in npz.files if name in names}
    except (zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a complete .npz file ({error}). Write or download it again.") from error


def try_read(path: Path, read: Callable[[Path], Any]) -> Any:
    """Read a file with `read`; if that fails, raise a DataError with the path."""
    try:
        return read(path)
    except DataError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, MemoryError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}). It is damaged or incomplete; download it again.") from error
