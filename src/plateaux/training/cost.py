"""What training costs: epochs, passes over the training samples, seconds.

A pass is one forward and one backward pass over every training sample. SAM takes two an epoch, so methods are compared
at equal epochs, at equal passes and at equal time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from plateaux.config.builders.training import build_method
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe
from plateaux.core.method import GradRequest, StepContext, Update
from plateaux.core.types import TensorTree
from plateaux.storage.run import Run, partition_summary_path

BACKWARD = 2 / 3  # of a pass
UNKNOWN_FRACTION = 0.5  # of the samples a member is careful about, before its meeting


@dataclass(frozen=True, slots=True)
class Cost:
    """What one member has cost."""

    epochs: float
    passes: float
    seconds: float


def measured_cost(run: Run, number: int, components: Components = NO_COMPONENTS) -> Cost:
    """Return what a member of a run has cost until now.

    Scoring for a meeting counts, as a pass and in seconds.
    """
    progress, met = run.progress(number), _meetings(run, number, components)
    shares = {epoch: float(summary["share"][number] or 0.0) for epoch, summary in met.items()}
    passes = count_passes(run.recipe, number, epochs=progress.epoch, shares=shares, components=components)
    return Cost(progress.epoch, passes, progress.seconds)


def count_passes(
    recipe: Recipe,
    number: int = 0,
    *,
    epochs: int | None = None,
    shares: Mapping[int, float] | None = None,
    components: Components = NO_COMPONENTS,
) -> float:
    """Return how many passes a member takes; `shares` says of each meeting about what part it is careful then.

    Scoring every sample at a meeting counts one pass.
    """
    method, size = build_method(recipe, number, components), recipe.data.batch_size
    wanted = recipe.train.epochs if epochs is None else epochs
    ends = [epoch for epoch in (method.partition.after if method.partition else ()) if epoch <= wanted]
    drawn = recipe.data.bootstrap or 1.0  # of all samples, in an epoch
    found = drawn * (ends[0] if ends else wanted) * passes_per_step(method.update, size)
    for begin, end in pairwise([*ends, wanted]):
        share = (shares or {}).get(begin, UNKNOWN_FRACTION)
        careful = torch.arange(size) < round(share * size)
        found += 1 + drawn * (end - begin) * passes_per_step(method.update, size, careful)
    return found


def passes_per_step(update: Update, size: int, sam_fraction: Tensor | None = None) -> float:
    """Return how many passes over its batch an update takes."""
    nothing: TensorTree = {"weight": torch.zeros(1)}
    walk = update(nothing, StepContext(size, lr=1.0, peak_lr=1.0, sam_set=sam_fraction))
    found = 0.0
    try:
        asked = next(walk)
        while True:
            found += _pass(asked, size)
            asked = walk.send(nothing if asked.average is None else asked.average)
    except StopIteration:
        return found


def _pass(asked: GradRequest, size: int) -> float:
    if asked.average is not None:
        return 0.0
    if isinstance(asked.rows, slice):
        size_of_part = len(range(*asked.rows.indices(size)))
    else:
        size_of_part = size if asked.rows is None else len(asked.rows)
    return (BACKWARD if asked.reuse_graph else 1.0) * size_of_part / size


def _meetings(run: Run, number: int, components: Components) -> dict[int, Mapping[str, Any]]:
    """Return the summaries of the meetings that were."""
    rendezvous = build_method(run.recipe, number, components).partition
    names = {epoch: partition_summary_path(epoch) for epoch in (rendezvous.after if rendezvous else ())}
    return {epoch: run.store.get_json(name) for epoch, name in names.items() if run.store.has(name)}
