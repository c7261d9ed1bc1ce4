"""Corrupted images made once: a folder that any number of runs are measured from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.types import Inputs
from plateaux.data.corruptions.corrupt import Corrupted
from plateaux.data.sources import Source
from plateaux.storage.local_store import LocalStore
from plateaux.storage.store import Store

CHUNK = 1000  # images made at once


class Cached(Source):
    """A source whose images lie in a folder under the hash of what they are, made there when they are not."""

    def __init__(self, inner: Corrupted, folder: str | Path) -> None:
        self.inner = inner
        store = LocalStore(folder)
        name = f"{inner.name}-{inner.severity}-{inner.fingerprint()}.safetensors"
        if not store.has(name):
            _make(inner, store, name)
        about, flat = store.get_array(name)
        self.images = flat.reshape(json.loads(about["shape"]))

    def __len__(self) -> int:
        return len(self.inner)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        _, y = self.inner.inner.fetch(ids)
        return torch.from_numpy(self.images[ids.numpy()]), y

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


def _make(inner: Corrupted, store: Store, name: str) -> None:
    first, _ = inner.fetch(torch.zeros(1, dtype=torch.int64))
    if not isinstance(first, Tensor) or not len(inner):
        raise DataError("There are no images to make a corrupted copy of.")
    shape = [len(inner), *first.shape[1:]]
    about = {"shape": json.dumps(shape), "fingerprint": inner.fingerprint()}
    with store.array_writer(name, np.uint8, int(np.prod(shape)), about) as write:
        for ids in torch.split(torch.arange(len(inner)), CHUNK):
            images, _ = inner.fetch(ids)
            assert isinstance(images, Tensor)
            write(images.numpy().reshape(-1))
