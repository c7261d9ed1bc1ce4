"""Predictions for the samples of a split: class, probability, uncertainty, OOD score, conformal set, abstention."""

from __future__ import annotations

import logging
from dataclasses import replace

from plateaux.core.errors import RecipeError, RunError
from plateaux.core.progress import Progress, log_messages
from plateaux.core.registry import dataset
from plateaux.data.summary import class_names
from plateaux.ensembles.answers import Answers, AnswerSettings, answer_by_members, is_randomized
from plateaux.ensembles.cascade import Cascade
from plateaux.ensembles.ood_scores import OOD_SCORES
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import predict_all
from plateaux.evaluation.options import DEFAULT_OPTIONS, EvalOptions
from plateaux.evaluation.splits import eval_split, ood_split
from plateaux.prediction.calibration import Calibration
from plateaux.prediction.predictions import NOT_CALIBRATED, Predictions
from plateaux.storage.run import RunLike

logger = logging.getLogger(__name__)


def predict(
    run: RunLike,
    *,
    split: str = "test",
    ood_score: str = "max_probability",
    alpha: float | None = None,
    options: EvalOptions = DEFAULT_OPTIONS,
    progress: Progress = log_messages,
) -> Predictions:
    """Predict the samples of a split or of another dataset; calibrated, if the run is.

    Args:
        run: A run, its folder, or its URL.
        split: A split of the run, or the name of another dataset.
        ood_score: The OOD score to compute; see `plateaux.ensembles.ood_scores`.
        alpha: Which of the fitted conformal sets to return. None: the first.
        options: Supports members, limit, device, cache_logits, no_cache.
        progress: Called with progress events.
    """
    options.require("predict", "members", "limit", "device", "cache_logits", "no_cache")
    if ood_score not in OOD_SCORES:
        raise RecipeError(f"There is no OOD score called {ood_score!r}; allowed: {', '.join(OOD_SCORES)}")
    evaluator = Evaluator(run, options)
    is_own = split.split(":")[0] in ("test", "train", "validation", "corrupted") or split not in dataset.names()
    target = (
        eval_split(evaluator.recipe, evaluator.data_info, split)
        if is_own
        else ood_split(split, "elsewhere", evaluator.components)
    )
    if not is_own and (resized := evaluator.split_identity(target).get("resized")):
        logger.warning("%s: images were resized from %s", split, resized)
    outputs = predict_all(evaluator, target, progress=progress)
    calibration = _matching_calibration(evaluator, all_members=options.members is None)
    settings = AnswerSettings(ood_score) if calibration is None else answer_settings(calibration, ood_score, alpha)
    randomized = None
    if settings.conformal is not None and is_randomized(settings.conformal):
        settings, randomized = replace(settings, conformal=None), settings.conformal
    queried = None if settings.cascade is None else settings.cascade.members_queried(outputs.logits)
    compute = Answers(settings)
    found = compute(outputs.logits) if queried is None else answer_by_members(compute, outputs.logits, queried)
    answers = dict(zip(settings.outputs, found, strict=True))
    if calibration is not None and randomized is not None:
        answers["prediction_set"] = randomized.sets(calibration.log_p(outputs.logits), outputs.ids)
    if queried is not None:
        answers["members_queried"] = queried
    return Predictions.from_answers(
        {name: values.numpy() for name, values in answers.items()},
        class_names(evaluator.data_info.labels, evaluator.data_info.classes),
        names=tuple(str(number) for number in outputs.ids.tolist()),
        ood_score=ood_score,
        calibrated=calibration is not None,
        remark=NOT_CALIBRATED if calibration is None else one_member_remark(settings.cascade),
    )


def answer_settings(calibration: Calibration, ood_score: str, alpha: float | None) -> AnswerSettings:
    """Return what is computed from logits with a calibration, for one of its fitted levels."""
    threshold = calibration.threshold.at
    return AnswerSettings(
        ood_score,
        calibration.temperatures[calibration.order],
        calibration.conformal(alpha),
        -1.0 if threshold is None else threshold,  # an error probability is at least 0, so all are rejected
        calibration.cascade,
    )


def one_member_remark(cascade: Cascade | None) -> str:
    """Return what to know about answers of a cascade that may stop after one member."""
    if cascade is None or cascade.threshold is None or cascade.stages[0] > 1:
        return ""
    return "mutual information is 0 where members_queried is 1, because one member has nothing to disagree with"


def _matching_calibration(evaluator: Evaluator, *, all_members: bool) -> Calibration | None:
    """Return the calibration of the run if it was fitted for these members."""
    if evaluator.run.info.calibration_digest is None:
        logger.info("the run is not calibrated: no conformal sets, no abstention; run `plateaux calibrate` to fit them")
        return None
    calibration = Calibration.read(evaluator.run)
    if calibration.hashes == tuple(evaluator.hashes):
        return calibration
    if all_members:
        raise RunError("The weights of the run have changed since it was calibrated; run `plateaux calibrate` again")
    logger.info("the calibration is for all members, so it is not used for some of them")
    return None
