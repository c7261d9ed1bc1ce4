"""Samples of the caller as splits: OOD sets by suite, and labeled samples; arrays, tensors, pandas, or a `Dataset`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from plateaux.core.errors import DataError, RecipeError, UnknownNameError
from plateaux.core.types import Inputs, first_tensor, map_tensors
from plateaux.data.samples import check_label_range, describe_input
from plateaux.data.sources import DatasetSource, DataSplits, InMemorySource, Source
from plateaux.data.user_arrays import convert_labels
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.splits import OWN, EvalSplit, ResizedSource, ood_set_names, ood_splits
from plateaux.integrations.pandas_tables import convert_table_or_arrays

Suites = Mapping[str, Sequence[str] | Mapping[str, Any]]
"""OOD sets by suite, as names or as inputs by name: `{"near": ["cifar100"], "far": {"noise": x}}`."""
OpenSplits = Callable[[], list[EvalSplit]]
logger = logging.getLogger(__name__)


def open_suites(evaluator: Evaluator, suites: Suites) -> dict[str, list[tuple[str, OpenSplits]]]:
    """Return the name of each OOD set and what opens it, by suite.

    Opening a set fails if its files are missing. Inputs that do not fit the run are an error here, so that they are not
    skipped as missing.
    """
    return {suite: _open_suite(evaluator, suite, sets) for suite, sets in suites.items()}


@contextmanager
def skip_missing_data(name: str, *, skip: bool) -> Iterator[None]:
    """Log that a dataset is not available and continue after the block, or raise the error."""
    try:
        yield
    except (DataError, UnknownNameError) as problem:
        if not skip:
            raise
        logger.warning("%s is skipped: %s", name, problem)


def _open_suite(
    evaluator: Evaluator, suite: str, sets: Sequence[str] | Mapping[str, Any]
) -> list[tuple[str, OpenSplits]]:
    if isinstance(sets, Mapping):
        splits = [user_split(name, suite, x, evaluator.data) for name, x in sets.items()]
        return [(split.name, partial(list, [split])) for split in splits]
    if isinstance(sets, str) or not isinstance(sets, Sequence):
        example = f'["{sets}"]' if isinstance(sets, str) else '{"noise": x}'
        raise RecipeError(
            f"The OOD suite {suite!r} is a {type(sets).__name__}: give a list of names of data sets, or inputs by "
            f'name, such as {{"{suite}": {example}}}'
        )
    recipe, info, components = evaluator.recipe, evaluator.data_info, evaluator.components
    return [(name, partial(ood_splits, recipe, info, name, suite, components)) for name in ood_set_names(info, sets)]


def labeled_splits(sets: Mapping[str, Any], data: DataSplits) -> list[EvalSplit]:
    """Return labeled samples by name, `{"new": (x, y)}`, as splits of a run with these data."""
    splits = []
    for name, pair in sets.items():
        if name in OWN or not isinstance(pair, tuple) or len(pair) != 2:
            raise RecipeError(
                f'split = {{{name!r}: ...}}: give (x, y) by a name of your own, such as {{"new": (x, y)}}'
            )
        inputs, labels = convert_table_or_arrays(pair[0], "x", columns=data.preprocessing.columns), pair[1]
        y = _class_numbers(labels, name, data)
        if len(y) != len(first_tensor(inputs)):
            raise DataError(f"{name!r} has {len(first_tensor(inputs)):,} samples, but {len(y):,} labels")
        split = _fitted(name, "labeled", InMemorySource(inputs, y), data)
        splits.append(replace(split, labeled=True, spec=name))
    return splits


def _class_numbers(labels: Any, name: str, data: DataSplits) -> Tensor:
    y, names = convert_labels(labels, data.classes, f"The labels of {name!r}")
    if unknown := sorted(set(names) - set(data.labels)):
        raise DataError(
            f"{name!r} has the label {unknown[0]!r}, which is no class of the run: {', '.join(data.labels)}"
        )
    y = torch.tensor([data.labels.index(each) for each in names])[y] if names else y
    check_label_range(y, range(len(y)), data.classes, name)
    return y


def user_split(name: str, suite: str, x: Any, data: DataSplits) -> EvalSplit:
    """Return inputs as an OOD set. Images may have another size than those of the run; all else must be equal."""
    return _fitted(name, suite, _open(x, name, data.preprocessing.columns), data)


def _fitted(name: str, suite: str, source: Source, data: DataSplits) -> EvalSplit:
    """Return a split of samples that are resized, or refused, if they are not like those of the run."""
    if not len(source):
        raise DataError(f"{name!r} has no samples")
    found, expected = _first_input(source), _first_input(data.test if len(data.test) else data.train)
    layouts = [describe_input(x, 0, name) for x in (found, expected)]
    if layouts[0] != layouts[1]:
        if not _can_be_resized(found, expected):
            raise DataError(
                f"A sample of {name!r} is {layouts[0]}, but a test sample of the run is "
                f"{layouts[1]}: prepare x as the inputs that the run was trained with. Only the size of images "
                "may differ, and gray images may replace color images or the reverse"
            )
        assert isinstance(found, Tensor)
        source = ResizedSource(source, data.shape, tuple(found.shape))
    return EvalSplit(name, suite, lambda *_: (source, torch.arange(len(source))), {"name": name}, labeled=False)


def _open(x: Any, name: str, columns: Sequence[str]) -> Source:
    if isinstance(x, IterableDataset):
        raise DataError(
            f"The OOD set {name!r} is an IterableDataset: use a map-style Dataset, because samples need ids"
        )
    if isinstance(x, Dataset):
        return DatasetSource(x, name=name)
    inputs = convert_table_or_arrays(x, f"The OOD set {name!r}", columns=columns)
    unused_labels = torch.zeros(len(first_tensor(inputs)), dtype=torch.int64)
    return InMemorySource(inputs, unused_labels)


def _first_input(source: Source) -> Inputs:
    return map_tensors(source.fetch(torch.zeros(1, dtype=torch.int64))[0], lambda tensor: tensor[0])


def _can_be_resized(found: Inputs, expected: Inputs) -> bool:
    """Whether both are images of the same dtype with channels that `ResizedSource` can convert."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor) or found.dtype != expected.dtype:
        return False
    if found.dim() != 3 or expected.dim() != 3:
        return False
    channels, wanted = found.shape[0], expected.shape[0]
    return channels in (1, wanted) or (channels, wanted) == (3, 1)
