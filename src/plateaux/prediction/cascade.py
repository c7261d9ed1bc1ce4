"""Evaluation of the cascade of a run: how many members it queries, and what it costs in accuracy."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from plateaux.core.errors import RunError
from plateaux.core.metric import Metric
from plateaux.core.progress import Progress, log_messages
from plateaux.core.row_names import RowName
from plateaux.core.stats.estimates import mean, proportion
from plateaux.core.types import Estimate
from plateaux.ensembles.cascade import Cascade
from plateaux.ensembles.log_probs import log_probabilities
from plateaux.evaluation.evaluation import Evaluation
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import MemberOutputs, predict_all
from plateaux.evaluation.ood_sets import Suites, open_suites, skip_missing_data
from plateaux.evaluation.prediction_cache import CacheMode
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.splits import EvalSplit, eval_splits
from plateaux.prediction.calibration import Calibration, without_fitted
from plateaux.storage.run import RunLike

logger = logging.getLogger(__name__)
NO_SUITES: Suites = {}
ROW = RowName.ensemble("cascade")


def evaluate_cascade(
    run: RunLike,
    *,
    split: str | Sequence[str] = "test",
    suites: Suites = NO_SUITES,
    skip_missing: bool = False,
    exclude_calibration_ids: bool = False,
    device: str | None = None,
    cache_logits: CacheMode = "float32",
    corruption_cache: str | Path | None = None,
    progress: Progress = log_messages,
) -> Evaluation:
    """Evaluate the cascade of a run: members queried, and its accuracy against that of all members.

    Args:
        run: A run, its folder, or its URL.
        split: "test", "validation", "corrupted", "corrupted:fog:3", or several.
        suites: OOD sets by suite, as names or as inputs by name: `{"near": ["cifar100"], "far": {"noise": x}}`.
        skip_missing: Skip datasets that are not available, instead of an error.
        exclude_calibration_ids: Leave out the samples that the calibration was fitted on, instead of an error.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        cache_logits: Precision of the logits that are cached next to the run; "off": do not read or write them.
        corruption_cache: A folder that keeps generated corrupted images.
        progress: Called with progress events.
    """
    evaluator = Evaluator(run, device=device, cache_logits=cache_logits)
    calibration = Calibration.of_weights(evaluator.run)
    if calibration.cascade is None:
        raise RunError(f"{evaluator.run} has no cascade. Run: plateaux calibrate {evaluator.run} --cascade")
    names = [split] if isinstance(split, str) else split
    results: list[MetricResult] = []
    for target in eval_splits(evaluator.recipe, evaluator.data_info, names, cache=corruption_cache, own_only=True):
        outputs = predict_all(evaluator, target, progress=progress)
        if evaluator.split_fingerprint(target) == calibration.fingerprint:
            outputs = without_fitted(outputs, calibration, target.name, exclude=exclude_calibration_ids)
        results.append(_result(evaluator, target, outputs, calibration))
    for sets in open_suites(evaluator, suites).values():
        for name, open_splits in sets:
            with skip_missing_data(name, skip=skip_missing):
                for target in open_splits():
                    outputs = predict_all(evaluator, target, progress=progress)
                    results.append(_result(evaluator, target, outputs, calibration))
    for result in results:
        evaluator.write(result)
    return Evaluation(results)


def _result(evaluator: Evaluator, target: EvalSplit, outputs: MemberOutputs, calibration: Calibration) -> MetricResult:
    cascade = calibration.cascade
    assert cascade is not None
    name = target.name if target.labeled else f"{target.name} ({target.family})"
    definition = _describe(cascade, calibration.split, target)
    metric = Metric(lambda *_: {}, lambda _: {}, higher_is_better=None, group="uncertainty", definition=definition)
    identity = {key: value for key, value in evaluator.split_identity(target).items() if key != "split"}
    metadata: dict[str, Any] = {**identity, "samples": len(outputs.ids), "run data": evaluator.data_info.name}
    metadata |= {"cascade": cascade.to_dict(), "guaranteed": _is_guaranteed(target)}
    rows = cascade_rows(outputs.logits, outputs.y if target.labeled else None, cascade)
    return evaluator.result("cascade", name, rows, metric, metadata)


def cascade_rows(logits: Tensor, y: Tensor | None, cascade: Cascade) -> Mapping[RowName, Estimate]:
    """Return members queried and what the cascade changes, from logits `[M, N, C]`; accuracies need labels `[N]`."""
    queried, count = cascade.members_queried(logits), logits.shape[1]
    label, full = cascade.log_p(logits).argmax(-1), log_probabilities(logits.double())[-2].argmax(-1)
    rows = {"members queried": _mean(queried), "differs": proportion(float((label != full).sum()), count)}
    if y is not None:
        is_right, was_right = label == y, full == y
        rows["accuracy"] = proportion(float(is_right.sum()), count)
        rows["accuracy of all members"] = proportion(float(was_right.sum()), count)
        rows["accuracy lost"] = _mean(was_right.double() - is_right.double())
        rows["harm"] = proportion(float((was_right & ~is_right).sum()), count)
    return {ROW.with_part(name): value for name, value in rows.items()}


def _is_guaranteed(target: EvalSplit) -> bool:
    return target.labeled and target.family != "corrupted"


def _describe(cascade: Cascade, split: str, target: EvalSplit) -> str:
    """Return what the cascade guarantees on these samples."""
    if cascade.threshold is None:
        return f"all members are queried: {cascade.remark}"
    loss = "the ensemble gets right and the cascade gets wrong" if cascade.kind == "harm" else "get another prediction"
    fitted = f"fitted on {cascade.samples:,} {split} samples"
    if not _is_guaranteed(target):
        kind = "under corruption" if target.family == "corrupted" else "for out-of-distribution inputs"
        return f"the guarantee of the cascade does not hold {kind}"
    return (
        f"{cascade.kind}: the fraction of samples that {loss}; at most {cascade.max_harm:g} with confidence "
        f"{cascade.confidence:g} for samples from the distribution of the fit; {fitted}"
    )


def _mean(values: Tensor) -> Estimate:
    numbers = values.double()
    return mean(float(numbers.sum()), float((numbers * numbers).sum()), len(numbers))
