"""Calibration: temperatures, conformal sets, a rejection threshold, OOD alarms, and a cascade, fitted on held-out data.

calibration.json             temperatures, conformal thresholds, rejection threshold, OOD alarms, cascade
calibration-ids.safetensors  ids of the samples they were fitted on; they are excluded from its evaluation

A cascade is fitted on one half of the samples. The rest is fitted on the other half, to the outputs of the cascade,
because the cascade is a different predictor than the ensemble of all members.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from plateaux.core.errors import PlateauxError, RecipeError, RunError, StorageError, check_names
from plateaux.core.metric import Metric
from plateaux.core.progress import Progress, log_messages
from plateaux.core.row_names import MEAN_PROBABILITY, RowName
from plateaux.core.stats.estimates import mean, proportion
from plateaux.core.stats.ranking import auroc
from plateaux.core.types import Estimate, derive_seed
from plateaux.ensembles import conformal as conformal_sets
from plateaux.ensembles import ood_alarm, selective
from plateaux.ensembles.answers import all_ood_scores, allowed_scores
from plateaux.ensembles.cascade import Cascade, CascadeOptions
from plateaux.ensembles.conformal import Conformal, ConformalOptions
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.ensembles.ood_alarm import OodAlarm, OodOptions
from plateaux.ensembles.ood_scores import DEFAULT_OOD_SCORE
from plateaux.ensembles.selective import RejectionThreshold
from plateaux.ensembles.temperature import ORDERS, Order, Temperatures, calibrate_then_pool, pool_then_calibrate
from plateaux.evaluation.evaluation import Evaluation
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import MemberOutputs, error_probability, predict_all
from plateaux.evaluation.ood_sets import open_suites
from plateaux.evaluation.prediction_cache import CacheMode
from plateaux.evaluation.splits import eval_split
from plateaux.prediction.cascade_fit import calibrated_log_p, check_cascade, fit_cascade, pool
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.run import Run, RunLike

FILE, IDS = "calibration.json", "calibration-ids.safetensors"
ADVICE = "restore it, or run `plateaux calibrate` again"
NO_OPTIONS: Mapping[str, Any] = {}
Options = TypeVar("Options", CascadeOptions, ConformalOptions, OodOptions)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredCalibration:
    """The content of calibration.json."""

    split: str
    fingerprint: str  # of the source the samples are from
    hashes: tuple[str, ...]  # of the members' weights
    order: Order  # of pooling and calibrating; the one that is used
    temperatures: Mapping[Order, Temperatures]
    sets: tuple[Conformal, ...]
    threshold: RejectionThreshold
    cascade: Cascade | None = None  # None: all members are always queried
    ood_score: str  # of predictions, unless they ask for another one
    ood_alarms: Mapping[str, OodAlarm]  # by OOD score
    ood_aurocs: Mapping[str, float]  # by OOD score, if the score was chosen on OOD samples

    def find_problem(self) -> str | None:
        """Return what is wrong with values of the right type, or None."""
        for order, count in zip(ORDERS, (1, len(self.hashes)), strict=True):
            values = self.temperatures[order].values if order in self.temperatures else ()
            if len(values) != count or not all(0 < value < math.inf for value in values):
                return f"temperatures of {order!r} are {list(values)}, not {count} positive numbers"
        try:
            for conformal in self.sets:
                Conformal.from_dict(conformal.to_dict())
            if self.cascade is not None:
                Cascade.from_dict(self.cascade.to_dict())
        except PlateauxError as problem:
            return str(problem)
        if self.cascade is not None and self.cascade.members != len(self.hashes):
            return f"the cascade is for {self.cascade.members} members, but there are {len(self.hashes)}"
        if {self.ood_score, *allowed_scores(self.cascade)} != set(self.ood_alarms):
            return f"there are alarms of {sorted(self.ood_alarms)}, not of all OOD scores"
        return None if self.sets else "there are no conformal sets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(_StoredCalibration):
    """Temperatures, conformal sets, a rejection threshold, and OOD alarms of a run, fitted on held-out samples."""

    ids: Tensor
    cascade_ids: Tensor | None = None  # of the samples that the cascade was fitted on

    def log_p(self, logits: Tensor, order: Order | None = None) -> Tensor:
        """Return the calibrated log-probabilities `[N, C]` of the ensemble, or of its cascade."""
        return calibrated_log_p(logits, self.temperatures[order or self.order], self.cascade)

    @property
    def fitted_ids(self) -> Tensor:
        """The ids of all samples that anything was fitted on."""
        return self.ids if self.cascade_ids is None else torch.cat([self.ids, self.cascade_ids])

    def conformal(self, alpha: float | None = None) -> Conformal:
        """Return the conformal sets of a level that was fitted; None: the first."""
        for fitted in self.sets:
            if alpha is None or fitted.alpha == alpha:
                return fitted
        allowed = ", ".join(f"{fitted.alpha:g}" for fitted in self.sets)
        raise RecipeError(f"alpha = {alpha}: the run is calibrated for {allowed}; use one of these, or calibrate again")

    def to_dict(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "fingerprint": self.fingerprint,
            "samples": len(self.ids),
            "hashes": list(self.hashes),
            "order": self.order,
            "temperatures": {order: fitted.to_dict() for order, fitted in self.temperatures.items()},
            "sets": [fitted.to_dict() for fitted in self.sets],
            "threshold": self.threshold.to_dict(),
            **({} if self.cascade is None else {"cascade": self.cascade.to_dict()}),
            "ood_score": self.ood_score,
            "ood_alarms": {name: asdict(alarm) for name, alarm in self.ood_alarms.items()},
            "ood_aurocs": dict(self.ood_aurocs),
        }

    def write(self, run: Run) -> None:
        """Store the calibration in the run folder."""
        cascade_ids = {} if self.cascade_ids is None else {"cascade_ids": self.cascade_ids}
        run.store.put_tensors(IDS, {"ids": self.ids, **cascade_ids})
        run.update_info({"calibration_digest": run.store.put_json(FILE, self.to_dict())})

    @classmethod
    def read(cls, run: Run) -> Calibration:
        """Return the calibration that is stored in the run folder."""
        root, digest = run.store.root, run.info.calibration_digest
        if digest is None:
            raise RunError(f"{root} is not calibrated. Run: plateaux calibrate {root} --split validation")
        if not run.store.has(FILE):
            raise StorageError(f"{root} was calibrated, but {FILE} is missing. Restore it, or calibrate again")
        ids = run.store.get_tensor(IDS, "ids", dims=1, integers=True)
        stored = read_shape(_StoredCalibration, run.store.get_json(FILE, digest), root / FILE, ADVICE)
        problem = stored.find_problem()
        if problem is not None:
            raise StorageError(f"{root / FILE}: {problem}; {ADVICE}")
        is_cascade = stored.cascade is not None
        cascade_ids = run.store.get_tensor(IDS, "cascade_ids", dims=1, integers=True) if is_cascade else None
        values = {each.name: getattr(stored, each.name) for each in fields(stored)}
        return cls(ids=ids, cascade_ids=cascade_ids, **values)

    @classmethod
    def of_weights(cls, run: Run) -> Calibration:
        """Return the stored calibration if it was fitted for the weights that the run has now."""
        calibration = cls.read(run)
        if calibration.hashes != tuple(run.weights_hash(number) for number in run.trained_members()):
            raise RunError(
                f"The weights of {run} have changed since it was calibrated. Run: plateaux calibrate {run} --split "
                f"{calibration.split}"
            )
        return calibration


def calibrate(
    run: RunLike,
    *,
    split: str = "validation",
    fraction: float = 1.0,
    alphas: Sequence[float] = (0.1, 0.05),
    conformal: conformal_sets.Kind | Mapping[str, Any] = "lac",
    ood: Mapping[str, Any] = NO_OPTIONS,
    target_risk: float = 0.05,
    bound: selective.Bound = "clopper-pearson",
    order: Order = "pool then calibrate",
    cascade: bool | Mapping[str, Any] = False,
    device: str | None = None,
    progress: Progress = log_messages,
) -> Calibration:
    """Fit temperatures, conformal sets, a rejection threshold, and OOD alarms on held-out samples, and store them.

    Args:
        run: A run, its folder, or its URL.
        split: The held-out samples to fit on: "validation" or "test".
        fraction: Fit on a seeded random fraction of the samples; the rest can be used to evaluate the calibration.
        alphas: Miscoverage levels of the conformal sets: 0.1 for sets that contain the label in 90 % of the cases.
        conformal: The conformal score: "lac", "aps" or "raps", or settings: `kind`, the score; `randomized`, whether
            sets of "aps" and "raps" are randomized by the id of the sample (True): smaller, but new inputs without an
            id then have no sets; `allow_empty`, for the smallest sets (False: they contain the predicted label).
        ood: Settings of the OOD alarm: `false_alarms`, its rate of false alarms (0.05); `near`, names, folders, or
            inputs by name of OOD sets, to choose the OOD score on; the alarm is then fitted on half of the samples.
        target_risk: The error rate allowed among the samples that are not rejected.
        bound: The upper confidence bound that controls the risk: "clopper-pearson", "hoeffding", or "none" for a
            threshold without a guarantee.
        order: Average the members' probabilities, then calibrate, or the other way around.
        cascade: Fit a cascade, which queries fewer members where they agree and are confident. True, or its settings:
            `max_harm`, the largest fraction of samples that only the cascade gets wrong (0.005); `confidence`, the
            probability that this holds (0.9); `kind`, "harm", or "differs", which bounds the samples with another
            prediction and needs no labels; `stages`, after how many members a sample may stop (2, 3, ..., M - 1).
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        progress: Called with progress events.
    """
    if not 0 < fraction <= 1:
        raise RecipeError(f"fraction = {fraction}: give a number above 0 and at most 1")
    settings = None if cascade is False else _options("cascade", {} if cascade is True else cascade, CascadeOptions)
    kind = {"kind": conformal} if isinstance(conformal, str) else conformal
    set_options, ood_options = _options("conformal", kind, ConformalOptions), _options("ood", ood, OodOptions)
    evaluator = Evaluator(run, device=device)
    target = eval_split(evaluator.recipe, evaluator.data_info, split)
    if target.family == "train":
        raise RecipeError(
            "split = 'train': the members were trained on these samples, so they are overconfident on them. Fit on "
            "held-out samples: validation or test"
        )
    if settings is not None:
        check_cascade(order, evaluator)
    outputs = predict_all(evaluator, target, progress=progress)
    if fraction < 1:
        outputs, _ = _split(outputs, fraction, derive_seed(evaluator.recipe.seed, "calibrate", split))
    fitted_cascade, cascade_ids = None, None
    if settings is not None:
        held, outputs = _split(outputs, 0.5, derive_seed(evaluator.recipe.seed, "cascade", split))
        fitted_cascade, cascade_ids = fit_cascade(held, settings), held.ids
    temperatures: dict[Order, Temperatures] = {
        "pool then calibrate": replace(
            pool_then_calibrate(pool(outputs.logits, fitted_cascade), outputs.y), members=len(outputs.logits)
        ),
        "calibrate then pool": calibrate_then_pool(outputs.logits, outputs.y),
    }
    log_p = calibrated_log_p(outputs.logits, temperatures[order], fitted_cascade)
    sets = tuple(
        conformal_sets.fit(
            log_p, outputs.y, outputs.ids, alpha, set_options.kind,
            randomized=set_options.randomized, never_empty=not set_options.allow_empty,
        )
        for alpha in alphas
    )  # fmt: skip
    incorrect = log_p.argmax(-1) != outputs.y
    threshold = selective.fit(error_probability(log_p), incorrect, target_risk, bound=bound)
    scores = partial(all_ood_scores, temperatures=temperatures[order], cascade=fitted_cascade)
    ood_score, alarms, aurocs = _fit_alarms(evaluator, outputs, scores, ood_options, split, progress)
    calibration = Calibration(
        split=split, fingerprint=evaluator.split_fingerprint(target), ids=outputs.ids, hashes=tuple(evaluator.hashes),
        order=order, temperatures=temperatures, sets=sets, threshold=threshold, cascade=fitted_cascade,
        cascade_ids=cascade_ids, ood_score=ood_score, ood_alarms=alarms, ood_aurocs=aurocs,
    )  # fmt: skip
    calibration.write(evaluator.run)
    remarks = [*temperatures[order].remarks, *(fitted.remark for fitted in sets), threshold.remark]
    remarks.append(alarms[ood_score].remark)
    for remark in [*remarks, *([] if fitted_cascade is None else [fitted_cascade.remark])]:
        if remark:
            logger.warning("%s", remark)
    return calibration


def _options(name: str, given: Mapping[str, Any], kind: type[Options]) -> Options:
    """Return the settings of a part of the calibration."""
    check_names(name, given, kind.__dataclass_fields__)
    return kind(**given)


def _fit_alarms(
    evaluator: Evaluator,
    outputs: MemberOutputs,
    scores: Callable[[Tensor], dict[str, Tensor]],
    options: OodOptions,
    split: str,
    progress: Progress,
) -> tuple[str, dict[str, OodAlarm], dict[str, float]]:
    """Return the default OOD score, the alarm of every score, and the mean AUROC of every score on the OOD sets."""
    aurocs: dict[str, float] = {}
    if options.near:  # the samples that choose the score do not fit the alarm
        held, outputs = _split(outputs, 0.5, derive_seed(evaluator.recipe.seed, "ood", split))
        inside = scores(held.logits)
        opened = open_suites(evaluator, {"near": options.near})["near"]
        targets = [target for _, open_splits in opened for target in open_splits()]
        for target in targets:
            if resized := evaluator.split_identity(target).get("resized"):
                logger.warning("%s: images were resized from %s", target.name, resized)
            outside = scores(predict_all(evaluator, target, progress=progress).logits)
            for name, values in inside.items():
                value = auroc(values.numpy(), outside[name].numpy()).value
                aurocs[name] = aurocs.get(name, 0.0) + value / len(targets)
    alarms = {name: ood_alarm.fit(v.numpy(), options.false_alarms) for name, v in scores(outputs.logits).items()}
    return max(aurocs, key=aurocs.__getitem__, default=DEFAULT_OOD_SCORE), alarms, aurocs


def _split(outputs: MemberOutputs, fraction: float, seed: int) -> tuple[MemberOutputs, MemberOutputs]:
    """Return a random fraction of the samples, and the others."""
    count = max(1, round(fraction * len(outputs.y)))
    order = torch.randperm(len(outputs.y), generator=torch.Generator().manual_seed(seed))
    return outputs.take(order[:count].sort().values), outputs.take(order[count:].sort().values)


def evaluate_calibration(
    run: RunLike,
    *,
    split: str = "test",
    exclude_calibration_ids: bool = False,
    device: str | None = None,
    cache_logits: CacheMode = "float32",
    progress: Progress = log_messages,
) -> Evaluation:
    """Evaluate the calibration of a run on samples that it was not fitted on.

    Args:
        run: A run, its folder, or its URL.
        split: The samples to evaluate on.
        exclude_calibration_ids: Leave out the samples that the calibration was fitted on, instead of an error.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        cache_logits: Precision of the logits that are cached next to the run; "off": do not read or write them.
        progress: Called with progress events.
    """
    evaluator = Evaluator(run, device=device, cache_logits=cache_logits)
    calibration = Calibration.of_weights(evaluator.run)
    target = eval_split(evaluator.recipe, evaluator.data_info, split)
    outputs = predict_all(evaluator, target, progress=progress)
    fingerprint = evaluator.split_fingerprint(target)
    if fingerprint == calibration.fingerprint:
        outputs = without_fitted(outputs, calibration, split, exclude=exclude_calibration_ids)
    threshold = calibration.threshold
    kinds = [f"{fitted.kind} {fitted.alpha:g}" for fitted in calibration.sets]
    settings = {"sets": kinds, "risk": threshold.risk, "bound": threshold.bound, "fitted on": calibration.split}
    samples = {"name": evaluator.data_info.name, "samples": len(outputs.y)}
    metadata = {"fingerprint": fingerprint, **samples, **settings}
    definition = f"fitted on {len(calibration.ids):,} {calibration.split} samples; {calibration.order}"
    definition += "" if calibration.cascade is None else "; of the cascade"
    metric = Metric(lambda *_: {}, lambda _: {}, higher_is_better=None, group="uncertainty", definition=definition)
    rows = _calibration_rows(outputs, calibration, evaluator.numbers)
    result = evaluator.result("calibrated", split, rows, metric, metadata)
    evaluator.write(result)
    return Evaluation([result])


def without_fitted(outputs: MemberOutputs, calibration: Calibration, split: str, *, exclude: bool) -> MemberOutputs:
    """Return the outputs for samples that the calibration was not fitted on."""
    fitted = torch.isin(outputs.ids, calibration.fitted_ids)
    if fitted.any() and not exclude:
        raise RunError(
            f"The calibration was fitted on {int(fitted.sum()):,} of the {len(fitted):,} {split} samples, so results "
            "on them are optimistically biased. Add --exclude-calibration-ids to leave them out, or use another split"
        )
    if fitted.all():
        raise RunError(
            f"The calibration was fitted on all {split} samples, so none are left to evaluate it on. Use another "
            "split, or calibrate on a part of them: --fraction 0.5"
        )
    return outputs.take(~fitted)


def _calibration_rows(
    outputs: MemberOutputs, calibration: Calibration, numbers: Sequence[int]
) -> dict[RowName, Estimate]:
    rows: dict[RowName, Estimate] = {}
    before = log_probabilities(outputs.logits.double())
    temperatures = calibration.temperatures["calibrate then pool"].values
    for position, number in enumerate(numbers):
        scaled = (outputs.logits[position].double() / temperatures[position]).log_softmax(-1)
        member = RowName.member(number)
        rows[member.with_part("temperature")] = Estimate(temperatures[position])
        rows[member.with_part("nll before")] = _nll(before[position], outputs.y)
        rows[member.with_part("nll after")] = _nll(scaled, outputs.y)
    if len(numbers) > 1:
        rows[MEAN_PROBABILITY.with_part("nll before")] = _nll(before[-2], outputs.y)
    for order in ORDERS if calibration.cascade is None else (calibration.order,):
        log_p = calibration.log_p(outputs.logits, order)
        rows[RowName.ensemble(order).with_part("nll after")] = _nll(log_p, outputs.y)
    log_p = calibration.log_p(outputs.logits)
    ensemble = RowName.ensemble(calibration.order)
    for fitted in calibration.sets:
        sets = fitted.sets(log_p, outputs.ids)
        level = f"{100 * (1 - fitted.alpha):g} % sets"
        rows[ensemble.with_part(f"{level}: coverage")] = conformal_sets.coverage(sets, outputs.y)
        rows[ensemble.with_part(f"{level}: classes")] = conformal_sets.mean_size(sets)
    accepted = calibration.threshold.accepts(error_probability(log_p))
    errors = float(((log_p.argmax(-1) != outputs.y) & accepted).sum())
    rows[ensemble.with_part("answered")] = proportion(float(accepted.sum()), len(accepted))
    if accepted.any():
        rows[ensemble.with_part("wrong of those answered")] = proportion(errors, float(accepted.sum()))
    return rows


def _nll(log_p: Tensor, y: Tensor) -> Estimate:
    losses = -log_p.gather(-1, y[:, None])[:, 0].double()
    return mean(float(losses.sum()), float((losses * losses).sum()), len(y))
