"""Recall, precision and F1 of every class, and their means over classes.

All of them follow from three counts per class: correct predictions (hits), predictions, and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.metric import Metric
from plateaux.core.ranges import CountOrZero
from plateaux.core.registry import metric
from plateaux.core.row_names import RowName, row_name, row_names
from plateaux.core.stats.estimates import proportion
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import predictions

MAX_CONFUSION_CLASSES = 200  # a confusion matrix of 1000 classes would take 8 MB per row and subset of members
NAN = Estimate(float("nan"))


class Counts(NamedTuple):
    """The counts of every class, for one row."""

    hits: Tensor  # [C] in float64, as the other two
    predicted: Tensor
    labeled: Tensor


@metric
def balanced_accuracy() -> Metric:
    """Balanced accuracy: mean recall over classes."""

    def value(counts: Counts, _: Tensor | None) -> Estimate:
        occurs = counts.labeled > 0
        recall, samples = counts.hits[occurs] / counts.labeled[occurs], counts.labeled[occurs]
        error = (recall * (1 - recall) / samples).sum().sqrt() / len(recall)
        return Estimate(float(recall.mean()), float(error))

    return Metric(
        _update,
        _compute_rows(value),
        percent=True,
        definition="mean recall over the classes that occur; standard error from the binomial errors of the recalls",
    )


@metric
def macro_f1() -> Metric:
    """Macro F1 score: mean over classes of F1 = 2 hits / (labeled + predicted)."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        pred, classes = predictions(logits), logits.shape[-1]
        sums = _class_counts(pred, batch.y, classes)
        has_matrix = classes <= MAX_CONFUSION_CLASSES
        return sums | ({"matrix": _confusion_matrix(pred, batch.y, classes)} if has_matrix else {})

    return Metric(
        update,
        _compute_rows(_macro_f1),
        percent=True,
        definition="mean F1 over the classes that occur or are predicted; standard error by the delta method, "
        f"none above {MAX_CONFUSION_CLASSES} classes",
    )


@metric
def binary_f1(*, positive: CountOrZero = 1) -> Metric:
    """F1 score of the positive class in binary classification: 2 hits / (labeled + predicted)."""
    if positive not in (0, 1):
        raise RecipeError(
            f"binary_f1 was given positive = {positive}; allowed: 0 or 1, the number of the positive class"
        )

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        if logits.shape[-1] != 2:
            raise RecipeError(f"binary_f1 needs 2 classes, and the data have {logits.shape[-1]}; use macro_f1 instead")
        return _update(logits, batch)

    return Metric(
        update,
        _compute_rows(lambda counts, _: _f1(*(float(count[positive]) for count in counts))),
        default=False,
        percent=True,
        definition=f"positive class {positive}; NaN if it neither occurs nor is predicted; standard error by the delta "
        "method",
    )


@metric
def per_class() -> Metric:
    """Recall, precision, F1 score and number of samples of every class."""

    def compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return {
            row_name(name, f"class {number}", part): value
            for name, counts, _ in _rows(sums)
            for number, class_counts in enumerate(zip(*(count.tolist() for count in counts), strict=True))
            for part, value in _summarize_class(*class_counts).items()
        }

    return Metric(
        _update,
        compute,
        higher_is_better=None,
        default=False,
        definition="fractions, not percent; NaN where the denominator is zero; binomial standard errors of recall and "
        "precision, by the delta method for F1",
    )


def _summarize_class(hits: float, predicted: float, labeled: float) -> dict[str, Estimate]:
    return {
        "recall": proportion(hits, labeled) if labeled else NAN,
        "precision": proportion(hits, predicted) if predicted else NAN,
        "f1": _f1(hits, predicted, labeled),
        "samples": Estimate(labeled),
    }


def _f1(hits: float, predicted: float, labeled: float) -> Estimate:
    """Return F1 with its standard error by the delta method.

    The influence of a hit is 2 (1 - F1), that of a false negative or false positive is -F1, over labeled + predicted.
    """
    total = predicted + labeled
    if not total:
        return NAN
    f1 = 2 * hits / total
    return Estimate(f1, (hits * (2 - 2 * f1) ** 2 + (total - 2 * hits) * f1**2) ** 0.5 / total)


def _macro_f1(counts: Counts, matrix: Tensor | None) -> Estimate:
    hits, total = counts.hits, (counts.predicted + counts.labeled).clamp(min=1)
    classes = int((counts.predicted + counts.labeled > 0).sum())
    f1 = 2 * hits / total
    value = float(f1.sum() / classes)
    if matrix is None:
        return Estimate(value)
    decrease = f1 / total  # an incorrect prediction lowers the F1 of its label's class, and of the predicted class
    influence = torch.diag(2 / total) - decrease[:, None] - decrease  # [C, C], labels x predictions
    return Estimate(value, float((matrix * influence**2).sum().sqrt() / classes))


def _update(logits: Tensor, batch: Batch) -> TensorTree:
    return _class_counts(predictions(logits), batch.y, logits.shape[-1])


def _class_counts(pred: Tensor, y: Tensor, classes: int) -> TensorTree:
    """Return the counts of every class `[R, C]` from predictions `[R, B]` and labels `[B]`."""
    label, one = y.expand_as(pred), torch.ones_like(pred)
    zeros = pred.new_zeros(len(pred), classes)
    return {
        "hits": zeros.scatter_add(1, label, (pred == label).long()),
        "predicted": zeros.scatter_add(1, pred, one),
        "labeled": zeros.scatter_add(1, label, one),
    }


def _confusion_matrix(pred: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return the confusion matrix of every row, labels x predictions: `[R, C, C]`."""
    zeros = pred.new_zeros(len(pred), classes * classes)
    return zeros.scatter_add(1, y * classes + pred, torch.ones_like(pred)).view(-1, classes, classes)


def _rows(sums: TensorTree) -> list[tuple[RowName, Counts, Tensor | None]]:
    matrices = sums["matrix"].double() if "matrix" in sums else [None] * len(sums["hits"])
    counts = zip(*(sums[name].double() for name in Counts._fields), strict=True)
    names = row_names(len(sums["hits"]))
    return [(name, Counts(*row), matrix) for name, row, matrix in zip(names, counts, matrices, strict=True)]


def _compute_rows(
    value: Callable[[Counts, Tensor | None], Estimate],
) -> Callable[[TensorTree], Mapping[RowName, Estimate]]:
    """Return a `compute` function that applies `value` to the counts and the confusion matrix of every row."""
    return lambda sums: {name: value(counts, matrix) for name, counts, matrix in _rows(sums)}
