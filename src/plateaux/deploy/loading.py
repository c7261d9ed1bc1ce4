"""Load a predictor from a run: its members, its input contract, and its calibration."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.config.components import Components, Model
from plateaux.core.errors import RecipeError, RunError
from plateaux.core.runtime import get_device, num_threads
from plateaux.data.sources import DataSplits
from plateaux.deploy.contract import InputContract
from plateaux.deploy.predictor import MAX_BATCH, Arrays, Predictor
from plateaux.ensembles.answers import Answers, AnswerSettings, is_randomized
from plateaux.ensembles.ensemble import Ensemble
from plateaux.evaluation.calibration import Calibration
from plateaux.evaluation.loading import data_splits_info, load_members
from plateaux.evaluation.predict import answer_settings
from plateaux.evaluation.prediction_records import NOT_CALIBRATED
from plateaux.storage.run import Run, RunLike

logger = logging.getLogger(__name__)


class ModuleBackend:
    """The members as modules of torch, in float32 on one device."""

    def __init__(self, ensemble: Ensemble, settings: AnswerSettings, *, threads: int | None = None) -> None:
        self.ensemble, self.settings, self.threads = ensemble, settings, threads
        self.answers = Answers(settings)

    @torch.no_grad()
    def __call__(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        inputs: dict[str, Tensor] = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
        with num_threads(self.threads):
            logits = self.ensemble.logits(inputs["x"] if set(inputs) == {"x"} else inputs)
            answers = self.answers(logits)
        return {name: values.cpu().numpy() for name, values in zip(self.settings.outputs, answers, strict=True)}


def load_run_predictor(
    run: RunLike,
    *,
    data: DataSplits | None = None,
    model: Model | None = None,
    trust: Sequence[str] = (),
    device: str | None = None,
    threads: int | None = None,
    ood_score: str = "max_probability",
    alpha: float | None = None,
    max_batch: int = MAX_BATCH,
) -> Predictor:
    """Return the ensemble of a run as a predictor; `plateaux.load_predictor` describes the arguments."""
    opened = Run.open(run)
    contract = InputContract.from_run(opened)
    settings, remark = _settings(opened, ood_score, alpha)
    numbers = opened.trained_members()
    components = Components(data=data, model=model, trust=tuple(trust))
    modules = load_members(opened, data or data_splits_info(opened), numbers, components)
    ensemble = Ensemble(modules, mean=contract.mean, std=contract.std, labels=contract.labels)
    ensemble = ensemble.float().to(get_device(device))
    return Predictor(
        ModuleBackend(ensemble, settings, threads=threads),
        contract,
        outputs=settings.outputs,
        ood_score=settings.ood_score,
        calibrated=settings.temperatures is not None,
        remark=remark,
        max_batch=max_batch,
    )


def _settings(run: Run, ood_score: str, alpha: float | None) -> tuple[AnswerSettings, str]:
    """Return what the predictor computes, and why some of it is missing."""
    if run.info.calibration_digest is None:
        if alpha is not None:
            raise RecipeError(f"alpha = {alpha}: {run} is not calibrated. Run: plateaux calibrate {run}")
        return AnswerSettings(ood_score), NOT_CALIBRATED
    calibration = Calibration.read(run)
    if calibration.hashes != tuple(run.weights_hash(number) for number in run.trained_members()):
        raise RunError(f"The weights of {run} have changed since it was calibrated; run `plateaux calibrate` again")
    settings = answer_settings(calibration, ood_score, alpha)
    if settings.conformal is not None and is_randomized(settings.conformal):
        remark = (
            f"no prediction sets: the {settings.conformal.kind} sets of this calibration are randomized by sample id, "
            "which new inputs do not have; calibrate with --conformal lac, or with --no-randomized"
        )
        logger.warning("%s", remark)
        return replace(settings, conformal=None), remark
    return settings, ""
