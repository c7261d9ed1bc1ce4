"""Split conformal prediction: sets of classes that contain the true class with a guaranteed probability.

A nonconformity score is computed for each class of a sample. On n held-out samples, the threshold is the k-th smallest
score of the true class, k = ceil((n + 1)(1 - alpha)); the set of a new sample is every class whose score does not
exceed it. If held-out and new samples are exchangeable, a set contains the true class with probability of at least
1 - alpha (and at most 1 - alpha + 1 / (n + 1) if scores have no ties), for any network. For a class y at rank r
(1 = most likely):

| kind | score |
|---|---|
| `lac` | 1 - p_y: the smallest sets on average (Sadinle, Lei, Wasserman 2019) |
| `aps` | the probabilities of all likelier classes, plus u p_y (Romano, Sesia, Candès 2020): adapts to hard samples |
| `raps` | the same, plus penalty * max(0, r - k_reg) (Angelopoulos et al. 2021): avoids very large sets |

u is uniform on [0, 1), seeded by the sample id, so that a set does not depend on the rest of the batch; or 1 for
deterministic sets, which are larger than necessary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError, suggest
from plateaux.core.stats.estimates import mean, proportion
from plateaux.core.types import Estimate, derive_seed

Kind = Literal["lac", "aps", "raps"]
KINDS: tuple[Kind, ...] = ("lac", "aps", "raps")
MAX_BATCH = 8192  # samples scored at a time: scores are float64, and large for a thousand classes
ROUNDING = 2.0**40  # scores are rounded to twelve digits, so that floating-point error does not affect comparisons


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformalOptions:
    """Which sets a calibration fits; by default, every set contains the predicted label."""

    kind: Kind = "lac"
    randomized: bool = True
    allow_empty: bool = False


@dataclass(frozen=True, slots=True)
class Conformal:
    """A fitted threshold, and the options of its scores."""

    kind: Kind
    alpha: float
    threshold: float  # infinite: every set contains all classes
    samples: int  # number of held-out samples it was fitted on
    k_reg: int = 5
    penalty: float = 0.01
    randomized: bool = True
    never_empty: bool = False
    seed: int = 0
    remark: str = ""

    def sets(self, log_p: Tensor, ids: Tensor) -> Tensor:
        """Return the prediction sets as masks `[N, C]`, from log-probabilities `[N, C]` and ids `[N]`."""
        _check(log_p, ids)
        batches = zip(torch.split(log_p, MAX_BATCH), torch.split(ids, MAX_BATCH), strict=True)
        sets = torch.cat([_scores(batch, batch_ids, self) <= self.threshold for batch, batch_ids in batches])
        if self.never_empty:
            sets.scatter_(1, log_p.argmax(1, keepdim=True), True)
        return sets

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values; an infinite threshold becomes the text `inf`."""
        return {**asdict(self), "threshold": self.threshold if math.isfinite(self.threshold) else "inf"}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Conformal:
        """Rebuild this from the result of `to_dict`."""
        conformal = cls(**{**tree, "threshold": float(tree["threshold"])})
        _check_options(conformal.alpha, conformal.kind, conformal.k_reg, conformal.penalty)
        return conformal


def fit(
    log_p: Tensor,
    y: Tensor,
    ids: Tensor,
    alpha: float = 0.1,
    kind: Kind = "lac",
    *,
    k_reg: int = 5,
    penalty: float = 0.01,
    randomized: bool = True,
    never_empty: bool = False,
    seed: int = 0,
) -> Conformal:
    """Fit the threshold of sets that miss the true class with probability `alpha`, on held-out samples.

    Log-probabilities are `[N, C]`, labels and ids `[N]`. `k_reg` and `penalty` are for `raps`, `randomized` for `aps`
    and `raps`. A set is empty if the scores of all classes exceed the threshold; `never_empty` adds the most likely
    class to every set, so that the coverage is at least the accuracy.
    """
    _check_options(alpha, kind, k_reg, penalty)
    _check(log_p, ids)
    _check_labels(y, log_p)
    unfitted = Conformal(kind, float(alpha), math.inf, len(y), k_reg, penalty, randomized, never_empty, seed)
    batches = zip(*(torch.split(tensor, MAX_BATCH) for tensor in (log_p, y.long(), ids)), strict=True)
    label_scores = torch.cat(
        [_scores(batch, batch_ids, unfitted).gather(1, labels[:, None])[:, 0] for batch, labels, batch_ids in batches]
    )
    exact_alpha = Fraction(str(float(alpha)))  # 0.1 means exactly one tenth
    rank = math.ceil((len(label_scores) + 1) * (1 - exact_alpha))
    if rank <= len(label_scores):
        return replace(unfitted, threshold=float(label_scores.sort().values[rank - 1]))
    return replace(unfitted, remark=_too_few(len(label_scores), exact_alpha))


def coverage(sets: Tensor, y: Tensor) -> Estimate:
    """Return the fraction of samples whose set `[N, C]` contains the true class, with its binomial standard error.

    The error is over these samples for a fixed threshold; with n other held-out samples, the coverage itself would vary
    by about sqrt(alpha (1 - alpha) / n).
    """
    _check_labels(y, sets)
    return proportion(float(sets.gather(1, y.long()[:, None]).sum()), len(y))


def mean_size(sets: Tensor) -> Estimate:
    """Return the mean number of classes in a set `[N, C]`, with its standard error over samples."""
    if sets.dim() != 2 or not len(sets):
        raise DataError(f"Sets have shape {list(sets.shape)}. The mean size needs [N, C] with at least one sample.")
    sizes = sets.sum(1).double()
    return mean(float(sizes.sum()), float((sizes * sizes).sum()), len(sizes))


def _scores(log_p: Tensor, ids: Tensor, options: Conformal) -> Tensor:
    """Return the nonconformity scores of all classes `[N, C]`, in float64."""
    log_p = log_p.double()
    _check_sum(log_p)
    if options.kind == "lac":
        return -torch.expm1(log_p)  # 1 - p, accurate for p near 1
    p, order = log_p.exp().sort(dim=1, descending=True, stable=True)
    u = _uniform(ids, options.seed)[:, None] if options.randomized else torch.ones(len(p), 1, dtype=torch.float64)
    scores = p.cumsum(1) - p + u.to(p.device) * p
    if options.kind == "raps":
        ranks = torch.arange(1, p.shape[1] + 1, device=p.device)
        scores = scores + options.penalty * (ranks - options.k_reg).clamp_min(0)
    return torch.empty_like(scores).scatter_(1, order, (scores * ROUNDING).round() / ROUNDING)


def _uniform(ids: Tensor, seed: int) -> Tensor:
    bits = [derive_seed(seed, "conformal", sample_id) >> 10 for sample_id in ids.tolist()]
    return torch.tensor(bits, dtype=torch.float64) * 2.0**-53


def _too_few(samples: int, alpha: Fraction) -> str:
    return (
        f"{samples} held-out samples are too few for a coverage of {float(100 * (1 - alpha)):g} %, which needs at "
        f"least {math.ceil((1 - alpha) / alpha)}. Every set contains all classes."
    )


def _check_options(alpha: float, kind: str, k_reg: int, penalty: float) -> None:
    if kind not in KINDS:
        raise RecipeError(f"Unknown kind of conformal set {kind!r}; {suggest(kind, KINDS)}")
    if not 0 < alpha < 1:
        raise RecipeError(f"alpha = {alpha} is not a probability of missing the true class. Use a number in (0, 1).")
    if k_reg < 0 or not 0 <= penalty < math.inf:
        raise RecipeError(f"k_reg = {k_reg} and penalty = {penalty} were given. Both must be finite and at least 0.")


def _check(log_p: Tensor, ids: Tensor) -> None:
    if log_p.dim() != 2 or not log_p.numel() or ids.shape != log_p.shape[:1]:
        raise DataError(
            f"Log-probabilities have shape {list(log_p.shape)} and ids {list(ids.shape)}. [N, C] and [N] with at least "
            "one sample are needed."
        )


def _check_sum(log_p: Tensor) -> None:
    deviation = float(log_p.logsumexp(1).abs().max())
    if not deviation < 0.01:
        raise DataError(
            f"The probabilities of a sample {'are NaN' if math.isnan(deviation) else 'do not sum to 1'}. "
            "Pass log-probabilities (log_softmax of the logits), not logits."
        )


def _check_labels(y: Tensor, rows: Tensor) -> None:
    if rows.dim() != 2 or not len(y) or y.shape != rows.shape[:1] or y.is_floating_point():
        raise DataError(
            f"Labels have shape {list(y.shape)} ({y.dtype}) for inputs of shape {list(rows.shape)}. "
            "Integer labels [N] for inputs [N, C] are needed."
        )
    if int(y.min()) < 0 or int(y.max()) >= rows.shape[1]:
        raise DataError(f"Labels range from {int(y.min())} to {int(y.max())}; allowed are 0 to {rows.shape[1] - 1}.")
