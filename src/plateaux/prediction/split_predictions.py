"""Predictions for the samples of a split: class, probability, uncertainty, OOD score, conformal set, abstention."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from plateaux.core.errors import RecipeError
from plateaux.core.progress import Progress
from plateaux.core.registry import dataset
from plateaux.data.data_summary import class_names
from plateaux.ensembles.answers import Answers, answer_by_members, is_randomized
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import MemberOutputs, predict_all
from plateaux.evaluation.splits import OWN, eval_split, ood_split, parse_limit
from plateaux.prediction.cascade_fit import calibrated_log_p
from plateaux.prediction.load import answer_settings
from plateaux.prediction.predictions import Predictions
from plateaux.prediction.predictor import AnswerOptions
from plateaux.storage.atomic import write_atomic
from plateaux.storage.run import RunLike

MAX_FILE_BYTES = 512_000_000  # of logits
logger = logging.getLogger(__name__)


def predict_split(
    run: RunLike,
    split: str,
    options: AnswerOptions,
    *,
    members: Sequence[int] | None,
    device: str | None,
    logits_out: Path | None,
    progress: Progress,
) -> Predictions:
    """Predict the samples of a split or of another dataset; `plateaux.predict` describes the arguments."""
    if logits_out is not None and logits_out.suffix != ".npz":
        raise RecipeError(
            f"out = {logits_out}: the logits of all members are written as .npz. Give a file with this suffix"
        )
    evaluator = Evaluator(run, members=members, device=device)
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
    if logits_out is not None:
        _write_logits(outputs, evaluator.numbers, logits_out)
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


def _write_logits(outputs: MemberOutputs, members: Sequence[int], out: Path) -> None:
    """Write `logits` [M, N, C], `labels`, `ids`, and `members`, or parts of them in a folder without the suffix."""
    rows = max(1, MAX_FILE_BYTES // max(1, outputs.logits[:, :1].float().nbytes))
    starts = range(0, len(outputs.ids), rows)
    files = [out.with_suffix("") / f"part-{i:05d}.npz" for i in range(len(starts))] if len(starts) > 1 else [out]
    for old in {out, *out.with_suffix("").glob("part-?????.npz")} - set(files):
        old.unlink(missing_ok=True)  # of an earlier call with more or fewer samples
    for file, start in zip(files, starts, strict=True):
        content, part = io.BytesIO(), slice(start, start + rows)
        logits, labels, ids = (t.numpy() for t in (outputs.logits[:, part].float(), outputs.y[part], outputs.ids[part]))
        np.savez(content, logits=logits, labels=labels, ids=ids, members=np.array(members))
        write_atomic(file, content.getvalue())
