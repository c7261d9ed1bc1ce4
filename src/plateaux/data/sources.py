"""Data sources: a Source returns samples by their stable ids; DataSplits has a train and a test source."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.types import Inputs, derive_seed, map_tensors


class Source(Protocol):
    """Samples with stable ids 0 .. N-1: an id refers to the same sample in every epoch, order, and process."""

    def __len__(self) -> int: ...

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        """Return inputs `[B, ...]` and labels `[B]` of the samples `ids`; random transforms use only `seed`."""

    def fingerprint(self) -> str:
        """Return a short hash of the samples and their order."""

    @property
    def has_content_hash(self) -> bool:
        """Whether the fingerprint is a hash of the samples themselves, so that results about them can be cached."""
        return True

    @property
    def needs_workers(self) -> bool:
        """Whether loader workers can read samples faster than this process."""
        return True

    @property
    def is_augmented(self) -> bool:
        """Whether samples are augmented already, so that the loader does not augment them."""
        return False

    def without_augmentation(self) -> Source:
        """Return the same samples without augmentation."""
        return self


@dataclass(frozen=True, slots=True)
class UnlabeledData:
    """Samples of another data set without their labels, used in training next to the labeled ones."""

    name: str
    source: Source
    ids: Tensor  # [n] the samples of the source to use


@dataclass(frozen=True, slots=True)
class DataSplits:
    """A data set: its train and test sources, and the shapes and classes that a model needs."""

    name: str
    train: Source
    test: Source
    classes: int
    shape: tuple[int, ...]  # of one input, channels first
    mean: tuple[float, ...] = ()  # per channel, of inputs in [0, 1]; empty: no normalization
    std: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()  # class names
    remarks: tuple[str, ...] = ()  # differences from the published set: "20,000 of 50,000 train images"
    unlabeled: UnlabeledData | None = None  # as configured in the recipe


class InMemorySource(Source):
    """A source held in memory, on CPU or on an accelerator.

    Images are stored as uint8 `[N, C, H, W]`: a quarter of the memory, and augmentation moves a quarter of the bytes.
    """

    needs_workers = False

    def __init__(self, x: Inputs, y: Tensor) -> None:
        lengths = {len(t) for t in ([x] if isinstance(x, Tensor) else x.values())}
        assert lengths == {len(y)}, (lengths, len(y))
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.y)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        ids = ids.to(self.y.device)
        # index_select copies rows contiguously: twenty times as fast as x[ids] for images.
        return map_tensors(self.x, lambda t: t.index_select(0, ids)), self.y.index_select(0, ids)

    def to(self, device: torch.device) -> InMemorySource:
        """Return this source with its tensors on `device`."""
        return InMemorySource(map_tensors(self.x, lambda t: t.to(device)), self.y.to(device))

    def fingerprint(self) -> str:
        digest = blake2b(digest_size=8)
        tensors = {"": self.x} if isinstance(self.x, Tensor) else dict(sorted(self.x.items()))
        for name, tensor in [*tensors.items(), ("", self.y)]:
            digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


class DatasetSource(Source):
    """A source that reads samples on demand from any map-style `torch.utils.data.Dataset`.

    With a `seed`, every sample is read with the generators of torch, numpy and `random` seeded from (seed, id): the
    random transforms of the data set give the same sample in any batch, worker, or process.
    """

    def __init__(self, dataset: Any, *, name: str = "") -> None:
        self.dataset = dataset
        self.name = name or type(dataset).__name__

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        if not len(ids):  # an empty shard of a batch still has the shape of a sample
            x, y = self.fetch(torch.zeros(1, dtype=torch.int64), seed=seed)
            return map_tensors(x, lambda t: t[:0]), y[:0]
        if seed is None:
            return collate([self.dataset[i] for i in ids.tolist()])
        with _preserve_rng():
            return collate([self._seeded(i, seed) for i in ids.tolist()])

    @property
    def has_content_hash(self) -> bool:
        """Whether the fingerprint hashes the samples themselves, and not only the name and the length."""
        return callable(getattr(self.dataset, "fingerprint", None))

    def fingerprint(self) -> str:
        hash_dataset = getattr(self.dataset, "fingerprint", None)
        if callable(hash_dataset):
            return str(hash_dataset())
        return blake2b(f"{self.name}:{len(self)}".encode(), digest_size=8).hexdigest()

    def _seeded(self, i: int, base: int) -> Any:
        seed = derive_seed(base, i)
        # Only the CPU generator: torch.manual_seed would also reset the generators of all accelerators.
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return self.dataset[i]


@contextmanager
def _preserve_rng() -> Iterator[None]:
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def collate(samples: Sequence[tuple[Any, Any]]) -> tuple[Inputs, Tensor]:
    """Stack `(input, label)` pairs into a batch with torch's default_collate."""
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
) -> DataSplits:
    """Build a data set from two map-style `torch.utils.data.Dataset`s that return `(input, label)` pairs."""
    for split, dataset in (("train", train), ("test", test)):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"The {split} set is a {type(dataset).__name__} without __len__ or __getitem__. Samples need stable "
                "ids, so use a map-style Dataset."
            )
    name = name or type(train).__name__
    sources = DatasetSource(train, name=f"{name}.train"), DatasetSource(test, name=f"{name}.test")
    return DataSplits(name, *sources, classes, tuple(shape), tuple(mean), tuple(std), tuple(labels))


def from_tensors(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    classes: int,
    name: str = "tensors",
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    labels: Sequence[str] = (),
) -> DataSplits:
    """Build a data set from tensors in memory: `(inputs, labels)` for train and test, channels first."""
    sources = InMemorySource(*train), InMemorySource(*test)
    return DataSplits(name, *sources, classes, tuple(train[0].shape[1:]), tuple(mean), tuple(std), tuple(labels))
