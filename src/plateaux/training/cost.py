"""The cost of training: epochs, passes over the training samples, seconds.

A pass is one forward and one backward pass over every training sample. SAM needs two per epoch, so methods are
compared at equal epochs, at equal passes, and at equal time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from plateaux.config.experiment import Experiment
from plateaux.core.method import GradRequest, Update
from plateaux.optim.sam import trace_requests
from plateaux.storage.run import Run, partition_summary_path
from plateaux.storage.run_info import StoredPartition

DEFAULT_SAM_FRACTION = 0.5  # of the samples of a member, as long as its data partition is not known


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one member."""

    epochs: float
    passes: float
    seconds: float


def measured_cost(run: Run, number: int) -> Cost:
    """Return the cost of a member of a run so far, including the scoring of samples for data partitions."""
    progress, summaries = run.progress(number), _partition_summaries(run, number)
    shares = {epoch: _share(summary, number) for epoch, summary in summaries.items()}
    passes = count_passes(run.experiment, number, epochs=progress.epoch, shares=shares)
    return Cost(progress.epoch, passes, progress.seconds)


def count_passes(
    experiment: Experiment,
    number: int = 0,
    *,
    epochs: int | None = None,
    shares: Mapping[int, float] | None = None,
) -> float:
    """Return the number of passes of a member; scoring the samples for a data partition counts as one pass.

    `shares` maps the epoch of a data partition to the fraction of samples to which the member applies SAM from then on.
    """
    recipe, method = experiment.recipe, experiment.method(number)
    size = recipe.data.batch_size
    total_epochs = recipe.train.epochs if epochs is None else epochs
    partitions = [epoch for epoch in (method.partition.after if method.partition else ()) if epoch <= total_epochs]
    sampled = recipe.data.bootstrap or 1.0  # fraction of all samples in an epoch
    passes = sampled * (partitions[0] if partitions else total_epochs) * passes_per_step(method.update, size)
    for start, stop in pairwise([*partitions, total_epochs]):
        share = (shares or {}).get(start, DEFAULT_SAM_FRACTION)
        sam_set = torch.arange(size) < round(share * size)
        passes += 1 + sampled * (stop - start) * passes_per_step(method.update, size, sam_set)
    return passes


def passes_per_step(update: Update, size: int, sam_set: Tensor | None = None) -> float:
    """Return the number of passes over its batch of `size` samples that one step of an update needs."""
    return sum((_count_request(request, size) for request in trace_requests(update, size, sam_set)), 0.0)


def _count_request(request: GradRequest, size: int) -> float:
    if isinstance(request.rows, slice):
        count = len(range(*request.rows.indices(size)))
    else:
        count = size if request.rows is None else len(request.rows)
    return count / size


def _partition_summaries(run: Run, number: int) -> dict[int, StoredPartition]:
    """Return the stored summaries of data partitions by epoch."""
    partition = run.experiment.method(number).partition
    names = {epoch: partition_summary_path(epoch) for epoch in (partition.after if partition else ())}
    return {epoch: run.partition_summary(name) for epoch, name in names.items() if run.store.has(name)}


def _share(summary: StoredPartition, number: int) -> float:
    """Return the fraction of the samples to which a member applies SAM; 0 for a member without a set."""
    return float(summary.share[number] or 0.0) if number < len(summary.share) else 0.0
