"""Warnings about the samples of a data set in memory, which cost a fraction of a second for 50,000 images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.types import Inputs
from plateaux.data.samples import sample_ids
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.data.warning_table import limit, warning

MAX_ROWS = 100_000  # of each split that are hashed
MAX_WORDS = 128  # of eight bytes each, of a sample that are hashed
MIN_CHECKED, MAX_CHECKED, MAX_VALUES = 10, 2_000, 200_000  # rows and values of a table whose columns are checked


def data_warnings(data: DataSplits) -> dict[str, str]:
    """Return warnings by name; of samples that are not in memory, only their number and classes are checked."""
    found: dict[str, str] = {}
    train, test, samples = data.train, data.test, len(data.train)
    if data.classes > limit("many-classes") * samples:
        found |= warning("many-classes", classes=data.classes, samples=samples)
    if not isinstance(train, InMemorySource):
        return found
    found |= _feature_warnings(train, data)
    if isinstance(test, InMemorySource) and len(test):
        found |= _test_warnings(train, test)
    return found


def _test_warnings(train: InMemorySource, test: InMemorySource) -> dict[str, str]:
    found: dict[str, str] = {}
    known, classes = (set(torch.unique(source.y).tolist()) for source in (train, test))
    if train.y.ndim == test.y.ndim == 1 and (missing := sorted(classes - known)):
        found |= warning("test-only-class", missing, count=len(missing), classes=len(classes | known))
    ours, theirs = (_row_hashes(source.x, len(source)) for source in (train, test))
    count, repeated = int(np.isin(theirs, ours).sum()), len(ours) - len(np.unique(ours))
    facts: dict[str, Any] = {"count": count, "checked": len(theirs), "repeated": repeated, "samples": len(ours)}
    if count > limit("test-in-train") * len(theirs):
        is_repeated = repeated > limit("repeated-rows") * len(ours)
        found |= warning("repeated-rows" if is_repeated else "test-in-train", **facts)
    return found


def _row_hashes(x: Inputs, count: int) -> NDArray[np.uint64]:
    """Return a hash of every sample, from at most `MAX_WORDS` words of each of its tensors."""
    hashes = np.zeros(min(count, MAX_ROWS), np.uint64)
    factors = np.random.default_rng(0).integers(2**63, size=MAX_WORDS, dtype=np.uint64) | np.uint64(1)
    for tensor in filter(torch.numel, [x] if isinstance(x, Tensor) else [x[name] for name in sorted(x)]):
        rows = tensor if count <= MAX_ROWS else tensor[sample_ids(count, MAX_ROWS).to(tensor.device)]
        content = rows.detach().cpu().reshape(len(rows), -1).contiguous().view(torch.uint8).numpy()
        if content.shape[1] % 8:
            content = np.pad(content, ((0, 0), (0, -content.shape[1] % 8)))
        words = content.view(np.uint64)
        words = words[:, :: -(-words.shape[1] // MAX_WORDS) or 1]
        words = (words ^ (words >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
        words ^= words >> np.uint64(29)
        hashes = hashes * np.uint64(31) + (words * factors[: words.shape[1]]).sum(1, dtype=np.uint64)
    return hashes


def _feature_warnings(train: InMemorySource, data: DataSplits) -> dict[str, str]:
    """Return warnings about the columns of a table."""
    x = train.x
    if not isinstance(x, Tensor) or x.ndim != 2 or train.y.ndim != 1 or x.is_complex() or len(x) < MIN_CHECKED:
        return {}
    ids = sample_ids(len(x), max(MIN_CHECKED, min(MAX_CHECKED, MAX_VALUES // max(1, x.shape[1])))).to(x.device)
    rows, found = x[ids].double(), dict[str, str]()
    columns = data.preprocessing.columns
    names = columns if len(columns) == x.shape[1] else tuple(map(str, range(x.shape[1])))
    facts: dict[str, Any] = {"total": x.shape[1], "checked": len(rows)}
    if x.is_floating_point():
        ordered, tail = rows.sort(0).values, max(1, len(rows) // 10)
        spread = (ordered[-tail] - ordered[tail - 1]).to(x.device)
        flat = (spread > 0) & (spread < limit("outlier") * x.std(0).double())
        if bool(flat.any()):
            found |= warning("outlier", _chosen(names, flat), count=int(flat.sum()), **facts)
    classes, labels = torch.unique(train.y[ids], return_inverse=True)
    if len(classes) > 1 and len(rows) >= limit("label-in-features") * len(classes):
        index = labels[:, None].expand(-1, rows.shape[1])
        bounds = (rows.new_zeros(len(classes), rows.shape[1]).scatter_reduce(0, index, rows, how, include_self=False)
                  for how in ("amin", "amax"))  # fmt: skip
        low, high = bounds
        tells = (low == high).all(0) & (low.sort(0).values.diff(dim=0) > 0).all(0)
        if bool(tells.any()):
            found |= warning("label-in-features", _chosen(names, tells), count=int(tells.sum()), **facts)
    return found


def _chosen(names: Sequence[str], is_chosen: Tensor) -> list[str]:
    return [names[number] for number in is_chosen.nonzero().flatten().tolist()]
