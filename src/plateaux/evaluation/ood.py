"""OOD detection: how well scores separate a run's own test samples from out-of-distribution samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plateaux.core.errors import RecipeError, suggest
from plateaux.core.metric import Metric
from plateaux.core.process_info import is_rank_zero
from plateaux.core.progress import Progress, log_messages
from plateaux.core.row_names import ALL_MEMBERS, RowName, with_member_ids
from plateaux.core.stats.estimates import mean_of_paired
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.ood_scores import DEFINITION, OOD_SCORES, compare
from plateaux.evaluation.evaluation import Evaluation
from plateaux.evaluation.evaluator import Evaluator, RunSums
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.evaluation.ood_sets import Suites, open_suites, skip_missing_data
from plateaux.evaluation.prediction_cache import CacheMode
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.splits import eval_split
from plateaux.storage.run import RunLike

OPENOOD = {  # the near and far sets of OpenOOD 1.5, by the dataset of the run
    "cifar10": {"near": ("cifar100", "tin"), "far": ("mnist", "svhn", "texture", "places365")},
    "cifar100": {"near": ("cifar10", "tin"), "far": ("mnist", "svhn", "texture", "places365")},
}
LABEL_FREE = (  # metrics that need no labels, so that they can be computed on OOD samples
    *("unique", "pds", "disagreement", "kl", "variance", "mutual_information", "predictive_entropy"),
    "expected_entropy",
)
MAX_NAMED = 6  # sets that the name of their mean lists
logger = logging.getLogger(__name__)


def parse_ood_suites(texts: Sequence[str], dataset: str) -> tuple[dict[str, list[str]], bool]:
    """Return the datasets by suite, and whether missing ones may be skipped (those of OpenOOD may).

    >>> parse_ood_suites(["near=cifar100,tin", "far=mnist"], "cifar10")[0]
    {'near': ['cifar100', 'tin'], 'far': ['mnist']}
    """
    suites: dict[str, list[str]] = {}
    is_openood = False
    for text in texts:
        suite, equals, names = text.partition("=")
        if not equals:
            known = OPENOOD.get(dataset, {})
            if suite not in known:
                raise RecipeError(
                    f"--ood {text}: name the datasets, such as near=cifar100,tin far=mnist. near and far alone select "
                    f"the datasets of OpenOOD, which are defined for {' and '.join(OPENOOD)}; this run uses {dataset}"
                )
            is_openood, names = True, ",".join(known[suite])
        suites.setdefault(suite, []).extend(name.strip() for name in names.split(",") if name.strip())
    return suites, is_openood


def detect_ood(
    run: RunLike,
    suites: Suites,
    *,
    metrics: Sequence[str] = (),
    skip_missing: bool = False,
    members: Sequence[int] | None = None,
    limit: int | None = None,
    device: str | None = None,
    executor: Mapping[str, Any] | None = None,
    cache_logits: CacheMode = "float32",
    progress: Progress = log_messages,
) -> Evaluation:
    """Evaluate how well each OOD score separates test samples from other datasets, by member and for all members.

    Larger scores are more out-of-distribution, and out-of-distribution is the positive class.

    Args:
        run: A run, its folder, or its URL.
        suites: OOD sets by suite, as names or as inputs by name: `{"near": ["cifar100"], "far": {"noise": x}}`. The
            name `corrupted:all:5` means the run's own test samples under each of 15 corruptions at severity 5. Inputs
            are arrays, tensors, pandas, or a torch `Dataset`, prepared as the inputs of the run.
        metrics: Metrics that need no labels, to compute on the OOD samples of each dataset: "unique", "pds", ...
        skip_missing: Skip datasets that are not available, instead of an error.
        members: Ids of the members that form the ensemble. None: all trained members.
        limit: Use only the first N samples of each split.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device.
        executor: The `[executor]` section of a recipe, such as `{"name": "mesh"}`, to distribute the evaluation.
        cache_logits: Precision of the logits that are cached next to the run; "off": do not read or write them.
        progress: Called with progress events.
    """
    for name in metrics:
        if name not in LABEL_FREE:
            raise RecipeError(f"The metric {name!r} cannot be computed without labels; {suggest(name, LABEL_FREE)}")
    evaluator = Evaluator(
        run, members=members, limit=limit, device=device, executor=executor, cache_logits=cache_logits
    )
    opened = open_suites(evaluator, suites)
    everyone = tuple(range(len(evaluator.numbers)))
    wanted = get_metrics(metrics) if metrics else {}
    extra = {name: metric for name, metric in wanted.items() if len(everyone) >= metric.min_members}
    subsets = [*((position,) for position in everyone if len(everyone) > 1), everyone]
    test = eval_split(evaluator.recipe, evaluator.data_info, "test")
    inside, metadata = evaluator.accumulate(test, {"ood": SCORES}, subsets, progress=progress)
    results: list[MetricResult] = []
    for suite, sets in opened.items():
        in_suite: list[MetricResult] = []
        for name, open_splits in sets:
            with skip_missing_data(name, skip=skip_missing):
                for split in open_splits():
                    outside, other = evaluator.accumulate(split, {"ood": SCORES, **extra}, subsets, progress=progress)
                    title = f"{split.name} ({suite})"
                    if "resized" in other:
                        original = other["resized"]
                        logger.warning(
                            "%s: images were resized from %s, which can make them easier to detect", name, original
                        )
                    for key, metric in extra.items():
                        found = with_member_ids(metric.compute(outside[everyone, key]), evaluator.numbers)
                        results.append(evaluator.result(key, title, found, metric, other))
                    rows = _rows(evaluator, inside, outside, subsets)
                    in_suite.append(evaluator.result("ood", title, rows, SCORES, {**metadata, "outside": other}))
        results += in_suite
        if len(in_suite) > 1:
            results.append(_mean_of_suite(evaluator, suite, in_suite, metadata))
    if is_rank_zero():
        for result in results:
            evaluator.write(result)
    return Evaluation(results)


def _rows(
    evaluator: Evaluator, inside: RunSums, outside: RunSums, subsets: Sequence[tuple[int, ...]]
) -> dict[RowName, Estimate]:
    rows: dict[RowName, Estimate] = {}
    for subset in subsets:
        row = RowName.member(evaluator.numbers[subset[0]]) if len(subset) == 1 else ALL_MEMBERS
        compared = compare(_scores_by_name(inside[subset, "ood"]), _scores_by_name(outside[subset, "ood"]))
        for score, values in compared.items():
            rows |= {row.with_part(score, name): value for name, value in values.items()}
    return rows


def _keep_scores(logits: Tensor, batch: Batch) -> TensorTree:
    # In float64: float32 would tie the most confident samples of well-fitted networks.
    return {"scores": torch.stack([score(logits) for score in OOD_SCORES.values()], -1)}


SCORES = Metric(_keep_scores, lambda _: {}, reduce="cat", higher_is_better=None, definition=DEFINITION)


def _scores_by_name(rows: TensorTree) -> dict[str, Any]:
    return {name: rows["scores"][:, column].cpu().numpy() for column, name in enumerate(OOD_SCORES)}


def _mean_of_suite(
    evaluator: Evaluator, suite: str, results: Sequence[MetricResult], metadata: Mapping[str, Any]
) -> MetricResult:
    rows = {name: mean_of_paired([result.rows[name] for result in results]) for name in results[0].rows}
    splits = [result.split for result in results]
    names = ", ".join(split.split(" (")[0] for split in splits) if len(splits) <= MAX_NAMED else f"{len(splits)} sets"
    return evaluator.result("ood", f"mean of {suite} ({names})", rows, SCORES, {**metadata, "sets": splits})
