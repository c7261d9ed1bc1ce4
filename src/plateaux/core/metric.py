"""The contract of a metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from plateaux.core.outputs import OutputFn, logits
from plateaux.core.row_names import RowName
from plateaux.core.types import Batch, Estimate, TensorTree


@dataclass(frozen=True, slots=True)
class Metric:
    """A question about predictions that is answered in one pass, shared with all measures of the same offer.

    `settle` turns the table `[M, B, ...]` and its batch into sums (or rows to keep, `merge="cat"`); `finish` turns the
    merged sums into named numbers. Members are named by their position in the table: the walk knows their numbers.
    """

    update: Callable[[Tensor, Batch], TensorTree]
    compute: Callable[[TensorTree], Mapping[RowName, Estimate] | Mapping[str, Estimate]]
    output: OutputFn = logits
    reduce: Literal["sum", "cat"] = "sum"
    higher_is_better: bool | None = True  # None: neither direction is better
    group: Literal["performance", "uncertainty", "diversity"] = (
        "performance"  # how good, how sure, how different the predictions are
    )
    default: bool = True  # asked for by "all"; not what makes a large table, or is not for every run
    percent: bool = False  # shown in percent
    min_members: int = 1  # so many members it takes
    definition: str = ""  # what must be known to compare the number with somebody else's
