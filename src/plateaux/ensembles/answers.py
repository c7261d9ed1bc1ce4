"""All answers of an ensemble for logits `[M, N, C]`: probabilities, uncertainty, OOD score, prediction set, abstention.

All answers for a sample come from one distribution, the calibrated one. With temperatures, the members have calibrated
logits, too: those divided by the temperature (their own, or the common one). `max_probability` and `entropy` are those
of the calibrated probabilities P, and the other scores those of the calibrated members p_m. With the order "calibrate
then pool", P is their mean. With "pool then calibrate", it is not, so the mutual information comes from the joint
distribution of member and class p_m(c) P(c) / mean_k p_k(c) / M: its classes have the probabilities P, and a class has
the members that predict it. The mutual information is then the entropy of P minus the mean entropy of a member, both in
this distribution. It is at least 0, at most the entropy, and 0 for members that agree and for one member.

`Answers` is the last part of a predictor, and of an exported graph. It therefore uses only operators that can be
exported, with any number of samples, and computes in the dtype that it is built with: float64 in Python, float32 in a
graph. A test compares it with `Calibration`, `Conformal.sets`, and `OOD_SCORES`. With a cascade, the answers of a
sample come from the members that were queried for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.ensembles.cascade import Cascade
from plateaux.ensembles.conformal import ROUNDING, Conformal
from plateaux.ensembles.ood_scores import DEFAULT_OOD_SCORE, OOD_FORMULAS, log_mean
from plateaux.ensembles.temperature import Temperatures

OUTPUTS = ("label", "probability", "probabilities", "entropy", "mutual_information", "ood_score")
MEMBER_SCORES = ("mutual_information", "pds", "variance")  # OOD scores that compare members
OF_PROBABILITIES = ("max_probability", "entropy")  # OOD scores of the ensemble's probabilities
SLACK = 1e-6  # of a threshold in float32, whose sums of probabilities exceed 1 by a few 1e-7


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What is computed from the logits of all members."""

    ood_score: str = DEFAULT_OOD_SCORE
    temperatures: Temperatures | None = None  # None: not calibrated
    conformal: Conformal | None = None  # None: no prediction sets
    max_error_probability: float | None = None  # the largest one that is accepted; None: no abstention is fitted
    cascade: Cascade | None = None  # None: all members are queried
    max_ood_score: float | None = None  # the largest one without an alarm; None: no alarm is fitted
    raw: bool = False  # also the outputs without a calibration

    def __post_init__(self) -> None:
        if self.ood_score not in OOD_FORMULAS:
            raise RecipeError(f"There is no OOD score called {self.ood_score!r}; allowed: {', '.join(OOD_FORMULAS)}")
        if self.ood_score not in allowed_scores(self.cascade):
            raise RecipeError(
                f"The OOD score {self.ood_score!r} compares members, but the cascade may query only one. "
                f"Use {', '.join(allowed_scores(self.cascade))}, or calibrate with stages from 2 on"
            )

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs, in order."""
        fitted = {
            "prediction_set": self.conformal is not None,
            "abstain": self.max_error_probability is not None,
            "is_ood": self.max_ood_score is not None,
            **{f"raw_{name}": self.raw for name in OUTPUTS},
        }
        return OUTPUTS + tuple(name for name, is_fitted in fitted.items() if is_fitted)


class Answers(nn.Module):
    """Compute all answers from logits `[M, N, C]`, as a tuple of tensors in the order of `settings.outputs`."""

    def __init__(self, settings: AnswerSettings, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        if settings.conformal is not None and is_randomized(settings.conformal):
            raise RecipeError(
                f"The {settings.conformal.kind} sets of this calibration are randomized by sample id, which new inputs "
                "do not have. Calibrate again with --conformal lac, or with --no-randomized"
            )
        self.settings, self.dtype = settings, dtype
        self.slack = SLACK if dtype == torch.float32 else 0.0

    def forward(self, logits: Tensor) -> tuple[Tensor, ...]:
        settings, logits = self.settings, logits.to(self.dtype)
        log_p, answers = self._numbers(logits, settings.temperatures)
        label, ood_score = answers[0], answers[-1]
        if settings.conformal is not None:
            answers.append(self._sets(log_p, label, settings.conformal))
        if settings.max_error_probability is not None:
            error_probability = -torch.expm1(log_p.amax(-1))
            answers.append(~(error_probability <= settings.max_error_probability))
        if settings.max_ood_score is not None:
            answers.append(~(ood_score <= settings.max_ood_score + self.slack))
        if settings.raw:
            answers += self._numbers(logits, None)[1]
        return tuple(answers)

    def _numbers(self, logits: Tensor, temperatures: Temperatures | None) -> tuple[Tensor, list[Tensor]]:
        """Return the log-probabilities of the ensemble, and the values of `OUTPUTS`."""
        log_p, members = calibrate(logits, temperatures)
        names = ("entropy", "mutual_information", self.settings.ood_score)
        p = log_p.exp()
        return log_p, [log_p.argmax(-1), p.amax(-1), p, *(ood_score(name, log_p, members) for name in names)]

    def _sets(self, log_p: Tensor, label: Tensor, conformal: Conformal) -> Tensor:
        """Return masks `[N, C]`, as `Conformal.sets` does for sets that are not randomized."""
        if math.isinf(conformal.threshold):
            return torch.ones_like(log_p, dtype=torch.bool)
        threshold = conformal.threshold + self.slack
        if conformal.kind == "lac":
            sets = -torch.expm1(log_p) <= threshold
        else:
            # topk of all classes is a stable sort that has an ONNX conversion
            p, order = log_p.exp().topk(log_p.shape[1], dim=1)
            scores = p.cumsum(1)
            if conformal.kind == "raps":
                ranks = torch.arange(1, log_p.shape[1] + 1, device=p.device)
                scores = scores + conformal.penalty * (ranks - conformal.k_reg).clamp_min(0)
            if p.dtype == torch.float64:
                scores = (scores * ROUNDING).round() / ROUNDING
            sets = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, order, scores <= threshold)
        if conformal.never_empty:
            classes = torch.arange(log_p.shape[1], device=log_p.device)
            sets = sets | (classes == label[:, None])
        return sets


def calibrate(logits: Tensor, temperatures: Temperatures | None) -> tuple[Tensor, Tensor]:
    """Return the calibrated log-probabilities of the ensemble `[N, C]` and the calibrated logits of the members."""
    if temperatures is None:
        return log_mean(logits.log_softmax(-1)).log_softmax(-1), logits
    values = torch.tensor(temperatures.values, dtype=logits.dtype, device=logits.device)
    members = logits / values[:, None, None]
    if temperatures.order == "pool then calibrate":
        return (log_mean(logits.log_softmax(-1)) / temperatures.values[0]).log_softmax(-1), members
    return log_mean(members.log_softmax(-1)).log_softmax(-1), members


def ood_score(name: str, log_p: Tensor, members: Tensor) -> Tensor:
    """Return an OOD score `[N]` from the log-probabilities of the ensemble `[N, C]` and the members' logits."""
    if name == "mutual_information":
        return _mutual_information(log_p, members.log_softmax(-1))
    return OOD_FORMULAS[name](log_p[None] if name in OF_PROBABILITIES else members)


def _mutual_information(log_p: Tensor, members: Tensor) -> Tensor:
    """Return the mutual information of class and member, from log-probabilities of the ensemble and the members."""
    difference = (members - log_mean(members)).masked_fill(members == -math.inf, -math.inf)
    ratio, p = difference.exp(), log_p.exp()
    by_class = (p * torch.where(ratio == 0, 0.0, ratio * difference)).sum(-1)
    excess = (p * torch.expm1(difference)).sum(-1)  # of M times the probability of a member over 1; exact for one
    log_share = torch.log1p(excess.clamp_min(torch.finfo(excess.dtype).eps - 1))  # a share of 0 contributes 0
    return (by_class - (1 + excess) * log_share).mean(0).clamp_min(0)


def allowed_scores(cascade: Cascade | None) -> tuple[str, ...]:
    """Return the OOD scores that exist for every sample; one member has none that compares members."""
    may_query_one = cascade is not None and cascade.stages[0] == 1
    return tuple(name for name in OOD_FORMULAS if not (may_query_one and name in MEMBER_SCORES))


def all_ood_scores(logits: Tensor, temperatures: Temperatures, cascade: Cascade | None) -> dict[str, Tensor]:
    """Return every OOD score `[N]` of the calibrated outputs for logits `[M, N, C]`, as `Answers` does, in float64."""
    names = allowed_scores(cascade)

    def compute(logits: Tensor) -> tuple[Tensor, ...]:
        log_p, members = calibrate(logits.double(), temperatures)
        return tuple(ood_score(name, log_p, members) for name in names)

    found = compute(logits) if cascade is None else answer_by_members(compute, logits, cascade.members_queried(logits))
    return dict(zip(names, found, strict=True))


def answer_by_members(
    answers: Callable[[Tensor], tuple[Tensor, ...]], logits: Tensor, queried: Tensor
) -> tuple[Tensor, ...]:
    """Return the answers for logits `[M, N, C]`, each sample from its first `queried` members `[N]`."""
    rows = [(queried == count).nonzero()[:, 0] for count in range(1, len(logits) + 1)]
    parts = [answers(logits[:count, some]) for count, some in enumerate(rows, 1) if len(some)]
    order = torch.cat(rows).argsort()
    return tuple(torch.cat(column)[order] for column in zip(*parts, strict=True))


def is_randomized(conformal: Conformal) -> bool:
    """Return whether the sets depend on the ids of the samples."""
    return conformal.randomized and conformal.kind != "lac" and math.isfinite(conformal.threshold)
