"""The uniform soup of a study: the accuracy of one network with the mean of the members' weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from plateaux.core.row_names import RowName
from plateaux.evaluation.evaluate import evaluate
from plateaux.evaluation.results import MetricResult
from plateaux.evaluation.robustness import robustness
from plateaux.prediction.soup import soup
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run
from plateaux.studies.study import EvaluateConfig

SOUP = RowName.parse("uniform soup")


def evaluate_soup(run: Run, members: int, config: EvaluateConfig) -> list[MetricResult]:
    """Return the accuracy of the soup of the first members on all splits of a study, as `accuracy of the soup`.

    A loss barrier between members is no reason to refuse it: that a soup fails may be the result.
    """
    with LocalStore(Path(run.store.root).parent).scratch() as folder:
        made = soup(run, Path(folder.root) / "run", split="test", max_barrier=math.inf, members=range(members))
        found = evaluate(
            made,
            split=[*config.splits, *config.corruptions],
            metrics=["accuracy"],
            cache_logits="off",
            corruption_cache=config.corruption_cache,
        )
    results = [each for each in found if "corruption" not in each.data] + robustness(found)
    return [_renamed(each) for each in results if each.metric.startswith("accuracy")]


def _renamed(result: MetricResult) -> MetricResult:
    rows = {SOUP.with_part(*row.part): value for row, value in result.rows.items()}
    return replace(result, metric=result.metric.replace("accuracy", "accuracy of the soup"), rows=rows)
