"""Cascades: query the members of an ensemble one after another, and stop early where they agree and are confident.

The order of the members and the stages k_1 < k_2 < ... < M are fixed. A sample stops at the first stage k where all k
queried members predict the same class and the largest mean probability is at least lambda. Its answer is the mean
probability of those k members, so a cascade is a different predictor than the ensemble, and is calibrated on its own.

lambda is fitted on held-out samples. `harm` is the fraction of samples that the full ensemble predicts correctly and
the cascade does not; it bounds the loss of accuracy and is at most `differs`, the fraction with another prediction,
which needs no labels. A grid that is fixed in advance is tested in sequence, from lambda = 1 down, until
P(Bin(n, max_harm) <= count) > 1 - confidence. Fixed-sequence testing needs no correction for the number of tests
(Angelopoulos et al. 2021, Learn then Test), and does not need the loss to be monotone in lambda. With this rule it is:
a sample that stops is answered with the class of the first member, and a lower lambda only lets more samples stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.ensembles.ood_scores import log_mean
from plateaux.ensembles.selective import binomial_lower_tail, min_samples

Loss = Literal["harm", "differs"]
LOSSES: tuple[Loss, ...] = ("harm", "differs")
# Dense near 1, where trained networks have most of their confidences; the last one requires only agreement.
GRID = tuple(1 - (step / 49) ** 2 for step in range(50))
FIRST_STAGE = 2  # one member has no mutual information, and most OOD scores compare members
DISAGREE = -1.0  # below every threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeOptions:
    """How a cascade is fitted.

    Args:
        max_harm: The largest fraction of samples that the full ensemble gets right and the cascade gets wrong; with
            kind "differs", that have another prediction.
        confidence: The probability of the guarantee, over the held-out samples.
        kind: "harm" needs labels, "differs" does not.
        stages: Numbers of members after which a sample may stop. None: 2, 3, ..., M - 1.
    """

    max_harm: float = 0.005
    confidence: float = 0.9
    kind: Loss = "harm"
    stages: Sequence[int] | None = None


DEFAULT_CASCADE = CascadeOptions()


@dataclass(frozen=True, slots=True)
class Cascade:
    """A fitted cascade, and its result on the held-out samples."""

    members: int
    stages: tuple[int, ...]  # increasing, below the number of members
    threshold: float | None  # lambda; None: every sample queries all members
    kind: Loss
    max_harm: float
    confidence: float
    samples: int  # number of held-out samples it was fitted on
    count: int  # how many of them were harmed, or differ
    queried: float  # mean number of members that they needed
    remark: str = ""

    def members_queried(self, logits: Tensor) -> Tensor:
        """Return the number of members that each sample needs `[N]`, from the logits of all members `[M, N, C]`."""
        _check_logits(logits, self.members)
        if self.threshold is None:
            return torch.full((logits.shape[1],), self.members, device=logits.device)
        confidences = torch.stack([stage_confidence(logits[:stage]) for stage in self.stages])
        return _counts(self.stages, self.members, logits.device)[_first_stop(confidences, self.threshold)]

    def log_p(self, logits: Tensor) -> Tensor:
        """Return the log of the mean probability of the queried members `[N, C]`, from the logits of all members."""
        queried = self.members_queried(logits)
        log_p = logits.new_empty(logits.shape[1:], dtype=torch.float64)
        for count in (*self.stages, self.members):
            rows = queried == count
            log_p[rows] = log_mean(logits[:count, rows].double().log_softmax(-1))
        return log_p

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        return {**asdict(self), "stages": list(self.stages)}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Cascade:
        """Rebuild this from the result of `to_dict`."""
        cascade = cls(**{**tree, "stages": tuple(tree["stages"])})
        _check_options(cascade.members, cascade.stages, cascade.max_harm, cascade.confidence, cascade.kind)
        if cascade.threshold is not None and not 0 <= cascade.threshold <= 1:
            raise RecipeError(f"The threshold of a cascade is {cascade.threshold}. Allowed: 0 to 1, or none.")
        return cascade


def fit(logits: Tensor, y: Tensor | None, options: CascadeOptions = DEFAULT_CASCADE) -> Cascade:
    """Fit the threshold of the rule on held-out logits `[M, N, C]` of all members, and labels `[N]`.

    The result queries all members if there are too few samples for the guarantee, and its remark says so. Labels are
    not used, and may be None, if the kind is "differs".
    """
    members, samples = _check_logits(logits), logits.shape[1]
    stages = default_stages(members) if options.stages is None else tuple(options.stages)
    _check_options(members, stages, options.max_harm, options.confidence, options.kind)
    if options.kind == "harm" and (y is None or y.shape != (samples,)):
        found = "not given" if y is None else f"of shape {list(y.shape)}"
        raise DataError(
            f"Labels are {found}. Harm needs one label for each of {samples} samples; 'differs' needs none."
        )
    confidences = torch.stack([stage_confidence(logits[:stage]) for stage in stages])  # [S, N]
    labels = torch.stack(
        [log_mean(logits[:count].double().log_softmax(-1)).argmax(-1) for count in (*stages, members)]
    )  # [S + 1, N]
    counts = _counts(stages, members, logits.device)
    is_counted = labels[-1] == y if options.kind == "harm" else torch.ones_like(labels[-1], dtype=torch.bool)
    passed: tuple[float | None, int, float] = None, 0, float(members)
    for threshold in GRID:
        stop = _first_stop(confidences, threshold)
        label = labels.gather(0, stop[None])[0]
        count = int(((label != labels[-1]) & is_counted).sum())
        if binomial_lower_tail(count, samples, options.max_harm) > 1 - options.confidence:
            break
        passed = threshold, count, float(counts[stop].double().mean())
    remark = "" if passed[0] is not None else _unattainable(samples, members, options)
    guarantee = options.kind, float(options.max_harm), float(options.confidence)
    return Cascade(members, stages, passed[0], *guarantee, samples, *passed[1:], remark)


def stage_confidence(logits: Tensor) -> Tensor:
    """Return the largest mean probability `[N]` of members with logits `[k, N, C]`; -1 where they disagree."""
    logits = logits.double()
    labels = logits.argmax(-1)
    confidence = log_mean(logits.log_softmax(-1)).exp().amax(-1)
    return torch.where((labels == labels[0]).all(0), confidence, DISAGREE)


def default_stages(members: int) -> tuple[int, ...]:
    """Return all numbers of members from 2 on, except all of them.

    >>> default_stages(5)
    (2, 3, 4)
    """
    return tuple(range(FIRST_STAGE, members))


def needed_samples(options: CascadeOptions) -> int:
    """Return how many held-out samples the guarantee needs if none of them is harmed.

    >>> needed_samples(CascadeOptions(max_harm=0.005, confidence=0.95))
    598
    """
    needed = min_samples(options.max_harm, 1 - options.confidence)
    assert needed is not None  # max_harm is positive
    return needed


def _first_stop(confidences: Tensor, threshold: float) -> Tensor:
    """Return the first stage `[N]` at which a sample stops, from confidences `[S, N]`; S: at none."""
    stops = torch.cat([confidences >= threshold, torch.ones_like(confidences[:1], dtype=torch.bool)])
    return stops.int().argmax(0)  # the first of equal values


def _counts(stages: Sequence[int], members: int, device: torch.device) -> Tensor:
    return torch.tensor([*stages, members], device=device)


def _unattainable(samples: int, members: int, options: CascadeOptions) -> str:
    what = "harm" if options.kind == "harm" else "disagreement"
    target = f"a {what} of at most {options.max_harm:g} with confidence {options.confidence:g}"
    end = f"Every input queries all {members} members."
    if samples < (needed := needed_samples(options)):
        return f"{samples} held-out samples are too few for {target}, which needs at least {needed}. {end}"
    return f"The held-out samples do not support {target}, even for the most confident samples. {end}"


def _check_logits(logits: Tensor, members: int | None = None) -> int:
    if logits.dim() != 3 or not logits.numel() or members not in (None, len(logits)):
        raise DataError(
            f"Logits have shape {list(logits.shape)}. [{'M' if members is None else members}, N, C] with at least one "
            "sample are needed."
        )
    return len(logits)


def _check_options(members: int, stages: Sequence[int], max_harm: float, confidence: float, kind: str) -> None:
    if kind not in LOSSES:
        raise RecipeError(f"Unknown loss of a cascade {kind!r}; allowed: {', '.join(LOSSES)}")
    if not (0 < max_harm < 1 and 0 < confidence < 1):
        raise RecipeError(f"max_harm = {max_harm} and confidence = {confidence} were given. Both must be in (0, 1).")
    if not stages and members <= FIRST_STAGE:
        raise RecipeError(
            f"A cascade over {members} member{'s' * (members > 1)} saves nothing: every input queries at least two, "
            "because one member has no mutual information. Train more members."
        )
    if not stages or list(stages) != sorted(set(stages)) or stages[0] < 1 or stages[-1] >= members:
        raise RecipeError(
            f"stages = {list(stages)}: give increasing numbers of members from 1 to {members - 1}, such as "
            f"{list(default_stages(members)) or [1]}"
        )
