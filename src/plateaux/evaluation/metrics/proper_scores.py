"""Proper scores: negative log-likelihood and Brier, each a mean over samples, and what the Brier score is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plateaux.core.metric import Metric
from plateaux.core.registry import metric
from plateaux.core.row_names import RowName, row_name, row_names
from plateaux.core.stats.estimates import means_from_sums, sums_and_squares
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.evaluation.confidence import bin_sums, check_bins, equal_width


@metric
def nll() -> Metric:
    """Negative log-likelihood of the right class, in nats."""
    return _mean_metric(lambda log_p, y: -_of_right(log_p, y), "natural logarithm; error over samples")


@metric
def brier() -> Metric:
    """Brier score: the squared distance between probabilities and the right class, summed over classes (0 to 2)."""
    return _mean_metric(
        _brier, "summed over classes, 0 to 2, so of two classes twice scikit-learn's; error over samples"
    )


@metric
def brier_parts(*, bins: int = 15) -> Metric:
    """Reliability, resolution, uncertainty and remainder of the Brier score, by bins of every class's probability."""
    check_bins(bins)

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        log_p = log_probabilities(table)
        p = log_p.double().exp().mT  # [R, C, B]
        label = (torch.arange(p.shape[1], device=p.device)[:, None] == batch.y).expand_as(p)
        sums = bin_sums(equal_width(p, bins), [torch.ones_like(p), p, label], bins)  # [R, C, bins, 3]
        return {"sums": sums, "score": _brier(log_p, batch.y).double().sum(-1), "count": torch.tensor(len(batch))}

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        names = row_names(len(sums["score"]))
        rows = zip(names, sums["sums"], sums["score"] / sums["count"], strict=True)
        return {
            row_name(name, part): value
            for name, tallies, score in rows
            for part, value in _murphy(tallies, float(score)).items()
        }

    return Metric(
        settle,
        finish,
        higher_is_better=None,
        default=False,
        group="uncertainty",
        definition=f"Murphy's decomposition of each class against the rest over {bins} equal-width bins, summed over "
        "classes (0 to 2); reliability - resolution + uncertainty + remainder = brier; the remainder is what varies "
        "inside bins; uncertainty's error by the delta method, the others have none",
    )


def _murphy(tallies: Tensor, score: float) -> dict[str, Estimate]:
    """Return the parts of a Brier score from `[C, bins, 3]`: samples, summed probability, labels of class and bin."""
    samples, total, labels = tallies.unbind(-1)
    count = samples[0].sum()
    share = labels.sum(-1, keepdim=True) / count  # [C, 1] how often each class is the right one
    some = samples.clamp(min=1)
    reliability = float(((total - labels) ** 2 / some).sum() / count)
    resolution = float((samples * (labels / some - share) ** 2).sum() / count)
    uncertainty = float((share * (1 - share)).sum())
    spread = float((share**3).sum() - (share**2).sum() ** 2)
    return {
        "reliability": Estimate(reliability),
        "resolution": Estimate(resolution),
        "uncertainty": Estimate(uncertainty, 2 * (max(spread, 0.0) / float(count)) ** 0.5),
        "remainder": Estimate(score - (reliability - resolution + uncertainty)),
    }


def _brier(log_p: Tensor, y: Tensor) -> Tensor:
    p = log_p.exp()
    return (p * p).sum(-1) - 2 * _of_right(p, y) + 1


def _of_right(rows: Tensor, y: Tensor) -> Tensor:
    """Return what `[R, B, C]` holds for the right class: `[R, B]`."""
    return rows.gather(-1, y.expand(len(rows), -1)[..., None])[..., 0]


def _mean_metric(score: Callable[[Tensor, Tensor], Tensor], convention: str) -> Metric:
    """Return the measure that averages `score`, log-probabilities `[R, B, C]` and labels `[B]` to `[R, B]`."""

    def settle(table: Tensor, batch: Batch) -> TensorTree:
        return sums_and_squares(score(log_probabilities(table), batch.y))

    def finish(sums: TensorTree) -> Mapping[RowName, Estimate]:
        return means_from_sums(sums, row_names(len(sums["sum"])))

    return Metric(settle, finish, higher_is_better=False, group="uncertainty", definition=convention)
