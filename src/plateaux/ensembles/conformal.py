"""Sets of classes that hold the right one as often as promised: split conformal prediction.

A score says how strange a class is for a sample. On n held-out samples, the threshold is the k-th smallest score of the
right class, k = ceil((n + 1)(1 - alpha)); the set of a new sample is every class whose score does not exceed it. When
held-out and new samples are exchangeable, a set holds the right class with probability of at least 1 - alpha (and at
most 1 - alpha + 1 / (n + 1) where scores have no ties), whatever the network. Of a class y at rank r (1 = most likely):

| kind | score |
|---|---|
| `lac` | 1 - p_y: the smallest sets on average (Sadinle, Lei, Wasserman 2019) |
| `aps` | the probabilities of all likelier classes, plus u p_y (Romano, Sesia, Candès 2020): hard samples get more |
| `raps` | the same, plus penalty * max(0, r - k_reg) (Angelopoulos and others 2021): no very large sets |

u is uniform on [0, 1) by the sample's id, so that a set does not depend on what else is in the batch; or 1 where sets
are not to depend on chance, which makes them larger than promised.
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
ROWS = 8192  # samples scored at a time: scores are float64, tables of a thousand classes large
GRAIN = 2.0**40  # sums of probabilities are compared to twelve digits: rounding must decide nothing


@dataclass(frozen=True, slots=True)
class Conformal:
    """A fitted threshold, and how the scores it bounds are made."""

    kind: Kind
    alpha: float
    threshold: float  # infinite: every set holds all classes
    samples: int  # it was fitted on
    k_reg: int = 5
    penalty: float = 0.01
    randomized: bool = True
    never_empty: bool = False
    seed: int = 0
    remark: str = ""

    def sets(self, log_p: Tensor, ids: Tensor) -> Tensor:
        """Return which classes are in each sample's set `[N, C]`, from log-probabilities `[N, C]` and ids `[N]`."""
        _check(log_p, ids)
        parts = zip(torch.split(log_p, ROWS), torch.split(ids, ROWS), strict=True)
        found = torch.cat([_scores(part, own, self) <= self.threshold for part, own in parts])
        if self.never_empty:
            found.scatter_(1, log_p.argmax(1, keepdim=True), True)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return this as plain values for JSON, which has no infinity: that is the text `inf`."""
        return {**asdict(self), "threshold": self.threshold if math.isfinite(self.threshold) else "inf"}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Conformal:
        """Return what `to_dict` wrote."""
        made = cls(**{**tree, "threshold": float(tree["threshold"])})
        _check_options(made.alpha, made.kind, made.k_reg, made.penalty)
        return made


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
    """Return the threshold of sets that miss the right class with probability `alpha`, from held-out samples.

    Log-probabilities are `[N, C]`, labels and ids `[N]`. `k_reg` and `penalty` are for `raps`, `randomized` for `aps`
    and `raps`. A set may be empty, of any kind, where every class is too strange: `never_empty` puts the most likely
    class in every set, so that the right class is held at least as often as that class is right.
    """
    _check_options(alpha, kind, k_reg, penalty)
    _check(log_p, ids)
    _check_labels(y, log_p)
    like = Conformal(kind, float(alpha), math.inf, len(y), k_reg, penalty, randomized, never_empty, seed)
    parts = zip(torch.split(log_p, ROWS), torch.split(y.long(), ROWS), torch.split(ids, ROWS), strict=True)
    own = torch.cat([_scores(part, its, like).gather(1, label[:, None])[:, 0] for part, label, its in parts])
    miss = Fraction(str(float(alpha)))  # 0.1 is meant as one tenth
    rank = math.ceil((len(own) + 1) * (1 - miss))
    if rank <= len(own):
        return replace(like, threshold=float(own.sort().values[rank - 1]))
    return replace(like, remark=_too_few(len(own), miss))


def coverage(sets: Tensor, y: Tensor) -> Estimate:
    """The share of samples whose set `[N, C]` holds the right class, with its binomial standard error.

    That error is over these samples for the threshold as it is; another n held-out samples would move the coverage
    itself by about sqrt(alpha (1 - alpha) / n).
    """
    _check_labels(y, sets)
    return proportion(float(sets.gather(1, y.long()[:, None]).sum()), len(y))


def mean_size(sets: Tensor) -> Estimate:
    """The mean number of classes in a set `[N, C]`, with its standard error over samples."""
    if sets.dim() != 2 or not len(sets):
        raise DataError(f"Sets of shape {list(sets.shape)} have no mean size; give [N, C] of at least one sample.")
    sizes = sets.sum(1).double()
    return mean(float(sizes.sum()), float((sizes * sizes).sum()), len(sizes))


def _scores(log_p: Tensor, ids: Tensor, of: Conformal) -> Tensor:
    """Return how strange every class is for every sample `[N, C]`, in float64."""
    log_p = log_p.double()
    _check_sum(log_p)
    if of.kind == "lac":
        return -torch.expm1(log_p)  # 1 - p, to all digits where p is near 1
    p, order = log_p.exp().sort(dim=1, descending=True, stable=True)
    u = _uniform(ids, of.seed)[:, None] if of.randomized else torch.ones(len(p), 1, dtype=torch.float64)
    scores = p.cumsum(1) - p + u.to(p.device) * p
    if of.kind == "raps":
        ranks = torch.arange(1, p.shape[1] + 1, device=p.device)
        scores = scores + of.penalty * (ranks - of.k_reg).clamp_min(0)
    return torch.empty_like(scores).scatter_(1, order, (scores * GRAIN).round() / GRAIN)


def _uniform(ids: Tensor, seed: int) -> Tensor:
    drawn = [derive_seed(seed, "conformal", number) >> 10 for number in ids.tolist()]
    return torch.tensor(drawn, dtype=torch.float64) * 2.0**-53


def _too_few(samples: int, miss: Fraction) -> str:
    return (
        f"{samples} held-out samples are too few to promise {float(100 * (1 - miss)):g} %, which takes at least "
        f"{math.ceil((1 - miss) / miss)}: every set holds all classes."
    )


def _check_options(alpha: float, kind: str, k_reg: int, penalty: float) -> None:
    if kind not in KINDS:
        raise RecipeError(f"There are no conformal sets of the kind {kind!r}; {suggest(kind, KINDS)}")
    if not 0 < alpha < 1:
        raise RecipeError(f"alpha = {alpha} is no chance to miss the right class; give a number between 0 and 1.")
    if k_reg < 0 or not 0 <= penalty < math.inf:
        raise RecipeError(f"k_reg = {k_reg} and penalty = {penalty}; both must be at least 0.")


def _check(log_p: Tensor, ids: Tensor) -> None:
    if log_p.dim() != 2 or not log_p.numel() or ids.shape != log_p.shape[:1]:
        raise DataError(
            f"Log-probabilities of shape {list(log_p.shape)} with ids of shape {list(ids.shape)}; [N, C] and [N] of at "
            "least one sample are needed."
        )


def _check_sum(log_p: Tensor) -> None:
    off = float(log_p.logsumexp(1).abs().max())
    if not off < 0.01:
        raise DataError(
            f"The probabilities of a sample add up to {'no number' if math.isnan(off) else 'something other than 1'}; "
            "give log-probabilities, as of log_softmax, not logits."
        )


def _check_labels(y: Tensor, table: Tensor) -> None:
    if table.dim() != 2 or not len(y) or y.shape != table.shape[:1] or y.is_floating_point():
        raise DataError(f"Labels of shape {list(y.shape)} ({y.dtype}) do not fit a table {list(table.shape)}.")
    if int(y.min()) < 0 or int(y.max()) >= table.shape[1]:
        raise DataError(f"Labels go from {int(y.min())} to {int(y.max())}; {table.shape[1]} classes need 0 up.")
