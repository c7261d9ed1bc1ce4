"""Whether confidence is deserved: calibration errors by bins of confidence, and the bins themselves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.metric import Metric
from plateaux.core.registry import metric
from plateaux.core.row_names import RowName, row_name, row_names
from plateaux.core.stats.estimates import mean, proportion
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.evaluation.confidence import (
    Codes,
    TieGroups,
    bin_sums,
    check_bins,
    confidence_and_prediction,
    confidences,
    equal_mass,
    equal_width,
    groups,
    sort_by_confidence,
)

CELLS_AT_MOST = 300  # classes times bins, whose products two by two an error needs: 0.7 MB a row
ERROR = "error by the delta method with the bins' samples fixed; a bin of one sample adds none"


@metric
def ece(*, bins: int = 15) -> Metric:
    """Expected calibration error: |accuracy - confidence| over equal-width bins, weighted by their samples.

    Bin i holds confidences in [i/bins, (i+1)/bins); the last one is closed, so that a confidence of 1 has a home.
    """
    check_bins(bins)

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        confidence, right = _confidence(table, batch)
        home = equal_width(confidence, bins)
        sums = bin_sums(home, [torch.ones_like(confidence), confidence, right], bins)
        return {"sums": sums, "squares": bin_sums(home, [(right - confidence) ** 2], bins)[..., 0]}

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        count, confidence, right = sums["sums"].unbind(-1)
        rows = zip(row_names(len(count)), count, right - confidence, sums["squares"], strict=True)
        return {name: _gap(*tallies) for name, *tallies in rows}

    convention = f"{bins} equal-width bins, [low, high) and the last one closed; largest probability; {ERROR}"
    return Metric(settle, finish, higher_is_better=False, group="uncertainty", percent=True, definition=convention)


@metric
def adaptive_ece(*, bins: int = 15) -> Metric:
    """Expected calibration error over bins of equally many samples."""
    check_bins(bins)

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        rows = sums["kept"].unbind(-1)
        return {name: adaptive(sort_by_confidence(row)) for name, row in zip(row_names(len(rows)), rows, strict=True)}

    def adaptive(codes: Codes) -> Estimate:
        tallies = np.zeros((3, bins))
        for each in groups(codes):
            tallies += _tallies(each, len(codes), bins)
        return _gap(*torch.from_numpy(tallies))

    return Metric(
        confidences,
        finish,
        reduce="cat",
        higher_is_better=False,
        group="uncertainty",
        percent=True,
        definition=f"{bins} bins of equally many samples; equal confidences share the bin of their lowest rank; "
        f"largest probability; {ERROR}",
    )


@metric
def classwise_ece(*, bins: int = 15) -> Metric:
    """The mean over classes of the calibration error of each class's probability against the rest."""
    check_bins(bins)

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        p = log_probabilities(table).double().exp().clamp(max=1)  # [R, B, C]
        gap = torch.nn.functional.one_hot(batch.y, p.shape[-1]) - p
        home = equal_width(p, bins)
        sums = {"gaps": bin_sums(home.mT, [gap.mT], bins)[..., 0], "count": torch.tensor(len(batch))}  # [R, C, bins]
        return sums | ({"products": _products(home, gap, bins)} if p.shape[-1] * bins <= CELLS_AT_MOST else {})

    return Metric(
        settle,
        _classwise,
        higher_is_better=False,
        group="uncertainty",
        percent=True,
        definition=f"{bins} equal-width bins, [low, high) and the last one closed; mean over all classes; error by the "
        f"delta method, none above {CELLS_AT_MOST // bins} classes",
    )


@metric
def reliability(*, bins: int = 15) -> Metric:
    """Share of samples, mean confidence and accuracy in every bin of confidence: a reliability diagram in numbers."""
    check_bins(bins)

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        confidence, right = _confidence(table, batch)
        parts = [torch.ones_like(confidence), confidence, confidence**2, right]
        return {"sums": bin_sums(equal_width(confidence, bins), parts, bins)}

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return {
            row_name(name, f"bin {number}", what): value
            for name, row in zip(row_names(len(sums["sums"])), sums["sums"], strict=True)
            for number, tallies in enumerate(row.tolist())
            for what, value in _bin(float(row[:, 0].sum()), *tallies).items()
        }

    return Metric(
        settle,
        finish,
        higher_is_better=None,
        default=False,
        group="uncertainty",
        percent=True,
        definition=f"bin i holds confidences from i/{bins} up to (i+1)/{bins}, the last one 1 too; empty bins are left "
        "out; binomial errors, that of the confidence over the bin's samples",
    )


def _bin(samples: float, count: float, confidence: float, squares: float, right: float) -> dict[str, Estimate]:
    if not count:
        return {}
    return {
        "share": proportion(count, samples),
        "confidence": mean(confidence, squares, count),
        "accuracy": proportion(right, count),
    }


def _confidence(table: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return confidence and rightness, 0 or 1, in float64 `[R, B]`."""
    log_confidence, guess = confidence_and_prediction(log_probabilities(table))
    return log_confidence.double().exp(), (guess == batch.y).double()


def _tallies(each: TieGroups, samples: int, bins: int) -> NDArray[np.float64]:
    """Return every bin's samples, sum of right - confidence and sum of its squares, `[3, bins]`."""
    confidence, right, home = (
        np.exp(-each.error_probability),
        each.size - each.incorrect,
        equal_mass(each, samples, bins),
    )
    squares = right * (1 - confidence) ** 2 + each.incorrect * confidence**2
    parts = (each.size, right - each.size * confidence, squares)
    return np.stack([np.bincount(home, part, minlength=bins) for part in parts])


def _gap(count: Tensor, gap: Tensor, squares: Tensor) -> Estimate:
    """Return the calibration error from every bin's samples, sum of right - confidence and sum of its squares."""
    inside = (squares - gap * gap / count.clamp(min=1)).clamp(min=0)
    spread = (inside * count / (count - 1).clamp(min=1)).sum()
    return Estimate(float(gap.abs().sum() / count.sum()), float(spread.sqrt() / count.sum()))


def _products(home: Tensor, gap: Tensor, bins: int) -> Tensor:
    """Return the summed products of every two cells' gaps: `[R, C * bins, C * bins]`; a cell is a class and a bin.

    The product of two different classes is counted twice in the cell of the first by that of the second, and not at
    all in that of the second by the first: a sum with signs on both sides comes out the same.
    """
    rows, _, classes = home.shape
    home, gap = home.mT.contiguous(), gap.mT.contiguous()  # [R, C, B]
    cells = home + bins * torch.arange(classes, device=home.device)[:, None]
    sums = gap.new_zeros(rows, (classes * bins) ** 2)
    for one in range(classes):
        where = (cells[:, one, None] * (classes * bins) + cells[:, one:]).flatten(1)
        product = gap[:, one, None] * gap[:, one:]
        product[:, 1:] *= 2
        sums.scatter_add_(1, where, product.flatten(1))
    return sums.view(rows, classes * bins, classes * bins)


def _classwise(sums: TensorTree) -> Mapping[RowName, Estimate]:
    count, classes = float(sums["count"]), sums["gaps"].shape[1]
    numbers = sums["gaps"].abs().sum((1, 2)) / (classes * count)
    errors: list[float | None] = [None] * len(numbers)
    if "products" in sums:
        # A sample's influence is the sum of its gaps, each with the sign of its cell, less the mean of such sums.
        sign = sums["gaps"].flatten(1).sign()[:, None]
        squares = (sign @ sums["products"] @ sign.mT).flatten() / classes**2
        errors = [mean(float(n) * count, float(s), count).stderr for n, s in zip(numbers, squares, strict=True)]
    rows = zip(row_names(len(numbers)), numbers.tolist(), errors, strict=True)
    return {name: Estimate(number, error) for name, number, error in rows}
