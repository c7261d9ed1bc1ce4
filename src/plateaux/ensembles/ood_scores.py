"""Out-of-distribution (OOD) scores computed from logits; larger scores mean more likely out of distribution.

p_m(c) is the probability of class c by member m of M, P(c) the mean over members, and z_m(c) the logits:

| name | score |
|---|---|
| `max_probability` | - max_c P(c) |
| `entropy` | - sum_c P(c) log P(c) |
| `mutual_information` | mean_m sum_c p_m(c) log(p_m(c) / P(c)): entropy of P minus the members' mean entropy |
| `pds` | sum_c max_m p_m(c), from 1 to min(M, C) |
| `variance` | sum_c of the variance of p_m(c) over members, with M - 1 |
| `energy` | - mean_m log sum_c exp z_m(c) |
| `max_logit` | - max_c mean_m z_m(c) |

Members that agree, or a single member, have a mutual information and variance of exactly 0 and a PDS of exactly 1:
such a score does not distinguish samples, and its AUROC is 0.5.

The functions compute in the dtype of the logits. `OOD_SCORES` compute in float64: in float32 all probabilities above
1 - 6e-8 are equal, and confident networks produce many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.errors import DataError
from plateaux.core.stats.ranking import aupr, auroc, fpr_at_tpr
from plateaux.core.types import Estimate
from plateaux.ensembles.log_probs import log_probs

DEFAULT_OOD_SCORE = "max_probability"  # selected by benchmarks/ood_scores.py

DEFINITION = (
    "out of distribution is the positive class and has the larger score; ties count half in AUROC; AUPR is average "
    "precision, out (positive: outside) and in (positive: inside); FPR95 is the share of inside samples caught where "
    "at least 95 % of outside samples are"
)


def max_probability(logits: Tensor) -> Tensor:
    """Return the negated mean probability of the most likely class `[B]`."""
    return -log_mean(log_probs(logits)).exp().amax(-1)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the mean probability, in nats `[B]`."""
    p = log_mean(log_probs(logits)).exp()
    # torch.special.entr does the same, but torch 2.8 and 2.10 cannot export it to ONNX.
    parts = (-p * p.log()).masked_fill(p == 0, 0.0)
    return parts.sum(-1)


def mutual_information(logits: Tensor) -> Tensor:
    """Return the mutual information between the class and the member, in nats `[B]`."""
    log_p = log_probs(logits)
    p = log_p.exp()
    # A class with probability 0 contributes 0, although its logarithm is infinite.
    terms = torch.where(p == 0, 0.0, p * (log_p - log_mean(log_p)))
    return terms.sum(-1).mean(0).clamp_min(0)


def pds(logits: Tensor) -> Tensor:
    """Return the Predictive Diversity Score: the sum over classes of the largest probability of any member `[B]`."""
    p = log_probs(logits).exp()
    # Relative to the first member, so that rounding does not make members that agree look diverse.
    return 1 + (p - p[0]).amax(0).sum(-1)


def variance(logits: Tensor) -> Tensor:
    """Return the variance of the members' probabilities, summed over classes `[B]`."""
    p = log_probs(logits).exp()
    difference = p - p[0]  # as in pds
    return (difference - difference.mean(0)).square().sum((0, 2)) / max(len(p) - 1, 1)


def energy(logits: Tensor) -> Tensor:
    """Return the energy score: the negated mean over members of the log-sum-exp of the logits `[B]`."""
    return -logits.logsumexp(-1).mean(0)


def max_logit(logits: Tensor) -> Tensor:
    """Return the negated largest mean logit `[B]`."""
    return -logits.mean(0).amax(-1)


OOD_FORMULAS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "max_probability": max_probability,
    "entropy": entropy,
    "mutual_information": mutual_information,
    "pds": pds,
    "variance": variance,
    "energy": energy,
    "max_logit": max_logit,
}


def compare(inside: Mapping[str, NDArray[Any]], outside: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, Estimate]]:
    """Return the OOD detection metrics of each score: `auroc`, `aupr out`, `aupr in`, and `fpr95`."""
    if set(inside) != set(outside):
        raise ValueError(
            f"In-distribution scores are {sorted(inside)}, out-of-distribution scores {sorted(outside)}. "
            "Pass the same scores for both."
        )
    return {name: _detection_metrics(name, inside[name], outside[name]) for name in inside}


def _detection_metrics(name: str, inside: NDArray[Any], outside: NDArray[Any]) -> dict[str, Estimate]:
    for kind, scores in (("in-distribution", inside), ("out-of-distribution", outside)):
        if num_nan := int(np.isnan(scores).sum()):
            raise DataError(
                f"The score {name} is NaN for {num_nan} of {len(scores)} {kind} samples because their logits are NaN "
                "or infinite. Evaluate members that did not diverge, or use float32."
            )
    return {
        "auroc": auroc(inside, outside),
        "aupr out": aupr(inside, outside, "outside"),
        "aupr in": aupr(inside, outside, "inside"),
        "fpr95": fpr_at_tpr(inside, outside, 0.95),
    }


def log_mean(log_p: Tensor) -> Tensor:
    """Return the log of the mean probability `[B, C]` of log-probabilities `[M, B, C]`; exact where all are equal."""
    largest = log_p.amax(0).clamp_min(torch.finfo(log_p.dtype).min)
    return largest + (log_p - largest).exp().mean(0).log()


def _in_float64(formula: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @wraps(formula)
    def score(logits: Tensor) -> Tensor:
        if logits.dim() != 3 or not logits.shape[0] or not logits.shape[2]:
            raise ValueError(f"Logits have shape {list(logits.shape)}. [members, samples, classes] is needed.")
        return formula(logits.double())

    return score


OOD_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    name: _in_float64(formula) for name, formula in OOD_FORMULAS.items()
}
