"""Proper scoring rules: negative log-likelihood (NLL), Brier score, and the decomposition of the Brier score."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plateaux.core.metric import Metric
from plateaux.core.ranges import Count
from plateaux.core.registry import metric
from plateaux.core.row_names import RowName, row_name, row_names
from plateaux.core.stats.estimates import means_from_sums, sums_and_squares
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.evaluation.confidence import bin_sums, equal_width


@metric
def nll() -> Metric:
    """Negative log-likelihood (NLL, log loss, cross-entropy) of the correct class, in nats."""
    return _mean_metric(lambda log_p, y: -_take_label(log_p, y), "natural logarithm; standard error over samples")


@metric
def brier() -> Metric:
    """Brier score: squared distance between probabilities and one-hot labels, summed over classes (0 to 2)."""
    return _mean_metric(
        _brier,
        "summed over classes, 0 to 2: for two classes, twice the value of scikit-learn; standard error over samples",
    )


@metric
def brier_parts(*, bins: Count = 15) -> Metric:
    """Decomposition of the Brier score: reliability, resolution, uncertainty and remainder, by bins of probability."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        log_p = log_probabilities(logits)
        p = log_p.double().exp().mT  # [R, C, B]
        label = (torch.arange(p.shape[1], device=p.device)[:, None] == batch.y).expand_as(p)
        sums = bin_sums(equal_width(p, bins), [torch.ones_like(p), p, label], bins)  # [R, C, bins, 3]
        return {"sums": sums, "score": _brier(log_p, batch.y).double().sum(-1), "count": torch.tensor(len(batch))}

    def compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
        names = row_names(len(sums["score"]))
        rows = zip(names, sums["sums"], sums["score"] / sums["count"], strict=True)
        return {
            row_name(name, part): value
            for name, bin_stats, score in rows
            for part, value in _decompose(bin_stats, float(score)).items()
        }

    return Metric(
        update,
        compute,
        higher_is_better=None,
        default=False,
        group="uncertainty",
        definition=f"Murphy's decomposition of each class against the rest over {bins} equal-width bins, summed over "
        "classes (0 to 2); reliability - resolution + uncertainty + remainder = brier; the remainder is the variation "
        "inside bins; standard error of the uncertainty by the delta method, none for the others",
    )


def _decompose(bin_stats: Tensor, score: float) -> dict[str, Estimate]:
    """Return Murphy's decomposition of a Brier score.

    `bin_stats` `[C, bins, 3]` has the number of samples, the sum of probabilities, and the number of labels of each
    class and bin.
    """
    samples, total, labels = bin_stats.unbind(-1)
    count = samples[0].sum()
    frequency = labels.sum(-1, keepdim=True) / count  # [C, 1] of each class among the labels
    divisor = samples.clamp(min=1)
    reliability = float(((total - labels) ** 2 / divisor).sum() / count)
    resolution = float((samples * (labels / divisor - frequency) ** 2).sum() / count)
    uncertainty = float((frequency * (1 - frequency)).sum())
    variance = float((frequency**3).sum() - (frequency**2).sum() ** 2)
    return {
        "reliability": Estimate(reliability),
        "resolution": Estimate(resolution),
        "uncertainty": Estimate(uncertainty, 2 * (max(variance, 0.0) / float(count)) ** 0.5),
        "remainder": Estimate(score - (reliability - resolution + uncertainty)),
    }


def _brier(log_p: Tensor, y: Tensor) -> Tensor:
    p = log_p.exp()
    return (p * p).sum(-1) - 2 * _take_label(p, y) + 1


def _take_label(rows: Tensor, y: Tensor) -> Tensor:
    """Return the values of `[R, B, C]` at the correct class: `[R, B]`."""
    return rows.gather(-1, y.expand(len(rows), -1)[..., None])[..., 0]


def _mean_metric(score: Callable[[Tensor, Tensor], Tensor], definition: str) -> Metric:
    """Return the metric that averages `score`, a map of log-probabilities `[R, B, C]` and labels `[B]` to `[R, B]`."""

    def update(logits: Tensor, batch: Batch) -> TensorTree:
        return sums_and_squares(score(log_probabilities(logits), batch.y))

    def compute(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return means_from_sums(sums, row_names(len(sums["sum"])))

    return Metric(update, compute, higher_is_better=False, group="uncertainty", definition=definition)
