"""Expected calibration error (ECE) and its variants, and the bins of a reliability diagram."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.metric import Metric
from plateaux.core.ranges import Count
from plateaux.core.registry import metric
from plateaux.core.row_names import RowName, row_name, row_names
from plateaux.core.stats.estimates import mean, proportion
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.evaluation.confidence import (
    Codes,
    TieGroups,
    bin_sums,
    confidence_and_prediction,
    confidence_metric,
    equal_mass,
    equal_width,
    tie_groups,
)

MAX_CELLS = 300  # classes x bins; the standard error needs all pairwise products of cells: 0.7 MB per row
STDERR = "standard error by the delta method with fixed samples per bin; bins of one sample add nothing to it"


@metric
def ece(*, bins: Count = 15) -> Metric:
    """Expected calibration error (ECE): mean |accuracy - confidence| over equal-width bins, weighted by their size.

    Bin i contains confidences in [i/bins, (i+1)/bins); the last bin is closed and includes a confidence of 1.
    """

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        confidence, correct = _confidence_and_correct(logits, batch)
        bin_index = equal_width(confidence, bins)
        sums = bin_sums(bin_index, [torch.ones_like(confidence), confidence, correct], bins)
        return {"sums": sums, "squares": bin_sums(bin_index, [(correct - confidence) ** 2], bins)[..., 0]}

    def compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
        count, confidence, correct = sums["sums"].unbind(-1)
        rows = zip(row_names(len(count)), count, correct - confidence, sums["squares"], strict=True)
        return {name: _calibration_error(*bin_stats) for name, *bin_stats in rows}

    definition = (
        f"{bins} equal-width bins [low, high), the last one closed; confidence is the largest probability; {STDERR}"
    )
    return Metric(update, compute, higher_is_better=False, group="uncertainty", percent=True, definition=definition)


@metric
def adaptive_ece(*, bins: Count = 15) -> Metric:
    """Adaptive calibration error: the expected calibration error (ECE) over bins with equal numbers of samples."""

    def value(codes: Codes) -> Estimate:
        bin_stats = np.zeros((3, bins))
        for ties in tie_groups(codes):
            bin_stats += _equal_mass_stats(ties, len(codes), bins)
        return _calibration_error(*torch.from_numpy(bin_stats))

    return confidence_metric(
        value,
        f"{bins} bins with equal numbers of samples; tied confidences share the bin of their lowest rank; "
        f"confidence is the largest probability; {STDERR}",
        percent=True,
    )


@metric
def classwise_ece(*, bins: Count = 15) -> Metric:
    """Classwise ECE: mean over classes of the expected calibration error of each class's probability, one-vs-rest."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        p = log_probabilities(logits).double().exp().clamp(max=1)  # [R, B, C]
        gap = torch.nn.functional.one_hot(batch.y, p.shape[-1]) - p
        bin_index = equal_width(p, bins)
        gaps = bin_sums(bin_index.mT, [gap.mT], bins)[..., 0]  # [R, C, bins]
        sums = {"gaps": gaps, "count": torch.tensor(len(batch))}
        return sums | ({"products": _products(bin_index, gap, bins)} if p.shape[-1] * bins <= MAX_CELLS else {})

    return Metric(
        update,
        _compute_classwise,
        higher_is_better=False,
        group="uncertainty",
        percent=True,
        definition=f"{bins} equal-width bins [low, high), the last one closed; mean over all classes; standard error "
        f"by the delta method, none above {MAX_CELLS // bins} classes",
    )


@metric
def reliability(*, bins: Count = 15) -> Metric:
    """Reliability diagram as numbers: fraction of samples, mean confidence and accuracy of every confidence bin."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        confidence, correct = _confidence_and_correct(logits, batch)
        parts = [torch.ones_like(confidence), confidence, confidence**2, correct]
        return {"sums": bin_sums(equal_width(confidence, bins), parts, bins)}

    def compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return {
            row_name(name, f"bin {number}", part): value
            for name, row in zip(row_names(len(sums["sums"])), sums["sums"], strict=True)
            for number, bin_stats in enumerate(row.tolist())
            for part, value in _summarize_bin(float(row[:, 0].sum()), *bin_stats).items()
        }

    return Metric(
        update,
        compute,
        higher_is_better=None,
        default=False,
        group="uncertainty",
        percent=True,
        definition=f"bin i is [i/{bins}, (i+1)/{bins}), the last one closed; empty bins are omitted; binomial standard "
        "errors, that of the confidence over the samples of the bin",
    )


def _summarize_bin(
    samples: float, count: float, confidence: float, squares: float, correct: float
) -> dict[str, Estimate]:
    """Return the named values of one bin; none if the bin is empty."""
    if not count:
        return {}
    return {
        "share": proportion(count, samples),
        "confidence": mean(confidence, squares, count),
        "accuracy": proportion(correct, count),
    }


def _confidence_and_correct(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the confidence, and 1 for correct and 0 for incorrect predictions, in float64 `[R, B]`."""
    log_confidence, pred = confidence_and_prediction(log_probabilities(logits))
    return log_confidence.double().exp(), (pred == batch.y).double()


def _equal_mass_stats(ties: TieGroups, samples: int, bins: int) -> NDArray[np.float64]:
    """Return the count, the sum of correct - confidence, and the sum of its squares of every bin: `[3, bins]`."""
    confidence = np.exp(-ties.neg_log_confidence)
    correct = ties.size - ties.incorrect
    bin_index = equal_mass(ties, samples, bins)
    squares = correct * (1 - confidence) ** 2 + ties.incorrect * confidence**2
    parts = (ties.size, correct - ties.size * confidence, squares)
    return np.stack([np.bincount(bin_index, part, minlength=bins) for part in parts])


def _calibration_error(count: Tensor, gap: Tensor, squares: Tensor) -> Estimate:
    """Return the ECE from the count, the sum of correct - confidence, and the sum of its squares of every bin."""
    within = (squares - gap * gap / count.clamp(min=1)).clamp(min=0)
    variance = (within * count / (count - 1).clamp(min=1)).sum()
    return Estimate(float(gap.abs().sum() / count.sum()), float(variance.sqrt() / count.sum()))


def _products(bin_index: Tensor, gap: Tensor, bins: int) -> Tensor:
    """Return the summed products of the gaps of every two cells: `[R, C * bins, C * bins]`; a cell is a (class, bin).

    For two different classes, the product is counted twice in (first, second) and not at all in (second, first). The
    quadratic form with the signs on both sides is the same, at half the cost.
    """
    rows, _, classes = bin_index.shape
    bin_index, gap = bin_index.mT.contiguous(), gap.mT.contiguous()  # [R, C, B]
    cells = bin_index + bins * torch.arange(classes, device=bin_index.device)[:, None]
    sums = gap.new_zeros(rows, (classes * bins) ** 2)
    for first in range(classes):
        index = (cells[:, first, None] * (classes * bins) + cells[:, first:]).flatten(1)
        product = gap[:, first, None] * gap[:, first:]
        product[:, 1:] *= 2
        sums.scatter_add_(1, index, product.flatten(1))
    return sums.view(rows, classes * bins, classes * bins)


def _compute_classwise(sums: TensorTree) -> Mapping[RowName, Estimate]:
    count, classes = float(sums["count"]), sums["gaps"].shape[1]
    values = sums["gaps"].abs().sum((1, 2)) / (classes * count)
    errors: list[float | None] = [None] * len(values)
    if "products" in sums:
        # The influence of a sample is the sum of its gaps, each with the sign of its cell, minus the mean of such sums.
        sign = sums["gaps"].flatten(1).sign()[:, None]
        squares = (sign @ sums["products"] @ sign.mT).flatten() / classes**2
        errors = [mean(float(v) * count, float(s), count).stderr for v, s in zip(values, squares, strict=True)]
    rows = zip(row_names(len(values)), values.tolist(), errors, strict=True)
    return {name: Estimate(value, error) for name, value, error in rows}
