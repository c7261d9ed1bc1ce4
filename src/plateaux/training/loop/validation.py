"""Evaluate a member on validation samples, which early stopping and the selection of weights depend on."""

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
from plateaux.training.loop.state import TrainState


def validation_metrics(select: str) -> dict[str, Metric]:
    """Return the metrics on validation samples: accuracy, NLL, and the one that selects the best weights."""
    names = {"accuracy", "nll"} | ({select.removeprefix("best:")} if select != "last" else set())
    metrics: dict[str, Metric] = {}
    for name in sorted(names):
        metric = metrics[name] = registry.metric.get(name)()
        if metric.higher_is_better is None:
            raise RecipeError(
                f"train.select = {select!r}: neither high nor low values of {name} are better, so it cannot select "
                "weights. Use a metric such as best:nll or best:accuracy"
            )
        if metric.min_members > 1:
            raise RecipeError(
                f"train.select = {select!r}: {name} is not defined for a single member, so it cannot select weights. "
                "Use a metric such as best:nll or best:accuracy"
            )
    return metrics


def validate_member(
    recipe: Recipe,
    data: DataSplits,
    source: Source,
    ids: torch.Tensor,
    state: TrainState,
    metrics: Mapping[str, Metric],
) -> dict[str, Estimate]:
    """Return the metrics of one member on the samples `ids`."""
    device = next(iter(state.params.values())).device
    with eval_mode([state.module]):
        member = MemberModule(state.module, forward=lambda: autocast(recipe.train.precision, device))
        batches = eval_batches(recipe, data, source, ids, device=device)
        results = evaluate_metrics(SINGLE_PROCESS, [member], batches, metrics)
    return {name: values[RowName.member(0)] for name, values in results.items()}
