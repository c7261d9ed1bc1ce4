"""A member judged on samples it does not train on: what the best weights are chosen by."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from plateaux.config.builders.data import eval_batches
from plateaux.config.recipe import Recipe
from plateaux.core import registry
from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.metric import Metric
from plateaux.core.row_names import RowName
from plateaux.core.runtime import autocast
from plateaux.core.types import Estimate
from plateaux.data.sources import DataSplits, Source
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.evaluation.metric_loop import evaluate_metrics
from plateaux.models.modes import eval_mode
from plateaux.training.state import TrainState


def validation_metrics(select: str) -> dict[str, Metric]:
    """Return what is measured on validation samples: accuracy, NLL, and what the best weights are chosen by."""
    names = {"accuracy", "nll"} | ({select.removeprefix("best:")} if select != "last" else set())
    measures: dict[str, Metric] = {}
    for name in sorted(names):
        measures[name] = registry.metric.get(name)()
        if measures[name].higher_is_better is None:
            raise RecipeError(
                f"train.select = {select!r}: more of {name} is neither better nor worse, so no weights are the "
                "best by it; "
                "take a measure such as best:nll or best:accuracy"
            )
        if measures[name].min_members > 1:
            raise RecipeError(
                f"train.select = {select!r}: {name} says nothing about one member alone, so no weights can be "
                "chosen by "
                "it; take a measure such as best:nll or best:accuracy"
            )
    return measures


def validate_member(
    recipe: Recipe,
    data: DataSplits,
    source: Source,
    ids: torch.Tensor,
    learner: TrainState,
    measures: Mapping[str, Metric],
) -> dict[str, Estimate]:
    """Return what the measures find about one member on the samples `ids`."""
    device = next(iter(learner.params.values())).device
    with eval_mode([learner.module]):
        view = MemberModule(learner.module, forward=lambda: autocast(recipe.train.precision, device))
        batches = eval_batches(recipe, data, source, ids, device=device)
        results = evaluate_metrics(SINGLE_PROCESS, [view], batches, measures)
    return {name: values[RowName.member(0)] for name, values in results.items()}
