"""Predictions for the samples of a split: class, probability, uncertainty, OOD score, conformal set, abstention."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from plateaux.core.progress import Progress
from plateaux.core.registry import dataset
from plateaux.data.data_summary import class_names
from plateaux.ensembles.answers import Answers, answer_by_members, is_randomized
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import predict_all
from plateaux.evaluation.prediction_cache import CacheMode
from plateaux.evaluation.splits import OWN, eval_split, ood_split, parse_limit
from plateaux.prediction.cascade_fit import calibrated_log_p
from plateaux.prediction.load import answer_settings
from plateaux.prediction.predictions import Predictions
from plateaux.prediction.predictor import AnswerOptions
from plateaux.storage.run import RunLike

logger = logging.getLogger(__name__)


def predict_split(
    run: RunLike,
    split: str,
    options: AnswerOptions,
    *,
    members: Sequence[int] | None,
    device: str | None,
    cache_logits: CacheMode,
    progress: Progress,
) -> Predictions:
    """Predict the samples of a split or of another dataset; `plateaux.predict` describes the arguments."""
    evaluator = Evaluator(run, members=members, device=device, cache_logits=cache_logits)
    settings, remark = answer_settings(evaluator.run, options, members)
    name, limit = parse_limit(split)
    is_own = name.split(":")[0] in OWN or name not in dataset.names()
    target = (
        eval_split(evaluator.recipe, evaluator.data_info, split)
        if is_own
        else replace(ood_split(name, "elsewhere", evaluator.components), limit=limit)
    )
    if not is_own and (resized := evaluator.split_identity(target).get("resized")):
        logger.warning("%s: images were resized from %s", split, resized)
    outputs = predict_all(evaluator, target, progress=progress)
    randomized = None
    if settings.conformal is not None and is_randomized(settings.conformal):
        settings, randomized = replace(settings, conformal=None), settings.conformal
    queried = None if settings.cascade is None else settings.cascade.members_queried(outputs.logits)
    compute = Answers(settings)
    found = compute(outputs.logits) if queried is None else answer_by_members(compute, outputs.logits, queried)
    answers = dict(zip(settings.outputs, found, strict=True))
    if settings.temperatures is not None and randomized is not None:
        log_p = calibrated_log_p(outputs.logits, settings.temperatures, settings.cascade)
        answers["prediction_set"] = randomized.sets(log_p, outputs.ids)
    if queried is not None:
        answers["members_queried"] = queried
    return Predictions.from_answers(
        {name: values.numpy() for name, values in answers.items()},
        class_names(evaluator.data_info.labels, evaluator.data_info.classes),
        settings.ood_score,
        settings.temperatures is not None,
        remark,
        tuple(str(number) for number in outputs.ids.tolist()),
    )
