"""Data sets in files of arrays: one .npz or .safetensors file, or a folder of .npy files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.ranges import Count, Fraction, Number, Positive, Seed, Size
from plateaux.core.registry import dataset
from plateaux.core.types import derive_seed
from plateaux.data.files import check_labels, data_path, head, missing_data_error, per_channel, read_npz, try_read
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.data.tensor_names import from_named_tensors

NAMES = ("x_train", "y_train", "x_test", "y_test")
ARRAYS = (*NAMES, "x", "y", "names")  # that a file or folder may contain
Layout = Literal["auto", "channels_first", "channels_last"]


@dataset
def arrays(
    *,
    path: str,
    layout: Layout = "auto",
    classes: Size | None = None,
    test: Fraction = 0.2,
    seed: Seed = 0,
    root: str | None = None,
    limit: Count | None = None,
    test_limit: Count | None = None,
    mean: Sequence[Number] | None = None,
    std: Sequence[Positive] | None = None,
) -> DataSplits:
    """Arrays from an .npz file or a folder of .npy files: x_train, y_train, x_test, y_test, or x and y split by a seed.

    uint8 `[N, H, W]` are grayscale images, uint8 `[N, H, W, 3]` color images. Without a test set, the fraction `test`
    is held out. `data.safetensors` of a run folder, which `plateaux.fit` writes, is read as it is.
    """
    file = data_path(path, root)
    if file.suffix == ".safetensors":
        return _with_options(_read_stored(file), limit, test_limit, mean, std)
    contents = _load_arrays(file, also_here=root is None)
    x, y, test_x, test_y = _train_and_test(contents, file, test, seed)
    inputs, test_inputs = _to_inputs(x, layout, file), _to_inputs(test_x, layout, file)
    labels, test_labels = _to_labels(y, file), _to_labels(test_y, file)
    if inputs.shape[1:] != test_inputs.shape[1:]:
        raise DataError(
            f"{file}: train inputs have shape {list(inputs.shape)}, test inputs {list(test_inputs.shape)}. "
            "They must agree except for the number of samples."
        )
    num_classes = classes or int(max(labels.max(), test_labels.max())) + 1
    for part in (labels, test_labels):
        check_labels(part, num_classes, path=file)
    shape = tuple(inputs.shape[1:])
    return DataSplits(
        "arrays",
        train=head(inputs, labels, limit),
        test=head(test_inputs, test_labels, test_limit),
        classes=num_classes,
        shape=shape,
        mean=per_channel(mean, (), shape[0] if shape else 1),
        std=per_channel(std, (), shape[0] if shape else 1),
        labels=tuple(str(name) for name in contents["names"]) if len(contents.get("names", ())) == num_classes else (),
    )


def _with_options(
    data: DataSplits,
    limit: int | None,
    test_limit: int | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> DataSplits:
    train, test = data.train, data.test
    assert isinstance(train, InMemorySource)
    assert isinstance(test, InMemorySource)
    if isinstance(train.x, Tensor) and isinstance(test.x, Tensor):
        train, test = head(train.x, train.y, limit), head(test.x, test.y, test_limit)
    channels = data.shape[0] if data.shape else 1
    means, stds = per_channel(mean, data.mean, channels), per_channel(std, data.std, channels)
    return replace(data, train=train, test=test, mean=means, std=stds)


def _read_stored(file: Path) -> DataSplits:
    if not file.is_file():
        raise missing_data_error("The arrays", expected=file.name, folder=file.parent)
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            return from_named_tensors(tensors, opened.metadata() or {})
    except SafetensorError as error:
        raise DataError(f"{file} is not a complete safetensors file ({error}). Write it again.") from error


def _load_arrays(file: Path, *, also_here: bool) -> Mapping[str, np.ndarray[Any, Any]]:
    if file.is_dir():
        paths = {p.stem: p for p in sorted(file.glob("*.npy")) if p.stem in ARRAYS}
        return {name: try_read(p, lambda p: np.load(p, allow_pickle=False)) for name, p in paths.items()}
    if not file.is_file():
        raise missing_data_error("The arrays", expected=file.name, folder=file.parent, also_here=also_here)
    contents: dict[str, np.ndarray[Any, Any]] = try_read(file, lambda path: read_npz(path, ARRAYS))
    return contents


def _train_and_test(
    contents: Mapping[str, np.ndarray[Any, Any]], file: Path, test: float, seed: int
) -> tuple[np.ndarray[Any, Any], ...]:
    """Return x, y, test x, test y."""
    if all(name in contents for name in NAMES):
        parts = tuple(contents[name] for name in NAMES)
    elif "x" in contents and "y" in contents:
        x, y = contents["x"], contents["y"]
        if not 0 < test < 1:
            raise RecipeError(f"test = {test} is not a fraction between 0 and 1, and {file} has no test set.")
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(derive_seed(seed, "arrays"))).numpy()
        test_ids, train_ids = np.sort(order[: round(len(y) * test)]), np.sort(order[round(len(y) * test) :])
        parts = (x[train_ids], y[train_ids], x[test_ids], y[test_ids]) if len(x) == len(y) else (x, y, x, y)
    else:
        raise DataError(
            f"{file} contains the arrays {sorted(contents) or 'none'}. Needed: {', '.join(NAMES)}; or x and y."
        )
    if len(parts[0]) != len(parts[1]) or len(parts[2]) != len(parts[3]) or not len(parts[1]) or not len(parts[3]):
        raise DataError(
            f"{file} contains arrays with {[len(part) for part in parts]} rows. x and y must have the same length, "
            "and no part may be empty."
        )
    return parts


def _to_inputs(x: np.ndarray[Any, Any], layout: Layout, file: Path) -> Tensor:
    if x.dtype.kind not in "fiub":
        raise DataError(f"{file} contains inputs of dtype {x.dtype}. A numeric dtype is needed.")
    if x.dtype != np.uint8:  # integers are token ids and become int64; all others become float32
        return torch.from_numpy(x.astype(np.float32 if x.dtype.kind in "fb" else np.int64))
    if x.ndim == 3:
        x = x[:, None]
    looks_channels_last = x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4)
    if layout == "channels_last" or (layout == "auto" and looks_channels_last):
        x = np.moveaxis(x, -1, 1)
    return torch.from_numpy(np.ascontiguousarray(x))


def _to_labels(y: np.ndarray[Any, Any], file: Path) -> Tensor:
    if y.dtype.kind not in "iub" or y.ndim != 1:
        raise DataError(
            f"{file} contains labels of dtype {y.dtype} and shape {list(y.shape)}. Integer class labels [N] are needed."
        )
    return torch.from_numpy(y.astype(np.int64))
