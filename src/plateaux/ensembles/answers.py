"""All answers of an ensemble for logits `[M, N, C]`: probabilities, uncertainty, OOD score, prediction set, abstention.

`Answers` is the last part of a predictor, and of an exported graph. It therefore uses only operators that can be
exported, with any number of samples, and computes in the dtype that it is built with: float64 in Python, float32 in a
graph. A test compares it with `Calibration`, `Conformal.sets`, and `OOD_SCORES`. With a cascade, the answers of a
sample come from the members that were queried for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plateaux.core.errors import RecipeError
from plateaux.ensembles.cascade import Cascade
from plateaux.ensembles.conformal import ROUNDING, Conformal
from plateaux.ensembles.ood_scores import OOD_FORMULAS, entropy, log_mean, mutual_information
from plateaux.ensembles.temperature import Temperatures

OUTPUTS = ("label", "probability", "probabilities", "entropy", "mutual_information", "ood_score")
CALIBRATED_OUTPUTS = ("prediction_set", "abstain")
MEMBER_SCORES = ("mutual_information", "pds", "variance")  # OOD scores that compare members


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What is computed from the logits of all members."""

    ood_score: str = "max_probability"
    temperatures: Temperatures | None = None  # None: not calibrated
    conformal: Conformal | None = None  # None: no prediction sets
    max_error_probability: float | None = None  # the largest one that is accepted; None: no abstention is fitted
    cascade: Cascade | None = None  # None: all members are queried

    def __post_init__(self) -> None:
        if self.ood_score not in OOD_FORMULAS:
            raise RecipeError(f"There is no OOD score called {self.ood_score!r}; allowed: {', '.join(OOD_FORMULAS)}")
        if self.cascade is not None and self.cascade.stages[0] == 1 and self.ood_score in MEMBER_SCORES:
            raise RecipeError(
                f"The OOD score {self.ood_score!r} compares members, but the cascade may query only one. "
                f"Use {', '.join(name for name in OOD_FORMULAS if name not in MEMBER_SCORES)}, or calibrate with "
                "stages from 2 on"
            )

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs, in order."""
        fitted = (self.conformal is not None, self.max_error_probability is not None)
        return OUTPUTS + tuple(name for name, is_fitted in zip(CALIBRATED_OUTPUTS, fitted, strict=True) if is_fitted)


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

    def forward(self, logits: Tensor) -> tuple[Tensor, ...]:
        logits = logits.to(self.dtype)
        log_p = self._log_p(logits)
        probabilities = log_p.exp()
        probability = probabilities.amax(-1)
        label = log_p.argmax(-1)
        answers = [label, probability, probabilities, entropy(logits), mutual_information(logits)]
        answers.append(OOD_FORMULAS[self.settings.ood_score](logits))
        if self.settings.conformal is not None:
            answers.append(self._sets(log_p, label, self.settings.conformal))
        if self.settings.max_error_probability is not None:
            error_probability = -torch.expm1(log_p.amax(-1))
            answers.append(~(error_probability <= self.settings.max_error_probability))
        return tuple(answers)

    def _log_p(self, logits: Tensor) -> Tensor:
        log_p, fitted = logits.log_softmax(-1), self.settings.temperatures
        if fitted is None:
            return log_mean(log_p).log_softmax(-1)
        if fitted.order == "pool then calibrate":
            return (log_mean(log_p) / fitted.values[0]).log_softmax(-1)
        values = torch.tensor(fitted.values, dtype=logits.dtype, device=logits.device)
        return log_mean((log_p / values[:, None, None]).log_softmax(-1)).log_softmax(-1)

    def _sets(self, log_p: Tensor, label: Tensor, conformal: Conformal) -> Tensor:
        """Return masks `[N, C]`, as `Conformal.sets` does for sets that are not randomized."""
        if math.isinf(conformal.threshold):
            return torch.ones_like(log_p, dtype=torch.bool)
        if conformal.kind == "lac":
            sets = -torch.expm1(log_p) <= conformal.threshold
        else:
            # topk of all classes is a stable sort that has an ONNX conversion
            p, order = log_p.exp().topk(log_p.shape[1], dim=1)
            scores = p.cumsum(1)
            if conformal.kind == "raps":
                ranks = torch.arange(1, log_p.shape[1] + 1, device=p.device)
                scores = scores + conformal.penalty * (ranks - conformal.k_reg).clamp_min(0)
            if p.dtype == torch.float64:
                scores = (scores * ROUNDING).round() / ROUNDING
            sets = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, order, scores <= conformal.threshold)
        if conformal.never_empty:
            classes = torch.arange(log_p.shape[1], device=log_p.device)
            sets = sets | (classes == label[:, None])
        return sets


def answer_by_members(answers: Answers, logits: Tensor, queried: Tensor) -> tuple[Tensor, ...]:
    """Return the answers for logits `[M, N, C]`, each sample from its first `queried` members `[N]`."""
    rows = [(queried == count).nonzero()[:, 0] for count in range(1, len(logits) + 1)]
    parts = [answers(logits[:count, some]) for count, some in enumerate(rows, 1) if len(some)]
    order = torch.cat(rows).argsort()
    return tuple(torch.cat(column)[order] for column in zip(*parts, strict=True))


def is_randomized(conformal: Conformal) -> bool:
    """Return whether the sets depend on the ids of the samples."""
    return conformal.randomized and conformal.kind != "lac" and math.isfinite(conformal.threshold)
