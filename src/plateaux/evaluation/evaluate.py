"""Measure a run: walk once over the data, or over what is kept of it, and write one object per measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.callbacks import Say, Seen, nothing
from plateaux.core.runtime import is_rank_zero
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.prediction_cache import CacheDtype
from plateaux.evaluation.ray_evaluator import RayEvaluator
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.splits import eval_splits
from plateaux.storage.run import Run, RunLike

STANDARD = ("accuracy", "nll", "brier", "ece")


def evaluate(
    root: RunLike,
    *,
    split: str | Sequence[str] = "test",
    metrics: Sequence[str] = STANDARD,
    members: Sequence[int] | None = None,
    ensemble_sizes: bool = False,
    limit: int | None = None,
    cache_logits: CacheDtype = "float32",
    no_cache: bool = False,
    corruption_cache: str | Path | None = None,
    components: Components = NO_COMPONENTS,
    device: str | None = None,
    executor: Mapping[str, Any] | None = None,
    seen: Seen = nothing,
    say: Say = nothing,
) -> list[MetricResult]:
    """Measure members and their ensemble on `test`, `validation` or `train` samples, or `corrupted` ones.

    `members` takes some of them as the ensemble, `sizes` adds curves over ensembles of 1, 2, ... members, `samples`
    takes the first so many. Logits are kept beside the run, and a second call needs no forward pass, unless `fresh`.
    Corrupted images are made when they are needed, or once, in the folder `cache`. On `executor = {"name": "ray"}`
    members x samples are spread over a cluster; logits are not kept then.
    """
    kind = RayEvaluator if (executor or {}).get("name") == "ray" else Evaluator
    panel = kind(
        Run.open(root),
        members,
        components=components,
        device=device,
        executor=executor,
        cache_logits=cache_logits,
        say=say,
    )
    chosen = get_metrics(metrics, trust=components.trust)
    found: list[MetricResult] = []
    with closing(panel):
        for target in eval_splits(
            panel.run.recipe, panel.data_info, [split] if isinstance(split, str) else split, cache=corruption_cache
        ):
            found += panel.evaluate(
                target, chosen, ensemble_sizes=ensemble_sizes, limit=limit, no_cache=no_cache, seen=seen
            )
    if is_rank_zero():
        for each in found:
            panel.write(each)
    return found
