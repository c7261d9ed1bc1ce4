"""Check the samples of a data set before training, and describe them: shape, dtype, range, and classes.

Samples in memory are checked completely. Of other sources a fixed sample is read; the source itself checks the rest
when it reads them. An error says what was found, what is expected, and the usual cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.types import Inputs, derive_seed
from plateaux.data.augment import normalize
from plateaux.data.data_summary import DataSummary, TensorSummary
from plateaux.data.data_warnings import data_warnings
from plateaux.data.samples import check_label_range, label_hint, label_problem, sample_ids
from plateaux.data.sources import DataSplits, InMemorySource, Source
from plateaux.data.warning_table import limit, warning

SAMPLED_INPUTS = 32  # of a source that is not in memory
MIN_FOR_CLASSES = 16  # sampled labels from which a single class is suspicious


@dataclass(frozen=True, slots=True)
class DataCheck:
    """The result of a check: a description, warnings by name, and ids of samples with NaN or infinity."""

    summary: DataSummary
    warnings: Mapping[str, str] = field(default_factory=dict)
    nonfinite: Tensor | None = None  # ids of training samples; None: there are none among the checked ones


@dataclass(frozen=True, slots=True)
class _Examined:
    """The samples of a split that are checked: all that are in memory, else a fixed sample."""

    x: Mapping[str, Tensor]
    y: Tensor
    ids: Tensor
    is_complete: bool


def check_data(data: DataSplits) -> DataCheck:
    """Raise DataError if a model cannot be trained on these samples, and describe them otherwise."""
    if not len(data.train):
        raise DataError(
            f"The training set of {data.name!r} is empty. Expected: at least one sample. The usual cause is a filter "
            "or data.limit"
        )
    train = _examine(data.train)
    splits = {"train": train, **({"test": _examine(data.test)} if len(data.test) else {})}
    for split, examined in splits.items():
        _check_shape(examined, split, data)
        _check_labels(examined, split, data)
    if "test" in splits:
        _check_alike(train, splits["test"])
    found = len(torch.unique(train.y))
    inputs = {name: _summarize(values) for name, values in train.x.items()}
    warnings = _warn_of_range(train, inputs.get("x"), data)
    warnings |= {**_check_classes(found, train, data), **data_warnings(data)}
    summary = DataSummary(inputs, _summarize(train.y), data.classes, found, len(train.ids), len(train.y))
    return DataCheck(summary, warnings, _nonfinite_ids(train, inputs))


def check_evaluation_data(data: DataSplits, shape: Sequence[int], classes: int) -> None:
    """Raise DataError if a model for inputs of this shape and these classes cannot be evaluated on a data set.

    Only samples in memory are checked; other sources check what they read.
    """
    if tuple(data.shape) != tuple(shape) or data.classes != classes:
        raise DataError(
            f"{data.name!r} has inputs of shape {list(data.shape)} and {data.classes} classes. Expected: {list(shape)} "
            f"and {classes} classes, as the run was trained with. The usual cause is data= of another run"
        )
    for split, source in (("train", data.train), ("test", data.test)):
        if isinstance(source, InMemorySource) and len(source):
            examined = _examine(source)
            _check_shape(examined, split, data)
            _check_labels(examined, split, data)


def check_columns(data: DataSplits, columns: Sequence[str]) -> None:
    """Raise DataError if a table has other names than the one that a model was trained on, or the same in other order.

    A table without names is not checked.
    """
    own = data.preprocessing.columns
    if not own or not columns or own == tuple(columns):
        return
    at = next((i for i, pair in enumerate(zip(own, columns, strict=False)) if pair[0] != pair[1]), -1)
    raise DataError(
        f"Column {at} of {data.name!r} is {own[at]!r}, but the run was trained with {columns[at]!r} there: give the "
        "columns of the training table in its order, as in x = x[x_train.columns]"
    )


def _examine(source: Source) -> _Examined:
    if isinstance(source, InMemorySource):
        return _Examined(_by_name(source.x), source.y, torch.arange(len(source)), True)
    ids = sample_ids(len(source), SAMPLED_INPUTS)
    x, y = source.without_augmentation().fetch(ids, seed=derive_seed("check"))
    return _Examined(_by_name(x), y, ids, len(ids) == len(source))


def _by_name(x: Inputs) -> Mapping[str, Tensor]:
    return {"x": x} if isinstance(x, Tensor) else x


def _summarize(values: Tensor) -> TensorSummary:
    low = high = None
    if values.numel() and not values.is_complex():
        bounds = [float(value) for value in values.aminmax()]  # both are NaN if one value is
        low, high = bounds if all(map(math.isfinite, bounds)) else (None, None)
    return TensorSummary(str(values.dtype).removeprefix("torch."), tuple(values.shape[1:]), low, high)


def _check_shape(examined: _Examined, split: str, data: DataSplits) -> None:
    """Check the shape of a single input; the shape of named inputs is up to the model."""
    if set(examined.x) != {"x"} or tuple(examined.x["x"].shape[1:]) == tuple(data.shape):
        return
    raise DataError(
        f"A {split} input of {data.name!r} has shape {list(examined.x['x'].shape[1:])}. Expected: {list(data.shape)}, "
        "the shape of the data set. The usual cause is a transform that is applied to one split only, or images with "
        "channels last"
    )


def _check_alike(train: _Examined, test: _Examined) -> None:
    """Check that test inputs are of the same kind: uint8 is scaled to [0, 1], floats are not, integers are tokens."""
    kinds = [{name: _kind(tensor) for name, tensor in split.x.items()} for split in (train, test)]
    if kinds[0] != kinds[1]:
        raise DataError(
            f"Train inputs are {_show(kinds[0])}, test inputs are {_show(kinds[1])}. Expected: the same dtype for "
            "both, because uint8 is scaled to [0, 1] and floats are not. The usual cause is a conversion of one "
            "split only"
        )


def _kind(values: Tensor) -> str:
    return "float" if values.is_floating_point() else str(values.dtype).removeprefix("torch.")


def _show(kinds: Mapping[str, str]) -> str:
    return kinds["x"] if set(kinds) == {"x"} else ", ".join(f"{name}: {kind}" for name, kind in kinds.items())


def _check_labels(examined: _Examined, split: str, data: DataSplits) -> None:
    y, name = examined.y, f"{split} labels of {data.name!r}"
    if data.classes < 2:
        raise DataError(
            f"{data.name!r} has classes = {data.classes}. Expected: at least 2 classes. Regression is not supported yet"
        )
    if problem := label_problem(y):
        raise DataError(f"The {name} are {problem}")
    low, high = (int(value) for value in y.aminmax())
    if not examined.is_complete:
        check_label_range(y, examined.ids.tolist(), data.classes, f"{data.name} ({split})")
    if low < 0 or high >= data.classes:
        outside = int(((y < 0) | (y >= data.classes)).sum())
        raise DataError(
            f"{outside:,} of {len(y):,} {name} are outside 0 to {data.classes - 1}: labels range from {low} to {high}. "
            f"Expected: integer class numbers of shape [N], from 0 to {data.classes - 1}. "
            f"{label_hint(low, high, data.classes)}"
        )


def _check_classes(found: int, train: _Examined, data: DataSplits) -> dict[str, str]:
    """Raise DataError if there is only one class; return a warning if only one is among the sampled labels."""
    cause = (
        "The usual cause is a data set that is sorted by class, of which a limit or a slice keeps the first samples: "
        "shuffle it first"
    )
    if found != limit("single-class") or (len(train.y) < MIN_FOR_CLASSES and not train.is_complete):
        return {}
    if not train.is_complete:
        return warning("single-class", count=len(train.y), name=data.name, value=int(train.y[0]), cause=cause)
    if len(train.y) > 1:
        raise DataError(
            f"All {len(train.y):,} training labels of {data.name!r} have the value {int(train.y[0])}. Expected: at "
            f"least 2 classes. {cause}"
        )
    return {}


def _nonfinite_ids(examined: _Examined, summaries: Mapping[str, TensorSummary]) -> Tensor | None:
    """Return the ids of samples with NaN or infinity; a tensor whose range is finite has none."""
    bad = torch.zeros(len(examined.ids), dtype=torch.bool)
    for name, values in examined.x.items():
        if values.is_floating_point() and values.numel() and summaries[name].low is None:
            bad |= torch.cat([~part.flatten(1).isfinite().all(1) for part in torch.split(_rows(values), 4096)]).cpu()
    return examined.ids[bad] if bad.any() else None


def _rows(values: Tensor) -> Tensor:
    return values[:, None] if values.ndim == 1 else values


def _warn_of_range(train: _Examined, shown: TensorSummary | None, data: DataSplits) -> dict[str, str]:
    """Return a warning about floats far from 0 after normalization; a refusal would block unscaled features."""
    values = train.x.get("x")
    if values is None or shown is None or shown.low is None or not values.is_floating_point():
        return {}
    rows = values[sample_ids(len(values), SAMPLED_INPUTS).to(values.device)]
    channels = 1 if rows.ndim < 2 else rows.shape[1]
    if len(data.mean) not in (0, 1, channels) or len(data.std) != len(data.mean):
        return {}  # the check of the model reports the error
    normalized = normalize(rows, data.mean, data.std)
    assert isinstance(normalized, Tensor)
    if float(normalized.abs().max()) <= limit("unscaled-inputs"):
        return {}
    return warning("unscaled-inputs", name=data.name, low=shown.low, high=shown.high)
