"""Load a predictor from a run: its members, its input contract, and its calibration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.errors import RecipeError
from plateaux.core.runtime import get_device, num_threads
from plateaux.core.types import Inputs
from plateaux.ensembles.answers import Answers, AnswerSettings, is_randomized
from plateaux.ensembles.cascade import stage_confidence
from plateaux.ensembles.ensemble import ALL, Ensemble
from plateaux.ensembles.ood_scores import DEFAULT_OOD_SCORE
from plateaux.evaluation.loaded_run import load_members
from plateaux.prediction.calibration import Calibration
from plateaux.prediction.contract import InputContract
from plateaux.prediction.predictions import NOT_CALIBRATED
from plateaux.prediction.predictor import MAX_BATCH, AnswerOptions, Arrays, Predictor
from plateaux.prediction.stage_backend import CONFIDENCE, LOGITS, PREVIOUS, QUERIED, StageBackend
from plateaux.storage.run import Run

ONE_MEMBER = "mutual information is 0 where members_queried is 1, because one member has nothing to disagree with"
logger = logging.getLogger(__name__)


class ModuleBackend:
    """The members as modules of torch, in float32 on one device. A cascade queries each on the inputs that are left."""

    def __init__(self, ensemble: Ensemble, settings: AnswerSettings, *, threads: int | None = None) -> None:
        self.ensemble, self.settings, self.threads = ensemble, settings, threads
        self.answers = Answers(settings)
        cascade = settings.cascade
        self.cascade: StageBackend | None = None
        if cascade is not None:
            ends = [*(() if cascade.threshold is None else cascade.stages), len(ensemble)]
            stages = [partial(self._answer, members=slice(*pair)) for pair in pairwise([0, *ends])]
            self.cascade = StageBackend(stages, ends, cascade.threshold or 0.0)

    def __call__(self, arrays: Arrays) -> Mapping[str, NDArray[Any]]:
        with num_threads(self.threads):
            return self._answer(arrays) if self.cascade is None else self.cascade(arrays)

    @torch.no_grad()
    def _answer(self, arrays: Arrays, members: slice = ALL) -> dict[str, NDArray[Any]]:
        """Return the answers of all members, or those of a stage with its logits and its confidence."""
        arrays = dict(arrays)
        previous = arrays.pop(PREVIOUS, None)
        logits = self.ensemble.member_logits(self.prepare(arrays), members)
        if previous is not None:
            logits = torch.cat([torch.from_numpy(previous).to(logits.device).transpose(0, 1), logits])
        named = dict(zip(self.settings.outputs, self.answers(logits), strict=True))
        if len(logits) < len(self.ensemble):
            named |= {LOGITS: logits.transpose(0, 1), CONFIDENCE: stage_confidence(logits)}
        return {name: values.cpu().numpy() for name, values in named.items()}

    def prepare(self, arrays: Arrays) -> Inputs:
        """Return the inputs of the members on their device."""
        inputs: dict[str, Tensor] = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
        return self.ensemble.prepare(inputs["x"] if set(inputs) == {"x"} else inputs)

    @torch.no_grad()
    def near_stop(self, arrays: Arrays, tolerance: float) -> NDArray[np.bool_]:
        """Return for which inputs `[N]` rounding errors could change how many members of the cascade are queried.

        The confidence of a stage is within the tolerance of the threshold, or two classes of a member are tied, so that
        it may or may not agree with the others.
        """
        cascade = self.settings.cascade
        if cascade is None or cascade.threshold is None:
            return np.zeros(len(next(iter(arrays.values()))), dtype=bool)
        logits = self.ensemble.member_logits(self.prepare(arrays)).double().cpu()
        top = logits.softmax(-1).topk(2).values
        near = (top[..., 0] - top[..., 1] <= 2 * tolerance).any(0)
        for stage in cascade.stages:
            near |= (stage_confidence(logits[:stage]) - cascade.threshold).abs() <= tolerance
        return near.numpy()


def load_run_predictor(
    run: Run, options: AnswerOptions, *, device: str | None, threads: int | None = None, max_batch: int = MAX_BATCH
) -> Predictor:
    """Return the ensemble of a run as a predictor; `plateaux.load_predictor` describes the arguments."""
    contract = InputContract.from_run(run)
    settings, remark = answer_settings(run, options)
    if settings.conformal is not None and is_randomized(settings.conformal):
        randomized = (
            f"no prediction sets: the {settings.conformal.kind} sets of this calibration are randomized by sample id, "
            "which new inputs do not have; calibrate with --conformal lac, or with --no-randomized"
        )
        logger.warning("%s", randomized)
        settings, remark = replace(settings, conformal=None), "; ".join(filter(None, (randomized, remark)))
    ensemble = load_ensemble(run, device=device)
    dtypes = {tensor.dtype for tensor in (*ensemble.parameters(), *ensemble.buffers()) if tensor.is_floating_point()}
    in_float32 = ensemble if dtypes <= {torch.float32} else deepcopy(ensemble).float()
    return Predictor(
        ModuleBackend(in_float32, settings, threads=threads),
        contract,
        outputs=(*settings.outputs, *(() if settings.cascade is None else (QUERIED,))),
        ood_score=settings.ood_score,
        calibrated=settings.temperatures is not None,
        remark=remark,
        max_batch=max_batch,
        ensemble=ensemble,
    )


def answer_settings(
    run: Run, options: AnswerOptions, members: Sequence[int] | None = None
) -> tuple[AnswerSettings, str]:
    """Return what is computed from the logits of some members, None: of all, and why some of it is missing."""
    remark = ""
    if run.info.calibration_digest is None:
        remark = NOT_CALIBRATED
    elif members is not None and list(members) != run.trained_members():
        remark = f"not calibrated for members {list(members)}: the calibration of the run is for all members"
    if remark:
        if options.alpha is not None:
            raise RecipeError(f"alpha = {options.alpha} was given, but {run} is {remark}")
        logger.info("%s", remark)
        return AnswerSettings(options.ood_score or DEFAULT_OOD_SCORE, raw=options.raw), remark
    calibration = Calibration.of_weights(run)
    threshold, cascade = calibration.threshold.at, calibration.cascade
    score = options.ood_score or calibration.ood_score
    alarm = calibration.ood_alarms.get(score)  # None: AnswerSettings refuses the score
    settings = AnswerSettings(
        score,
        calibration.temperatures[calibration.order],
        calibration.conformal(options.alpha),
        -1.0 if threshold is None else threshold,  # an error probability is at least 0, so all are rejected
        cascade,
        None if alarm is None else alarm.threshold,
        options.raw,
    )
    may_query_one = cascade is not None and cascade.threshold is not None and cascade.stages[0] == 1
    remarks = ONE_MEMBER if may_query_one else "", "" if alarm is None else alarm.remark
    return settings, "; ".join(filter(None, remarks))


def load_ensemble(run: Run, *, device: str | None = None) -> Ensemble:
    """Return the trained members of a run as one module."""
    info = run.info.data
    modules = load_members(run, run.trained_members())
    return Ensemble(modules, mean=info.mean, std=info.std, labels=info.labels).to(get_device(device))
