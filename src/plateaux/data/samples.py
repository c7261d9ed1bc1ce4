"""Single samples of a map-style data set: their layout, their hash, and the batch that they form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from plateaux.core.errors import DataError, first_line
from plateaux.core.types import Inputs, derive_seed, to_labels


class Digest(Protocol):
    """A hash from `hashlib`."""

    def update(self, data: bytes, /) -> None: ...


def sample_ids(n: int, count: int) -> Tensor:
    """Return at most `count` distinct ids of n samples, sorted: the first, the last, and a fixed random sample."""
    if n <= count:
        return torch.arange(n)
    generator = torch.Generator().manual_seed(derive_seed("sampled ids", n))
    drawn = torch.randint(n, (count - 2,), generator=generator)  # not a permutation: n may be very large
    ids: Tensor = torch.unique(torch.cat([drawn, torch.tensor([0, n - 1])]))
    return ids


def describe_sample(sample: Any, i: int, name: str) -> str:
    """Return the layout of an `(input, label)` pair: two samples with the same layout can be in one batch."""
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        found = f"{type(sample).__name__}" + (f" of {len(sample)}" if isinstance(sample, tuple | list) else "")
        raise DataError(
            f"Sample {i} of {name!r} is a {found}. Expected: a pair (input, label). The usual cause is a data set that "
            "returns a dictionary or more than two values; wrap it in one that returns pairs"
        )
    x, y = sample
    return f"({describe_input(x, i, name)}, {_describe_label(y)})"


def describe_input(x: Any, i: int, name: str) -> str:
    """Return dtype and shape of the input of sample `i`."""
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{key}: {describe_input(value, i, name)}" for key, value in x.items()) + "}"
    if isinstance(x, Tensor | np.ndarray):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if isinstance(x, int | float | np.generic):
        return type(x).__name__
    raise DataError(
        f"The input of sample {i} of {name!r} is a {type(x).__name__}. Expected: a tensor, a NumPy array, or a "
        "dictionary of them. The usual cause is an image that was not converted: "
        "torch.from_numpy(numpy.array(image)).permute(2, 0, 1)"
    )


def _describe_label(y: Any) -> str:
    """Return the kind and shape of a label; integers of any type form one kind."""
    if isinstance(y, Tensor | np.ndarray):
        is_float = y.is_floating_point() if isinstance(y, Tensor) else y.dtype.kind not in "iub"
        return f"{'float' if is_float else 'integer'} label" + (f"{list(y.shape)}" if y.ndim else "")
    if isinstance(y, int | np.integer | np.bool_):
        return "integer label" if -(2**63) <= y < 2**63 else "integer label of more than 64 bits"
    return "float label" if isinstance(y, float | np.floating) else f"{type(y).__name__} label"


def collate(samples: Sequence[tuple[Any, Any]], ids: Sequence[int] = (), name: str = "") -> tuple[Inputs, Tensor]:
    """Stack `(input, label)` pairs of one layout into a batch with torch's default_collate; labels become int64."""
    from torch.utils.data import default_collate

    where = f"Samples {list(ids)[:3]} of {name!r}" if ids else "The samples"
    try:
        x = default_collate([x for x, _ in samples])
        labels = [y for _, y in samples]
        is_integer = all(_describe_label(y) == "integer label" for y in labels)
        y = torch.tensor([int(y) for y in labels]) if is_integer else to_labels(default_collate(labels))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(
            f"{where} do not form a batch: {first_line(error)}. Expected: inputs of one shape and dtype, and a class "
            "number as label"
        ) from error
    return x, y


def check_label_range(y: Tensor, ids: Sequence[int], classes: int, name: str) -> None:
    """Raise DataError if labels are no class numbers, or one is outside 0 .. classes-1."""
    if problem := label_problem(y):
        raise DataError(f"The labels of {name!r} are {problem}")
    if not len(y):
        return
    low, high = (int(value) for value in y.aminmax())
    if low >= 0 and high < classes:
        return
    position = int(((y < 0) | (y >= classes)).nonzero()[0])
    raise DataError(
        f"Sample {ids[position]} of {name!r} has label {int(y[position])}. Expected: 0 to {classes - 1}, because the "
        f"data set has {classes} classes. {label_hint(low, high, classes)}"
    )


def label_problem(y: Any) -> str:
    """Return why a tensor or an array does not have one class number for each sample, and what to do; "" if it has."""
    dtype, shape = str(y.dtype).removeprefix("torch."), list(y.shape)
    is_float = "float" in dtype or "complex" in dtype
    if y.ndim == 1 and not is_float:
        return ""
    is_binary = y.ndim == 2 and shape[0] > 0 and bool(((y == 0) | (y == 1)).all())
    if y.ndim == 2 and shape[1] == 1:
        advice = "Use y.reshape(-1) for a column of class numbers"
    elif is_binary and bool((y.sum(1) == 1).all()):
        advice = "They seem to be one-hot: use y.argmax(1)"
    elif is_binary:
        advice = "Multi-label classification is not supported yet. Train one run for each label: y[:, 0]"
    elif y.ndim > 2:
        advice = "A class for each pixel (segmentation) is not supported"
    elif is_float:
        advice = "Regression is not supported yet. If they are class numbers that were read as floats, use y.long()"
    else:
        advice = "A class for each token, and several targets for each sample, are not supported"
    return f"{dtype} of shape {shape}. Expected: integer class numbers of shape [N]. {advice}"


def label_hint(low: int, high: int, classes: int) -> str:
    """Return the usual cause of labels from `low` to `high` that are outside 0 .. classes-1."""
    if low == -100:
        return "-100 marks labels that PyTorch's loss ignores: remove these samples"
    if low < 0:
        return "Negative labels usually mark samples without a label: remove these samples"
    if low >= 1 and high == classes:
        return "The labels seem to start at 1: subtract 1"
    return f"The usual cause is a wrong number of classes: set classes to at least {high + 1}"


def hash_labels(digest: Digest, dataset: Any, n: int) -> None:
    """Add the labels that a data set holds in memory, as those of torchvision and `TensorDataset` do."""
    tensors = getattr(dataset, "tensors", None)
    last = tensors[-1:] if isinstance(tensors, tuple | list) else ()
    for labels in (getattr(dataset, "targets", None), getattr(dataset, "labels", None), *last):
        if isinstance(labels, Tensor | np.ndarray | list | tuple) and len(labels) == n:
            array = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
            digest.update(array.tobytes() if array.dtype.kind in "iufb" else repr(list(labels)).encode())


def hash_sample(digest: Digest, sample: tuple[Any, Any], again: tuple[Any, Any]) -> None:
    """Add a sample that was read twice with equal seeds; a part that differs is random, so only its layout counts."""
    for part, second in zip(_parts(sample), _parts(again), strict=True):
        digest.update(f"{part.dtype}{part.shape}".encode())
        if part.dtype.kind != "O" and part.tobytes() == second.tobytes():
            digest.update(part.tobytes())


def _parts(value: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(value, Mapping):
        return [part for name in sorted(value) for part in _parts(value[name])]
    if isinstance(value, tuple | list):
        return [part for item in value for part in _parts(item)]
    if isinstance(value, Tensor):  # NumPy has no bfloat16
        tensor = value.detach().cpu().contiguous()
        return [(tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()]
    return [np.asarray(value)]
