"""What was found in the samples of a data set: plain values that are stored in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plateaux.core.ranges import Finite, StoredInt


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """The dtype and the range of a tensor, and the shape of one sample; the range is None if it is not finite."""

    dtype: str
    shape: tuple[StoredInt, ...]
    low: Finite | None
    high: Finite | None


@dataclass(frozen=True, slots=True)
class DataSummary:
    """What was found in the training samples."""

    inputs: Mapping[str, TensorSummary]  # by name; a single tensor is called "x"
    labels: TensorSummary
    classes: StoredInt  # of the data set
    classes_found: StoredInt | None  # distinct labels among the checked ones; None: labels are not class numbers
    checked_inputs: StoredInt
    checked_labels: StoredInt


def class_names(labels: Sequence[str], classes: int) -> tuple[str, ...]:
    """Return the names of the classes, or their numbers if they have no names."""
    return tuple(labels) if len(labels) == classes else tuple(str(number) for number in range(classes))
