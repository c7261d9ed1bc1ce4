"""Data sets that lie in numpy files: one .npz, or a folder of .npy."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.registry import dataset
from plateaux.core.types import derive_seed
from plateaux.data.files import channels, check_labels, data_root, head, missing_data_error, try_read
from plateaux.data.sources import DataSplits

NAMES = ("x_train", "y_train", "x_test", "y_test")
Layout = Literal["guess", "channels_first", "channels_last"]


@dataset
def arrays(
    *,
    path: str,
    layout: Layout = "guess",
    classes: int | None = None,
    test: float = 0.2,
    seed: int = 0,
    root: str | None = None,
    limit: int | None = None,
    test_limit: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> DataSplits:
    """Arrays from one .npz or a folder of .npy: x_train, y_train, x_test, y_test; or x and y, split by a seed.

    uint8 `[N, H, W]` are grey images, uint8 `[N, H, W, 3]` colour ones. The share `test` is held out where there is no
    test set.
    """
    file = data_root(root) / path
    held = _held(file)
    x, y, test_x, test_y = _parts(held, file, test, seed)
    inputs, test_inputs = _inputs(x, layout, file), _inputs(test_x, layout, file)
    numbers, test_numbers = _labels(y, file), _labels(test_y, file)
    if inputs.shape[1:] != test_inputs.shape[1:]:
        raise DataError(f"{file}: train inputs are {list(inputs.shape)}, test inputs {list(test_inputs.shape)}.")
    count = classes or int(max(numbers.max(), test_numbers.max())) + 1
    for part in (numbers, test_numbers):
        check_labels(part, count, where=file)
    shape = tuple(inputs.shape[1:])
    return DataSplits(
        "arrays",
        train=head(inputs, numbers, limit),
        test=head(test_inputs, test_numbers, test_limit),
        classes=count,
        shape=shape,
        mean=channels(mean, (), shape[0] if shape else 1),
        std=channels(std, (), shape[0] if shape else 1),
        labels=tuple(str(name) for name in held["names"]) if len(held.get("names", ())) == count else (),
    )


def _held(file: Path) -> Mapping[str, np.ndarray[Any, Any]]:
    if file.is_dir():
        found = {p.stem: p for p in sorted(file.glob("*.npy")) if p.stem in (*NAMES, "x", "y", "names")}
        return {name: try_read(p, lambda p: np.load(p, allow_pickle=False)) for name, p in found.items()}
    if not file.is_file():
        raise missing_data_error("The arrays", wanted=file.name, where=file.parent, get="your own files")
    held: dict[str, np.ndarray[Any, Any]] = try_read(file, _npz)
    return held


def _npz(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        opened = np.load(file, allow_pickle=False)
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise DataError(f"{file} is a single array; give an .npz, or the folder that holds x.npy and y.npy.")
        with opened:
            return {name: opened[name] for name in opened.files if name in (*NAMES, "x", "y", "names")}
    except zipfile.BadZipFile as error:
        raise DataError(f"{file} is not a whole .npz ({error}); write it again.") from error


def _parts(
    held: Mapping[str, np.ndarray[Any, Any]], file: Path, test: float, seed: int
) -> tuple[np.ndarray[Any, Any], ...]:
    """Return x, y, test x, test y."""
    if all(name in held for name in NAMES):
        found = tuple(held[name] for name in NAMES)
    elif "x" in held and "y" in held:
        x, y = held["x"], held["y"]
        if not 0 < test < 1:
            raise RecipeError(f"test = {test} is not a share between 0 and 1, and {file} has no test set of its own.")
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(derive_seed(seed, "arrays"))).numpy()
        out, kept = np.sort(order[: round(len(y) * test)]), np.sort(order[round(len(y) * test) :])
        found = (x[kept], y[kept], x[out], y[out]) if len(x) == len(y) else (x, y, x, y)
    else:
        raise DataError(f"{file} holds {sorted(held) or 'none'} of the arrays needed: {', '.join(NAMES)}; or x and y.")
    if len(found[0]) != len(found[1]) or len(found[2]) != len(found[3]) or not len(found[1]) or not len(found[3]):
        raise DataError(
            f"{file} holds {[len(part) for part in found]} rows; each x needs a y, and no part may be empty."
        )
    return found


def _inputs(x: np.ndarray[Any, Any], layout: Layout, file: Path) -> Tensor:
    if x.dtype.kind not in "fiub":
        raise DataError(f"{file} holds inputs of type {x.dtype}; numbers are needed.")
    if x.dtype != np.uint8:  # tokens stay whole numbers, everything else becomes what models take
        return torch.from_numpy(x.astype(np.float32 if x.dtype.kind in "fb" else np.int64))
    if x.ndim == 3:
        x = x[:, None]
    guessed = x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4)
    if layout == "channels_last" or (layout == "guess" and guessed):
        x = np.moveaxis(x, -1, 1)
    return torch.from_numpy(np.ascontiguousarray(x))


def _labels(y: np.ndarray[Any, Any], file: Path) -> Tensor:
    if y.dtype.kind not in "iub" or y.ndim != 1:
        raise DataError(
            f"{file} holds labels of type {y.dtype} and shape {list(y.shape)}; class numbers [N] are needed."
        )
    return torch.from_numpy(y.astype(np.int64))
