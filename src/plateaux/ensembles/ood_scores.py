"""How far out of distribution a sample looks, by name: scores of a table of logits, larger = further out.

With p_m(c) the probability member m of M gives class c, P(c) their mean and z_m(c) the logits:

| name | score |
|---|---|
| `max_probability` | - max_c P(c) |
| `entropy` | - sum_c P(c) log P(c) |
| `mutual_information` | mean_m sum_c p_m(c) log(p_m(c) / P(c)): entropy of P less the members' mean entropy |
| `pds` | sum_c max_m p_m(c), from 1 to min(M, C) |
| `variance` | sum_c of the variance of p_m(c) over members, over M - 1 |
| `energy` | - mean_m log sum_c exp z_m(c) |
| `max_logit` | - max_c mean_m z_m(c) |

Members that agree, or one member alone, have a mutual information and a variance of exactly 0 and a PDS of exactly 1:
such a score tells no samples apart, and its AUROC is one half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.stats.ranking import aupr, auroc, fpr_at_tpr
from plateaux.core.types import Estimate
from plateaux.ensembles.log_probs import log_probs

DEFINITION = (
    "out of distribution is the positive class and has the larger score; ties count half in AUROC; AUPR is average "
    "precision, out (positive: outside) and in (positive: inside); FPR95 is the share of inside samples caught where "
    "at least 95 % of outside samples are"
)


def max_probability(table: Tensor) -> Tensor:
    """Return the mean probability of the most likely class, negated `[B]`."""
    return -_log_mean(_log_p(table)).exp().amax(-1)


def entropy(table: Tensor) -> Tensor:
    """Return the entropy of the mean probability, in nats `[B]`."""
    parts: Tensor = torch.special.entr(_log_mean(_log_p(table)).exp())
    return parts.sum(-1)


def mutual_information(table: Tensor) -> Tensor:
    """Return what a sample's class and the choice of a member say of each other, in nats `[B]`."""
    log_p = _log_p(table)
    p = log_p.exp()
    # A class that a member gives no chance adds nothing, though its logarithm is infinite.
    apart = torch.where(p == 0, 0.0, p * (log_p - _log_mean(log_p)))
    return apart.sum(-1).mean(0).clamp_min(0)


def pds(table: Tensor) -> Tensor:
    """Return the Predictive Diversity Score, the sum over classes of the largest probability any member gives `[B]`."""
    p = _log_p(table).exp()
    # 1 + what others add to the first member's: rounding cannot make members that agree look diverse.
    return 1 + (p - p[0]).amax(0).sum(-1)


def variance(table: Tensor) -> Tensor:
    """Return the variance of the members' probabilities, summed over classes `[B]`."""
    p = _log_p(table).exp()
    apart = p - p[0]  # as in pds
    return (apart - apart.mean(0)).square().sum((0, 2)) / max(len(p) - 1, 1)


def energy(table: Tensor) -> Tensor:
    """Return the mean of the members' log-sum-exp of logits, negated `[B]`."""
    return -_wide(table).logsumexp(-1).mean(0)


def max_logit(table: Tensor) -> Tensor:
    """Return the largest mean logit, negated `[B]`."""
    return -_wide(table).mean(0).amax(-1)


OOD_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "max_probability": max_probability,
    "entropy": entropy,
    "mutual_information": mutual_information,
    "pds": pds,
    "variance": variance,
    "energy": energy,
    "max_logit": max_logit,
}


def compare(inside: Mapping[str, NDArray[Any]], outside: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, Estimate]]:
    """Return how well each score tells outside samples from inside ones: score to `auroc`, `aupr out` and so on."""
    if set(inside) != set(outside):
        raise ValueError(f"The inside scores are {sorted(inside)}, the outside ones {sorted(outside)}; give the same.")
    return {name: _detection_metrics(name, inside[name], outside[name]) for name in inside}


def _detection_metrics(name: str, inside: NDArray[Any], outside: NDArray[Any]) -> dict[str, Estimate]:
    for where, scores in (("inside", inside), ("outside", outside)):
        if broken := int(np.isnan(scores).sum()):
            raise DataError(
                f"{name} is no number for {broken} of {len(scores)} {where} samples: their logits hold nan or "
                "infinity. Measure members that did not diverge, or in float32."
            )
    return {
        "auroc": auroc(inside, outside),
        "aupr out": aupr(inside, outside, "outside"),
        "aupr in": aupr(inside, outside, "inside"),
        "fpr95": fpr_at_tpr(inside, outside, 0.95),
    }


def _wide(table: Tensor) -> Tensor:
    if table.dim() != 3 or not table.shape[0] or not table.shape[2]:
        raise ValueError(f"The table has shape {list(table.shape)}; logits [members, samples, classes] are needed.")
    # In float32 every probability above 1 - 6e-8 is a tie, and confident networks have many of those.
    return table.double()


def _log_p(table: Tensor) -> Tensor:
    return log_probs(_wide(table))


def _log_mean(log_p: Tensor) -> Tensor:
    """Return the log of the mean probability `[B, C]`; exactly the members' own where they agree."""
    top = log_p.amax(0).clamp_min(torch.finfo(log_p.dtype).min)
    return top + (log_p - top).exp().mean(0).log()
