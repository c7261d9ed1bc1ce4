"""Build a data set from what users have: arrays, tensors, pandas, a torch `Dataset`, or a Hugging Face `Dataset`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from plateaux.core.errors import DataError
from plateaux.core.formatting import format_size
from plateaux.core.types import Inputs, derive_seed, first_tensor, map_tensors
from plateaux.data.preprocessing import Preprocessing
from plateaux.data.samples import collate, describe_sample
from plateaux.data.sources import DataSplits, InMemorySource, from_dataset
from plateaux.data.user_arrays import convert_labels, mean_and_std
from plateaux.integrations.dataset_columns import (
    find_columns,
    is_hugging_face,
    match_classes,
    read_columns,
    train_and_test,
)
from plateaux.integrations.pandas_tables import (
    column_names,
    convert_table_or_arrays,
    is_pandas,
    match_columns,
    read_labels,
)

MAX_STORED_BYTES = 1 << 30
MIN_SAMPLES = 4
logger = logging.getLogger(__name__)


def from_arrays(
    x: Any,
    y: Any = None,
    *,
    test: Any = 0.2,
    classes: int | None = None,
    inputs: str | Sequence[str] | None = None,
    label: str | None = None,
    standardize: bool = True,
    seed: int = 0,
) -> DataSplits:
    """Build a data set from arrays, tensors, pandas, a torch `Dataset`, or a Hugging Face `datasets.Dataset`.

    uint8 `[N, H, W]`, `[N, H, W, C]`, and `[N, C, H, W]` are images, other integers are token ids, and floats `[N, F]`,
    integers of a DataFrame, and booleans are features. A run keeps a copy of up to 1 GiB of arrays in its folder.

    Args:
        x: The inputs `[N, ...]`, a mapping of named inputs, a DataFrame, or a data set with labels. The split "test" of
            a `DatasetDict` is the test set.
        y: The labels `[N]`: class numbers or text. None: `x` is a data set with labels.
        test: The fraction of the samples to hold out as a test set, or the test set itself: `(x, y)` or a data set.
            None or 0: no test set.
        classes: The number of classes; by default those in the labels. Needed for a torch `Dataset` without `classes`.
        inputs: The input columns of a Hugging Face data set.
        label: The label column of a Hugging Face data set.
        standardize: Subtract the mean of the training samples and divide by their standard deviation, per feature or
            channel. Both are stored with the run and applied to new inputs. Not for token ids and a torch `Dataset`.
        seed: The seed of the test set.
    """
    for each, what in ((x, "x"), (test, "test")):
        if isinstance(each, DataLoader):
            raise DataError(
                f"{what} is a DataLoader, whose batches have no sample ids: give its data set, loader.dataset."
            )
        if isinstance(each, Iterator):
            raise DataError(
                f"{what} is a {type(each).__name__}, which can be read only once: give arrays or a Dataset."
            )
    if is_hugging_face(x):
        _refuse_labels(x, y)
        x, test_split = train_and_test(x)
        test = test if test_split is None else test_split
        inputs, label = find_columns(x, inputs, label)
        x, y, names = read_columns(x, inputs, label)
        columns = tuple(inputs) if not isinstance(x, dict) and x.shape[1:] == (len(inputs),) else ()
    elif isinstance(x, TensorDataset):
        _refuse_labels(x, y)
        (x, y), names, columns = _tensors(x), (), ()
    elif isinstance(x, Dataset) or (y is None and hasattr(x, "__getitem__") and not _is_array(x)):
        _refuse_labels(x, y)
        return _from_dataset(x, test, classes, seed)
    elif y is None:
        raise DataError(f"x is a {type(x).__name__} without labels: give y, one label for each sample.")
    else:
        names, columns = (), column_names(x)
    train = convert_table_or_arrays(x, "x"), _read_labels(y, "y")
    tests = None if test is None or isinstance(test, int | float) else _read_test(test, x, inputs, label, names)
    data = _build(train, tests, test, classes=classes, names=names, seed=seed)
    data = replace(data, preprocessing=Preprocessing(columns=columns))
    if standardize:
        assert isinstance(data.train, InMemorySource)
        mean, std = mean_and_std(data.train.x)
        data = replace(data, mean=mean, std=std)
    return data


def _build(
    train: tuple[Inputs, NDArray[Any]],
    tests: tuple[Inputs, NDArray[Any]] | None,
    test: Any,
    *,
    classes: int | None,
    names: tuple[str, ...],
    seed: int,
) -> DataSplits:
    """Return the data set of converted inputs and raw labels; labels of both splits become class numbers together."""
    parts = [part for part in (train, tests) if part is not None]
    for part, what in zip(parts, ("", "test "), strict=False):
        length = len(first_tensor(part[0]))
        if length != len(part[1]):
            raise DataError(
                f"{what}x has {length:,} samples, but {what}y has {len(part[1]):,} labels: give one label "
                "for each sample. The usual cause is a filter that was applied to one of the two only."
            )
    y, found = convert_labels(np.concatenate([labels for _, labels in parts]), len(names) or classes)
    if classes is not None and found and len(found) != classes:
        raise DataError(f"y has {len(found)} different labels, but classes = {classes} was given: leave out classes.")
    count = classes or len(names) or len(found) or int(y.max()) + 1
    if tests is None:
        train_ids, test_ids = _split(len(y), test, seed)
        sources = [
            InMemorySource(map_tensors(train[0], lambda t, i=ids: t[i]), y[ids]) for ids in (train_ids, test_ids)
        ]
    else:
        size = len(train[1])
        sources = [InMemorySource(train[0], y[:size]), InMemorySource(tests[0], y[size:])]
    x = sources[0].x
    shape = tuple(first_tensor(x).shape[1:])
    size = sum(_size(source.x) for source in sources)
    if size > MAX_STORED_BYTES:
        logger.warning(
            "The inputs take %s, so a run does not keep a copy of them (the limit is %s): pass them again to every "
            "function that uses the run, or write them to files and name these in a recipe",
            format_size(size),
            format_size(MAX_STORED_BYTES),
        )
    return DataSplits(
        "arrays",
        sources[0],
        sources[1],
        count,
        shape,
        labels=found or (names if len(names) == count else ()),
        keep_in_run=size <= MAX_STORED_BYTES,
    )


def _from_dataset(dataset: Any, test: Any, classes: int | None, seed: int) -> DataSplits:
    """Return the data set of a map-style torch `Dataset`; its samples are read when they are needed."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"x is a {name} without __len__ or __getitem__: use a map-style Dataset, because samples need ids."
        )
    names = getattr(dataset, "classes", None)
    labels = tuple(map(str, names)) if isinstance(names, list | tuple) else ()
    if classes is None and not labels:
        raise DataError(f"The number of classes of {name} is not known: give it, as in classes=10.")
    train: Any = dataset
    if test is None or isinstance(test, int | float):
        train_ids, test_ids = _split(len(dataset), test, seed)
        train, test = Subset(dataset, train_ids.tolist()), Subset(dataset, test_ids.tolist())
    first = train[0]
    describe_sample(first, 0, name)
    x, _ = collate([first], [0], name)
    shape = tuple(x.shape[1:]) if isinstance(x, Tensor) else tuple(next(iter(x.values())).shape[1:])
    count = classes or len(labels)
    labels = labels if len(labels) == count else ()
    return from_dataset(train, test, classes=count, shape=shape, name=name, labels=labels)


def _read_labels(y: Any, what: str) -> NDArray[Any]:
    """Return the raw labels as an array."""
    try:
        labels = read_labels(y) if is_pandas(y) else np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    except ValueError:
        raise DataError(f"{what} has rows of different lengths: give one label for each sample.") from None
    if not labels.ndim:
        raise DataError(f"{what} is a {type(y).__name__}: give an array or a list with one label for each sample.")
    return labels


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") or isinstance(x, Mapping)


def _read_test(
    test: Any, train_x: Any, inputs: str | Sequence[str] | None, label: str | None, names: Sequence[str]
) -> tuple[Inputs, NDArray[Any]]:
    x: Any
    y: Any
    if is_hugging_face(test):
        x, y, test_names = read_columns(test, inputs, label)
        y = match_classes(y, test_names, names)
    elif isinstance(test, TensorDataset):
        x, y = _tensors(test)
    elif isinstance(test, tuple | list) and len(test) == 2:
        x, y = match_columns(test[0], train_x), test[1]
    else:
        raise DataError(
            f"test is a {type(test).__name__}: give a fraction such as 0.2, a pair (x, y), or a data set of the same "
            "kind as x."
        )
    return convert_table_or_arrays(x, "test x"), _read_labels(y, "test y")


def _tensors(dataset: TensorDataset) -> tuple[Tensor, Tensor]:
    if len(dataset.tensors) != 2:
        raise DataError(f"The TensorDataset has {len(dataset.tensors)} tensors: give two, inputs and labels.")
    return dataset.tensors[0], dataset.tensors[1]


def _split(count: int, fraction: float | None, seed: int) -> tuple[Tensor, Tensor]:
    """Return the ids of the training and of the test samples, both in increasing order."""
    if fraction is None or (fraction == 0 and fraction is not False):
        return torch.arange(count), torch.arange(0)
    if isinstance(fraction, bool) or not 0 < fraction < 1:
        raise DataError(
            f"test = {fraction}: give a fraction between 0 and 1, such as 0.2, the test set itself, or None for none."
        )
    size = max(1, round(count * fraction))
    if count < MIN_SAMPLES or size >= count:
        raise DataError(f"{count} samples cannot be split into training and test samples: give more samples, or test=.")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derive_seed(seed, "arrays")))
    return order[size:].sort().values, order[:size].sort().values


def _refuse_labels(x: Any, y: Any) -> None:
    if y is not None:
        raise DataError(f"x is a {type(x).__name__}, which has labels, and y was given too: leave out y.")


def _size(x: Inputs) -> int:
    return sum(t.numel() * t.element_size() for t in ([x] if isinstance(x, Tensor) else x.values()))
