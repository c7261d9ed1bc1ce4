"""How good guesses are class by class: recall, precision, F1, and their means over classes.

Everything follows from three counts of every class: how often it was right (hits), guessed, and labelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.metric import Metric
from plateaux.core.registry import metric
from plateaux.core.row_names import RowName, row_name, row_names
from plateaux.core.stats.estimates import proportion
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import predictions

MATRIX_AT_MOST = 200  # classes; the matrix of 1000 would take 8 MB a row and cast
NOTHING = Estimate(float("nan"))


class Counts(NamedTuple):
    """What one row says of every class."""

    hits: Tensor  # [C] float64, like the other two
    guessed: Tensor
    labelled: Tensor


@metric
def balanced_accuracy() -> Metric:
    """The mean over classes of the share of their samples that is guessed right."""

    def value(counts: Counts, _: Tensor | None) -> Estimate:
        there = counts.labelled > 0
        recall, samples = counts.hits[there] / counts.labelled[there], counts.labelled[there]
        error = (recall * (1 - recall) / samples).sum().sqrt() / len(recall)
        return Estimate(float(recall.mean()), float(error))

    return Metric(
        _settle,
        _each_row(value),
        percent=True,
        definition="mean recall over the classes that occur; error from the recalls' binomial errors",
    )


@metric
def macro_f1() -> Metric:
    """The mean over classes of F1, which is 2 hits / (labelled + guessed)."""

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        guess, classes = predictions(table), table.shape[-1]
        sums = _tally(guess, batch.y, classes)
        return sums | ({"matrix": _matrix(guess, batch.y, classes)} if classes <= MATRIX_AT_MOST else {})

    return Metric(
        settle,
        _each_row(_macro_f1),
        percent=True,
        definition="mean F1 over the classes that occur or are guessed; error by the delta method, "
        f"none above {MATRIX_AT_MOST} classes",
    )


@metric
def binary_f1(*, positive: int = 1) -> Metric:
    """F1 of the positive class where there are two: 2 hits / (labelled + guessed)."""
    if positive not in (0, 1):
        raise RecipeError(f"binary_f1 with positive = {positive}: the positive class of two is 0 or 1")

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        if table.shape[-1] != 2:
            raise RecipeError(f"binary_f1 is of two classes and the data have {table.shape[-1]}; ask for macro_f1")
        return _settle(table, batch)

    return Metric(
        settle,
        _each_row(lambda counts, _: _f1(*(float(count[positive]) for count in counts))),
        default=False,
        percent=True,
        definition=f"positive class {positive}; nan if it neither occurs nor is guessed; error by the delta method",
    )


@metric
def per_class() -> Metric:
    """Recall, precision, F1 and number of samples of every class."""

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return {
            row_name(name, f"class {number}", what): value
            for name, counts, _ in _rows(sums)
            for number, three in enumerate(zip(*(count.tolist() for count in counts), strict=True))
            for what, value in _class(*three).items()
        }

    return Metric(
        _settle,
        finish,
        higher_is_better=None,
        default=False,
        definition="shares, not percent; nan where there is nothing to share; recall and precision with binomial "
        "errors, F1 by the delta method",
    )


def _class(hits: float, guessed: float, labelled: float) -> dict[str, Estimate]:
    return {
        "recall": proportion(hits, labelled) if labelled else NOTHING,
        "precision": proportion(hits, guessed) if guessed else NOTHING,
        "f1": _f1(hits, guessed, labelled),
        "samples": Estimate(labelled),
    }


def _f1(hits: float, guessed: float, labelled: float) -> Estimate:
    """Return F1; its influence is 2 (1 - F1) for a hit and -F1 for a miss or a false alarm, over labelled + guessed."""
    both = guessed + labelled
    if not both:
        return NOTHING
    f1 = 2 * hits / both
    return Estimate(f1, (hits * (2 - 2 * f1) ** 2 + (both - 2 * hits) * f1**2) ** 0.5 / both)


def _macro_f1(counts: Counts, matrix: Tensor | None) -> Estimate:
    hits, both = counts.hits, (counts.guessed + counts.labelled).clamp(min=1)
    classes = int((counts.guessed + counts.labelled > 0).sum())
    f1 = 2 * hits / both
    number = float(f1.sum() / classes)
    if matrix is None:
        return Estimate(number)
    loss = f1 / both  # what a wrong guess takes from the class of the label, and again from the class guessed
    influence = torch.diag(2 / both) - loss[:, None] - loss  # [C, C] label by guess
    return Estimate(number, float((matrix * influence**2).sum().sqrt() / classes))


def _settle(table: Tensor, batch: Batch) -> TensorTree:
    return _tally(predictions(table), batch.y, table.shape[-1])


def _tally(guess: Tensor, y: Tensor, classes: int) -> TensorTree:
    """Return the counts of every class `[R, C]` from guesses `[R, B]` and labels `[B]`."""
    label, one = y.expand_as(guess), torch.ones_like(guess)
    nothing = guess.new_zeros(len(guess), classes)
    return {
        "hits": nothing.scatter_add(1, label, (guess == label).long()),
        "guessed": nothing.scatter_add(1, guess, one),
        "labelled": nothing.scatter_add(1, label, one),
    }


def _matrix(guess: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return how often each class `y` was guessed to be each class: `[R, C, C]`."""
    nothing = guess.new_zeros(len(guess), classes * classes)
    return nothing.scatter_add(1, y * classes + guess, torch.ones_like(guess)).view(-1, classes, classes)


def _rows(sums: TensorTree) -> list[tuple[RowName, Counts, Tensor | None]]:
    matrices = sums["matrix"].double() if "matrix" in sums else [None] * len(sums["hits"])
    counts = zip(*(sums[name].double() for name in Counts._fields), strict=True)
    names = row_names(len(sums["hits"]))
    return [(name, Counts(*row), matrix) for name, row, matrix in zip(names, counts, matrices, strict=True)]


def _each_row(value: Callable[[Counts, Tensor | None], Estimate]) -> Callable[[TensorTree], Mapping[RowName, Estimate]]:
    return lambda sums: {name: value(counts, matrix) for name, counts, matrix in _rows(sums)}
