"""A cache of corrupted images: generated once, and shared by all runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError, StorageError
from plateaux.core.types import Inputs
from plateaux.data.corruptions.corrupt import Corrupted
from plateaux.data.sources import Source
from plateaux.storage.local_store import LocalStore
from plateaux.storage.store import Store

CHUNK_IMAGES = 1000  # generated at a time


class CachedImages(Source):
    """A source of corrupted images that are stored in a folder by content hash, and generated if missing."""

    def __init__(self, inner: Corrupted, folder: str | Path) -> None:
        self.inner = inner
        store = LocalStore(folder)
        name = f"{inner.name}-{inner.severity}-{inner.fingerprint()}.safetensors"
        if not store.has_recorded(name):
            _generate(inner, store, name)
        metadata, flat = store.get_array(name)
        first, _ = inner.inner.fetch(torch.zeros(1, dtype=torch.int64))  # corruptions preserve the shape
        shape = (len(inner), *getattr(first, "shape", (0,))[1:])
        if metadata.get("shape") != json.dumps(list(shape)) or flat.dtype != np.uint8:
            raise StorageError(f"{store.root / name} has other images than expected; delete it to generate them again")
        self.images = flat.reshape(shape)

    def __len__(self) -> int:
        return len(self.inner)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        _, y = self.inner.inner.fetch(ids)
        return torch.from_numpy(self.images[ids.numpy()]), y

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


def _generate(inner: Corrupted, store: Store, name: str) -> None:
    first, _ = inner.fetch(torch.zeros(1, dtype=torch.int64))
    if not isinstance(first, Tensor) or not len(inner):
        raise DataError("Only data sets of images, with at least one image, can be corrupted")
    shape = [len(inner), *first.shape[1:]]
    metadata = {"shape": json.dumps(shape), "fingerprint": inner.fingerprint()}
    with store.array_writer(name, np.uint8, int(np.prod(shape)), metadata) as write:
        for ids in torch.split(torch.arange(len(inner)), CHUNK_IMAGES):
            images, _ = inner.fetch(ids)
            assert isinstance(images, Tensor)
            write(images.numpy().reshape(-1))
