"""Evaluate a run: one pass over the data, or over cached logits, for all metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plateaux.core.process_info import is_rank_zero
from plateaux.core.progress import Progress, log_messages
from plateaux.data.warning_table import log_warnings
from plateaux.evaluation.evaluation import Evaluation
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.ood_sets import labeled_splits
from plateaux.evaluation.prediction_cache import CacheMode
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.run_warnings import run_warnings, store_warnings
from plateaux.evaluation.splits import EvalSplit, eval_splits
from plateaux.storage.run import RunLike

STANDARD = ("accuracy", "nll", "brier", "ece")


def evaluate(
    run: RunLike,
    *,
    split: str | Sequence[str] | Mapping[str, Any] = "test",
    metrics: str | Sequence[str] = STANDARD,
    members: Sequence[int] | None = None,
    limit: int | None = None,
    ensemble_sizes: bool = False,
    device: str | None = None,
    executor: Mapping[str, Any] | None = None,
    cache_logits: CacheMode = "float32",
    corruption_cache: str | Path | None = None,
    progress: Progress = log_messages,
) -> Evaluation:
    """Evaluate the members of a run and their ensemble, and store the results in the run folder.

    Logits are cached next to the run, so a second call needs no forward pass.

    Args:
        run: A run, its folder, or its URL.
        split: "test", "validation", "train", "corrupted", "corrupted:fog:3", or several; "test@1000" for the first
            1,000 samples. Also labeled images: "./photos" (one folder per class), "list.txt" (one `path label` per
            line), or a data set ("imagenet_r"). If they have some of the run's classes only, the logits of the others
            are removed before any metric, unless the name ends in ":all_classes". Or labeled arrays, tensors, or a
            DataFrame by a name of your own: `{"new": (x, y)}`.
        metrics: Names of metrics ("ece(bins=10)" with options), or groups: "all", "performance", "uncertainty",
            "diversity".
        members: Ids of the members that form the ensemble. None: all trained members.
        limit: Use only the first N samples of each split.
        ensemble_sizes: Also evaluate ensembles of 1, 2, ... members.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        executor: The `[executor]` section of a recipe, such as `{"name": "mesh"}`, to distribute the evaluation.
        cache_logits: Precision of the logits that are cached next to the run; "off": do not read or write them.
        corruption_cache: A folder that keeps generated corrupted images.
        progress: Called with progress events.
    """
    evaluator = Evaluator(
        run, members=members, limit=limit, device=device, executor=executor, cache_logits=cache_logits
    )
    chosen = get_metrics([metrics] if isinstance(metrics, str) else metrics, trust=evaluator.components.trust)
    results: list[MetricResult] = []
    for target in _targets(evaluator, split, corruption_cache):
        results += evaluator.evaluate(target, chosen, ensemble_sizes=ensemble_sizes, progress=progress)
    if is_rank_zero():
        for result in results:
            evaluator.write(result)
        for name, found in evaluator.warnings.items():
            store_warnings(evaluator.run, evaluator.numbers, name, found)
        if evaluator.warnings:
            log_warnings(run_warnings(evaluator.run, evaluator.numbers))
    return Evaluation(results)


def _targets(
    evaluator: Evaluator, split: str | Sequence[str] | Mapping[str, Any], cache: str | Path | None
) -> list[EvalSplit]:
    if isinstance(split, Mapping):
        return labeled_splits(split, evaluator.data)
    names = [split] if isinstance(split, str) else split
    return eval_splits(evaluator.recipe, evaluator.data_info, names, cache=cache, components=evaluator.components)
