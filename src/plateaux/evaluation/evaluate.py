"""Evaluate a run: one pass over the data, or over cached logits, for all metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plateaux.core.process_info import is_rank_zero
from plateaux.core.progress import Progress, log_messages
from plateaux.evaluation.evaluation import Evaluation
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.ood_sets import labeled_splits
from plateaux.evaluation.options import DEFAULT_OPTIONS, EvalOptions
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.splits import EvalSplit, eval_splits
from plateaux.storage.run import RunLike

STANDARD = ("accuracy", "nll", "brier", "ece")


def evaluate(
    run: RunLike,
    *,
    split: str | Sequence[str] | Mapping[str, Any] = "test",
    metrics: str | Sequence[str] = STANDARD,
    options: EvalOptions = DEFAULT_OPTIONS,
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
        options: Members, limit, device, executor, caches; see `EvalOptions`.
        progress: Called with progress events.
    """
    evaluator = Evaluator(run, options)
    chosen = get_metrics([metrics] if isinstance(metrics, str) else metrics, trust=evaluator.components.trust)
    results: list[MetricResult] = []
    for target in _targets(evaluator, split):
        results += evaluator.evaluate(target, chosen, progress=progress)
    if is_rank_zero():
        for result in results:
            evaluator.write(result)
    return Evaluation(results)


def _targets(evaluator: Evaluator, split: str | Sequence[str] | Mapping[str, Any]) -> list[EvalSplit]:
    if isinstance(split, Mapping):
        return labeled_splits(split, evaluator.data)
    names, cache = [split] if isinstance(split, str) else split, evaluator.options.corruption_cache
    return eval_splits(evaluator.recipe, evaluator.data_info, names, cache=cache, components=evaluator.components)
