"""Whether confidence is deserved: calibration errors by bins of confidence, and the bins themselves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plateaux.bins import binned, check_bins, equal_mass, equal_width, guesses, unpack
from plateaux.estimates import mean, share
from plateaux.exchange import Measure
from plateaux.kept import confidences
from plateaux.registry import measure
from plateaux.tables import cell, log_probabilities, row_names
from plateaux.types import Batch, Tree, Value

CELLS_AT_MOST = 300  # classes times bins, whose products two by two an error needs: 0.7 MB a row
ERROR = "error by the delta method with the bins' samples fixed; a bin of one sample adds none"


@measure
def ece(*, bins: int = 15) -> Measure:
    """Expected calibration error: |accuracy - confidence| over equal-width bins, weighted by their samples.

    Bin i holds confidences in [i/bins, (i+1)/bins); the last one is closed, so that a confidence of 1 has a home.
    """
    check_bins(bins)

    def settle(table: Tensor, batch: Batch) -> Tree:
        confidence, right = _confidence(table, batch)
        home = equal_width(confidence, bins)
        sums = binned(home, [torch.ones_like(confidence), confidence, right], bins)
        return {"sums": sums, "squares": binned(home, [(right - confidence) ** 2], bins)[..., 0]}

    def finish(sums: Tree) -> Mapping[str, Value]:
        count, confidence, right = sums["sums"].unbind(-1)
        rows = zip(row_names(len(count)), count, right - confidence, sums["squares"], strict=True)
        return {name: _gap(*tallies) for name, *tallies in rows}

    convention = f"{bins} equal-width bins, [low, high) and the last one closed; largest probability; {ERROR}"
    return Measure(settle, finish, better="lower", asks="sure", percent=True, convention=convention)


@measure
def adaptive_ece(*, bins: int = 15) -> Measure:
    """Expected calibration error over bins of equally many samples."""
    check_bins(bins)

    def finish(sums: Tree) -> Mapping[str, Value]:
        kept = sums["kept"].T.cpu()
        return {name: adaptive(row) for name, row in zip(row_names(len(kept)), kept, strict=True)}

    def adaptive(packed: Tensor) -> Value:
        doubt, right = unpack(packed)
        gap = right.double() - doubt.neg().exp()
        return _gap(*binned(equal_mass(-doubt, bins), [torch.ones_like(gap), gap, gap**2], bins).unbind(-1))

    return Measure(
        confidences,
        finish,
        merge="cat",
        better="lower",
        asks="sure",
        percent=True,
        convention=f"{bins} bins of equally many samples; equal confidences share the bin of their lowest rank; "
        f"largest probability; {ERROR}",
    )


@measure
def classwise_ece(*, bins: int = 15) -> Measure:
    """The mean over classes of the calibration error of each class's probability against the rest."""
    check_bins(bins)

    def settle(table: Tensor, batch: Batch) -> Tree:
        p = log_probabilities(table).double().exp().clamp(max=1)  # [R, B, C]
        gap = torch.nn.functional.one_hot(batch.y, p.shape[-1]) - p
        home = equal_width(p, bins)
        sums = {"gaps": binned(home.mT, [gap.mT], bins)[..., 0], "count": torch.tensor(len(batch))}  # [R, C, bins]
        return sums | ({"products": _products(home, gap, bins)} if p.shape[-1] * bins <= CELLS_AT_MOST else {})

    return Measure(
        settle,
        _classwise,
        better="lower",
        asks="sure",
        percent=True,
        convention=f"{bins} equal-width bins, [low, high) and the last one closed; mean over all classes; error by the "
        f"delta method, none above {CELLS_AT_MOST // bins} classes",
    )


@measure
def reliability(*, bins: int = 15) -> Measure:
    """Share of samples, mean confidence and accuracy in every bin of confidence: a reliability diagram in numbers."""
    check_bins(bins)

    def settle(table: Tensor, batch: Batch) -> Tree:
        confidence, right = _confidence(table, batch)
        parts = [torch.ones_like(confidence), confidence, confidence**2, right]
        return {"sums": binned(equal_width(confidence, bins), parts, bins)}

    def finish(sums: Tree) -> Mapping[str, Value]:
        return {
            cell(name, f"bin {number}", what): value
            for name, row in zip(row_names(len(sums["sums"])), sums["sums"], strict=True)
            for number, tallies in enumerate(row.tolist())
            for what, value in _bin(float(row[:, 0].sum()), *tallies).items()
        }

    return Measure(
        settle,
        finish,
        better="neither",
        usual=False,
        asks="sure",
        percent=True,
        convention=f"bin i holds confidences from i/{bins} up to (i+1)/{bins}, the last one 1 too; empty bins are left "
        "out; binomial errors, that of the confidence over the bin's samples",
    )


def _bin(samples: float, count: float, confidence: float, squares: float, right: float) -> dict[str, Value]:
    if not count:
        return {}
    return {
        "share": share(count, samples),
        "confidence": mean(confidence, squares, count),
        "accuracy": share(right, count),
    }


def _confidence(table: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return confidence and rightness, 0 or 1, in float64 `[R, B]`."""
    log_confidence, guess = guesses(log_probabilities(table))
    return log_confidence.double().exp(), (guess == batch.y).double()


def _gap(count: Tensor, gap: Tensor, squares: Tensor) -> Value:
    """Return the calibration error from every bin's samples, sum of right - confidence and sum of its squares."""
    inside = (squares - gap * gap / count.clamp(min=1)).clamp(min=0)
    spread = (inside * count / (count - 1).clamp(min=1)).sum()
    return Value(float(gap.abs().sum() / count.sum()), float(spread.sqrt() / count.sum()))


def _products(home: Tensor, gap: Tensor, bins: int) -> Tensor:
    """Return the summed products of every two cells' gaps: `[R, C * bins, C * bins]`; a cell is a class and a bin."""
    cells = home + bins * torch.arange(home.shape[-1], device=home.device)
    laid = gap.new_zeros(*gap.shape[:-1], gap.shape[-1] * bins).scatter(-1, cells, gap)  # [R, B, C * bins]
    return laid.mT @ laid


def _classwise(sums: Tree) -> Mapping[str, Value]:
    count, classes = float(sums["count"]), sums["gaps"].shape[1]
    numbers = sums["gaps"].abs().sum((1, 2)) / (classes * count)
    errors: list[float | None] = [None] * len(numbers)
    if "products" in sums:
        # A sample's influence is the sum of its gaps, each with the sign of its cell, less the mean of such sums.
        sign = sums["gaps"].flatten(1).sign()[:, None]
        squares = (sign @ sums["products"] @ sign.mT).flatten() / classes**2
        errors = [mean(float(n) * count, float(s), count).error for n, s in zip(numbers, squares, strict=True)]
    rows = zip(row_names(len(numbers)), numbers.tolist(), errors, strict=True)
    return {name: Value(number, error) for name, number, error in rows}
