"""Predictions for samples: class, probability, OOD score, conformal set, and whether to abstain."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plateaux.config.components import Components, Model
from plateaux.core.errors import RecipeError, RunError
from plateaux.core.formatting import escape_csv, json_safe
from plateaux.core.method import LossFn
from plateaux.core.progress import Progress, log_messages
from plateaux.core.registry import dataset
from plateaux.data.sources import DataSplits
from plateaux.ensembles.conformal import Conformal
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.ensembles.ood_scores import OOD_SCORES
from plateaux.evaluation.calibration import Calibration
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.options import DEFAULT_OPTIONS, EvalOptions
from plateaux.evaluation.predictions import error_probability, predict_all
from plateaux.evaluation.splits import eval_split, ood_split
from plateaux.storage.atomic import write_atomic
from plateaux.storage.run import Run, RunLike

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions of an ensemble, one row per sample."""

    ids: Tensor  # [N]
    classes: Tensor  # [N] the most likely class
    probability: Tensor  # [N] of that class
    error_probability: Tensor  # [N] 1 - probability: the ensemble's estimate that the prediction is incorrect
    ood: Tensor  # [N] larger: more out-of-distribution
    sets: Tensor | None  # [N, C] conformal sets; None: the run is not calibrated
    abstain: Tensor | None  # [N]
    labels: tuple[str, ...] = ()  # names of the classes
    metadata: str = ""

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per sample."""
        rows = []
        for i, number in enumerate(self.classes.tolist()):
            row: dict[str, Any] = {"id": int(self.ids[i]), "class": number}
            if self.labels:
                row["label"] = self.labels[number]
            scores = {"probability": self.probability, "error_probability": self.error_probability, "ood": self.ood}
            row |= {name: float(values[i]) for name, values in scores.items()}
            if self.sets is not None and self.abstain is not None:
                row["set"] = torch.nonzero(self.sets[i])[:, 0].tolist()
                row["abstain"] = bool(self.abstain[i])
            rows.append(row)
        return rows

    def write(self, file: Path) -> None:
        """Write a .csv, .jsonl or .npz file atomically."""
        kinds: dict[str, Callable[[], bytes]] = {".csv": self._csv, ".jsonl": self._jsonl, ".npz": self._npz}
        if file.suffix not in kinds:
            raise RecipeError(
                f"{file}: predictions are written as {', '.join(kinds)}; end the file name in one of these"
            )
        write_atomic(file, kinds[file.suffix]())

    def _csv(self) -> bytes:
        rows = [{**row, **({"set": " ".join(map(str, row["set"]))} if "set" in row else {})} for row in self.rows()]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else ["id"], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: escape_csv(value) for name, value in row.items()} for row in rows)
        return text.getvalue().encode()

    def _jsonl(self) -> bytes:
        return "".join(json.dumps(json_safe(row), allow_nan=False) + "\n" for row in self.rows()).encode()

    def _npz(self) -> bytes:
        columns = {
            "ids": self.ids,
            "class": self.classes,
            "probability": self.probability,
            "error_probability": self.error_probability,
            "ood": self.ood,
            "set": self.sets,
            "abstain": self.abstain,
        }
        content = io.BytesIO()
        np.savez_compressed(content, **{name: t.numpy() for name, t in columns.items() if t is not None})  # type: ignore[arg-type]
        return content.getvalue()


def predict(
    run: RunLike,
    *,
    split: str = "test",
    ood_score: str = "max_probability",
    alpha: float | None = None,
    data: DataSplits | None = None,
    model: Model | None = None,
    loss: LossFn | None = None,
    trust: Sequence[str] = (),
    options: EvalOptions = DEFAULT_OPTIONS,
    progress: Progress = log_messages,
) -> Predictions:
    """Predict the samples of a split or of another dataset; calibrated, if the run is.

    Args:
        run: A run, its folder, or its URL.
        split: A split of the run, or the name of another dataset.
        ood_score: The OOD score to compute; see `plateaux.ensembles.ood_scores`.
        alpha: Which of the fitted conformal sets to return. None: the first.
        data: The data that the run was trained with, if passed in Python.
        model: The model that the run was trained with, if passed in Python.
        loss: The loss that the run was trained with, if passed in Python.
        trust: Modules whose functions the recipe may call.
        options: Supports members, limit, device, cache_logits, no_cache.
        progress: Called with progress events.
    """
    options.require("predict", "members", "limit", "device", "cache_logits", "no_cache")
    if ood_score not in OOD_SCORES:
        raise RecipeError(f"There is no OOD score called {ood_score!r}; allowed: {', '.join(OOD_SCORES)}")
    components = Components(data, model, loss, trust=tuple(trust))
    evaluator = Evaluator(Run.open(run), components=components, options=options)
    is_own = split.split(":")[0] in ("test", "train", "validation", "corrupted") or split not in dataset.names()
    target = (
        eval_split(evaluator.recipe, evaluator.data_info, split)
        if is_own
        else ood_split(split, "elsewhere", components)
    )
    if not is_own and (resized := evaluator.split_identity(target).get("resized")):
        logger.warning("%s: images were resized from %s", split, resized)
    outputs = predict_all(evaluator, target, progress=progress)
    calibration = _matching_calibration(evaluator, all_members=options.members is None)
    rows = log_probabilities(outputs.logits.double())
    log_p = rows[-2 if len(rows) > 1 else 0] if calibration is None else calibration.log_p(outputs.logits)
    sets = abstain = None
    if calibration is not None:
        sets = _sets_with_alpha(calibration, alpha).sets(log_p, outputs.ids)
        abstain = ~calibration.threshold.accepts(error_probability(log_p))
    best = log_p.max(-1)
    return Predictions(
        outputs.ids,
        best.indices,
        best.values.exp(),
        error_probability(log_p),
        OOD_SCORES[ood_score](outputs.logits),
        sets,
        abstain,
        evaluator.data_info.labels,
        f"{split}, ood: {ood_score}",
    )


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


def _sets_with_alpha(calibration: Calibration, alpha: float | None) -> Conformal:
    for fitted in calibration.sets:
        if alpha is None or fitted.alpha == alpha:
            return fitted
    allowed = ", ".join(f"{fitted.alpha:g}" for fitted in calibration.sets)
    raise RecipeError(f"alpha = {alpha}: the run is calibrated for {allowed}; use one of these, or calibrate again")
