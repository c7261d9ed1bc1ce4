"""Published sizes of data sets, to estimate the cost of a study on a machine that does not have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plateaux.core.types import Inputs
from plateaux.data.files import limited_count, remaining_count
from plateaux.data.sources import DataSplits, Source


@dataclass(frozen=True, slots=True)
class PublishedSize:
    """Number of samples and classes, and the shape of a sample."""

    train: int
    test: int
    classes: int
    shape: tuple[int, ...]


SIZES: Mapping[str, PublishedSize] = {
    "mnist": PublishedSize(60_000, 10_000, 10, (1, 28, 28)),
    "fashion_mnist": PublishedSize(60_000, 10_000, 10, (1, 28, 28)),
    "cifar10": PublishedSize(50_000, 10_000, 10, (3, 32, 32)),
    "cifar100": PublishedSize(50_000, 10_000, 100, (3, 32, 32)),
    "tiny_imagenet": PublishedSize(100_000, 10_000, 200, (3, 64, 64)),
    "imagenet": PublishedSize(1_281_167, 50_000, 1_000, (3, 224, 224)),
    "mrpc": PublishedSize(4_076, 1_725, 2, (80,)),
    "mrpc dev": PublishedSize(3_668, 408, 2, (80,)),  # GLUE's split
}

TEST_IMAGES: Mapping[str, int] = {  # of sets without training images
    "imagenet_a": 7_500,
    "imagenet_r": 30_000,
    "imagenet_o": 2_000,
    "inaturalist": 10_000,
    "openimages_o": 17_632,
    "textures": 5_640,
    "places365": 36_500,
    "svhn": 26_032,
}


def published_stand_in(name: str, options: Mapping[str, Any]) -> DataSplits | None:
    """Return a data set of the published size whose samples are all zero; None if its size is not known here."""
    key = str(options.get("path", "")) if name == "image_folder" else name
    known = SIZES.get(f"{key} dev" if options.get("test_split") == "dev" else key)
    if known is None:
        return None
    shape = known.shape
    if len(shape) == 1:
        shape = (int(options.get("length", shape[0])),)
    if len(shape) == 3 and isinstance(options.get("size"), int):
        shape = (3, options["size"], options["size"])
    train, test = _selected(known.train, options, ""), _selected(known.test, options, "test_")
    return DataSplits(name, ZeroSource(train, shape), ZeroSource(test, shape), known.classes, shape)


def _selected(count: int, options: Mapping[str, Any], prefix: str) -> int:
    """Return how many of `count` samples the options `start` and `limit` with this prefix select."""
    key = f"{prefix}start"
    return limited_count(remaining_count(count, options.get(key, 0), key=key), options.get(f"{prefix}limit"))


class ZeroSource(Source):
    """Samples of zeros with label 0; nothing is held in memory."""

    needs_workers = False

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        self.count, self.shape = count, shape

    def __len__(self) -> int:
        return self.count

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        labels = torch.zeros(len(ids), dtype=torch.int64)
        if len(self.shape) == 3:
            return torch.zeros(len(ids), *self.shape, dtype=torch.uint8), labels
        tokens = torch.zeros(len(ids), *self.shape, dtype=torch.int64)
        return {"input_ids": tokens, "attention_mask": tokens + 1, "token_type_ids": tokens}, labels

    def fingerprint(self) -> str:
        return f"zeros-{self.count}-{'x'.join(map(str, self.shape))}"
