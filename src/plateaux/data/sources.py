"""Data sources: a Source returns samples by their stable ids; DataSplits has a train and a test source."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError, PlateauxError, first_line
from plateaux.core.types import Array, ArrayInputs, Inputs, derive_seed, first_tensor, map_tensors, to_inputs, to_labels
from plateaux.data.preprocessing import NO_PREPROCESSING, Preprocessing
from plateaux.data.samples import check_label_range, collate, describe_sample, hash_labels, hash_sample, sample_ids

HASHED_SAMPLES = 16  # of a data set that has no fingerprint of its own


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
    preprocessing: Preprocessing = NO_PREPROCESSING  # how raw inputs became these samples
    keep_in_run: bool = False  # a run keeps a copy of the samples in its folder


class InMemorySource(Source):
    """A source held in memory, on CPU or on an accelerator.

    Images are stored as uint8 `[N, C, H, W]`: a quarter of the memory, and augmentation moves a quarter of the bytes.
    """

    needs_workers = False

    def __init__(self, x: ArrayInputs, y: Array) -> None:
        self.x, self.y = to_inputs(x, "The inputs"), to_labels(y)
        tensors = [self.x] if isinstance(self.x, Tensor) else list(self.x.values())
        if not tensors or any(t.ndim == 0 or len(t) != len(self.y) for t in tensors) or self.y.ndim == 0:
            shapes = ", ".join(str(list(t.shape)) for t in tensors) or "none"
            raise DataError(
                f"Inputs of shape {shapes} and labels of shape {list(self.y.shape)} were given. Expected: one label "
                "for each input, so that the first dimensions are equal. The usual cause is a filter that was "
                "applied to one of the two only"
            )

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
    random transforms of the data set give the same sample in any batch, worker, or process. All samples must have the
    layout of the first one that is read, and labels must be below `classes`, if given.
    """

    def __init__(self, dataset: Any, *, name: str = "", classes: int | None = None) -> None:
        self.dataset = dataset
        self.name = name or type(dataset).__name__
        self.classes = classes
        # Read once: the split into training and validation samples depends on it.
        self._length = _read_length(dataset, self.name)
        self._layout: tuple[str, int] | None = None  # of the first sample that was read, and its id

    def __len__(self) -> int:
        return self._length

    def fetch(self, ids: Tensor, *, seed: int | None = None) -> tuple[Inputs, Tensor]:
        if not len(ids):  # an empty shard of a batch still has the shape of a sample
            x, y = self.fetch(torch.zeros(1, dtype=torch.int64), seed=seed)
            return map_tensors(x, lambda t: t[:0]), y[:0]
        numbers = ids.tolist()
        with nullcontext() if seed is None else _preserve_rng():
            samples = [self._read(i, seed) for i in numbers]
        x, y = collate(samples, numbers, self.name)
        if self.classes is not None:
            check_label_range(y, numbers, self.classes, self.name)
        return x, y

    @property
    def has_content_hash(self) -> bool:
        """Whether the fingerprint hashes all samples themselves, and not only some of them."""
        return callable(getattr(self.dataset, "fingerprint", None))

    def fingerprint(self) -> str:
        """Return the data set's own fingerprint, or a hash of name, length, labels in memory, and some samples."""
        hash_dataset = getattr(self.dataset, "fingerprint", None)
        if callable(hash_dataset):
            return str(hash_dataset())
        digest = blake2b(f"{self.name}:{len(self)}".encode(), digest_size=8)
        hash_labels(digest, self.dataset, len(self))
        base = derive_seed("fingerprint")
        with _preserve_rng():
            for i in sample_ids(len(self), HASHED_SAMPLES).tolist():
                hash_sample(digest, self._read(i, base), self._read(i, base))
        return digest.hexdigest()

    def ignoring_labels(self) -> DatasetSource:
        """Return the same samples for a use that ignores their labels, which may then have any value."""
        return DatasetSource(self.dataset, name=self.name)

    def _read(self, i: int, base: int | None) -> tuple[Any, Any]:
        """Return one sample, read with seeded generators if there is a base seed, after checking its layout."""
        if base is not None:
            seed = derive_seed(base, i)
            # Only the CPU generator: torch.manual_seed would also reset the generators of all accelerators.
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
        try:
            sample: tuple[Any, Any] = self.dataset[i]
        except PlateauxError:
            raise
        except Exception as error:  # code of the user: any exception must name the sample
            raise DataError(
                f"Sample {i} of {self.name!r} ({len(self)} samples) cannot be read: {type(error).__name__}: "
                f"{first_line(error)}. Call dataset[{i}] to see the original error"
            ) from error
        layout = describe_sample(sample, i, self.name)
        expected, first = self._layout = self._layout or (layout, i)
        if layout != expected:
            raise DataError(
                f"Sample {i} of {self.name!r} is {layout}, but sample {first} is {expected}. Expected: the same "
                "dtypes and shapes for all samples. The usual cause is a file of another format or size"
            )
        return sample


def _read_length(dataset: Any, name: str) -> int:
    try:
        return len(dataset)
    except Exception as error:  # code of the user
        raise DataError(
            f"The length of {name!r} cannot be read: {type(error).__name__}: {first_line(error)}. Expected: __len__ "
            "returns the number of samples"
        ) from error


@contextmanager
def _preserve_rng() -> Iterator[None]:
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


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
    sources = (
        DatasetSource(train, name=f"{name}.train", classes=classes),
        DatasetSource(test, name=f"{name}.test", classes=classes),
    )
    return DataSplits(name, *sources, classes, tuple(shape), tuple(mean), tuple(std), tuple(labels))


def from_tensors(
    train: tuple[ArrayInputs, Array],
    test: tuple[ArrayInputs, Array],
    *,
    classes: int,
    name: str = "tensors",
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    labels: Sequence[str] = (),
) -> DataSplits:
    """Build a data set from tensors or NumPy arrays: `(inputs, labels)` for train and test, channels first."""
    for split, pair in (("train", train), ("test", test)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(
                f"{split} is a {type(pair).__name__}, not a pair: pass from_tensors((x_train, y_train), "
                "(x_test, y_test), classes=...), or plateaux.from_arrays(x, y), which splits off a test set."
            )
    sources = InMemorySource(*train), InMemorySource(*test)
    x = sources[0].x
    shape = first_tensor(x).shape[1:]
    return DataSplits(name, *sources, classes, tuple(shape), tuple(mean), tuple(std), tuple(labels))
