"""The protocol of a metric."""

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
    """A metric of predictions, computed in one pass that all metrics of the same output function share.

    `update` turns the outputs `[M, B, ...]` of a batch into sums, or with `reduce="cat"` into rows to concatenate.
    `compute` turns the reduced sums into named values. Members are named by their position in the outputs; the caller
    replaces positions by member numbers.
    """

    update: Callable[[Tensor, Batch], TensorTree]
    compute: Callable[[TensorTree], Mapping[RowName, Estimate] | Mapping[str, Estimate]]
    output: OutputFn = logits
    reduce: Literal["sum", "cat"] = "sum"
    higher_is_better: bool | None = True  # None: neither direction is better
    group: Literal["performance", "uncertainty", "diversity"] = "performance"
    default: bool = True  # part of "all"; False: expensive, large, or not applicable to every run
    percent: bool = False  # displayed in percent
    min_members: int = 1
    definition: str = ""  # which definition of the metric, needed to compare the value with other sources
