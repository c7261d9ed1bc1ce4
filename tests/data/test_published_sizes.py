"""Stand-ins of the published size: as many samples, of the same shape, as the loaders return."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.data.published_sizes import published_stand_in
from plateaux.storage.generated_files import WRITERS


def write_idx(folder: Path) -> None:
    """Write two images and their labels as the files of MNIST."""
    folder.mkdir(parents=True)
    for stem in ("train", "t10k"):
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 2, 28, 28) + bytes(2 * 784))
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 2) + bytes(2))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("mnist", lambda root: write_idx(root / "MNIST")),
        ("fashion_mnist", lambda root: write_idx(root / "FashionMNIST")),
        ("cifar10", lambda root: WRITERS["cifar10"](root, {})),
        ("cifar100", lambda root: WRITERS["cifar100"](root, {})),
    ],
)
def test_a_stand_in_is_what_the_loader_returns(name: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    loaded, stand_in = registry.dataset.get(name)(root=str(tmp_path)), published_stand_in(name, {})
    assert stand_in is not None
    assert (stand_in.classes, stand_in.shape) == (loaded.classes, loaded.shape)
    (x, y), (loaded_x, loaded_y) = (data.test.fetch(torch.tensor([0, 1])) for data in (stand_in, loaded))
    assert isinstance(x, torch.Tensor)
    assert (x.shape, x.dtype, y.dtype) == (loaded_x.shape, loaded_x.dtype, loaded_y.dtype)
    # The loader says how many of the published images the files contain.
    for split in ("train", "test"):
        assert f"{len(getattr(loaded, split))} of {len(getattr(stand_in, split)):,} {split} images" in loaded.remarks


@pytest.mark.parametrize(
    ("options", "train", "test"),
    [
        ({}, 60_000, 10_000),
        ({"start": 4_000, "limit": 4_000, "test_start": 9_000}, 4_000, 1_000),
        ({"start": 59_000, "limit": 4_000, "test_start": 9_000, "test_limit": 300}, 1_000, 300),
    ],
)
def test_only_the_samples_after_start_are_left(options: dict[str, Any], train: int, test: int) -> None:
    data = published_stand_in("fashion_mnist", options)
    assert data is not None
    assert (len(data.train), len(data.test)) == (train, test)


def test_a_start_after_the_last_sample_is_refused_as_by_the_loader() -> None:
    for options in ({"start": 60_000}, {"test_start": 10_000}):
        ((key, value),) = options.items()
        with pytest.raises(RecipeError, match=f"^{key} = {value} leaves out all {value:,} samples"):
            published_stand_in("mnist", options)


def test_a_data_set_of_unknown_size_has_no_stand_in() -> None:
    assert published_stand_in("digits", {}) is None
