"""The evaluation loop: one forward pass for all metrics, with sums that add over batches and processes.

    stream = run_members(executor, members, batches, outputs)      # or PredictionCache.read
    sums = accumulate(executor, stream, metrics, subsets)          # subsets: which members form an ensemble

Samples may be distributed over processes: each accumulates its own, and the sums are reduced once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plateaux.core.executor import Collectives, all_reduce_max
from plateaux.core.member import MemberModule
from plateaux.core.metric import Metric
from plateaux.core.outputs import LoopedOutput, NoFeaturesError, OutputFn, features, logits, logits_and_features
from plateaux.core.row_names import RowName
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import memo_scope

MemberSubset = tuple[int, ...]
"""The members that form an ensemble, by their positions in the outputs."""


@dataclass(frozen=True, slots=True)
class BatchOutputs:
    """The outputs of every member for one batch: a tensor `[M, B, ...]` for each output function."""

    outputs: Mapping[OutputFn, Tensor]
    batch: Batch
    start: int  # position of the first sample among all samples of the evaluation
    total: int  # samples of the batch over all processes


def evaluate_metrics(
    executor: Collectives,
    members: Sequence[MemberModule],
    batches: Iterable[Batch],
    metrics: Mapping[str, Metric],
    *,
    on_batch: Callable[[int], None] = lambda samples: None,
) -> dict[str, dict[RowName, Estimate]]:
    """Return the values of every metric; `on_batch` is called with the number of samples of each batch."""
    outputs = dict.fromkeys(metric.output for metric in metrics.values())
    stream = run_members(executor, members, batches, list(outputs))
    sums = accumulate(executor, stream, metrics, on_batch=on_batch)
    return {name: compute_rows(metrics[name], reduced) for (_, name), reduced in sums.items()}


def compute_rows(metric: Metric, sums: TensorTree) -> dict[RowName, Estimate]:
    """Return the rows of a metric from its sums; a custom metric may name its rows with plain strings."""
    return {RowName.parse(name): value for name, value in metric.compute(sums).items()}


def run_members(
    executor: Collectives, members: Sequence[MemberModule], batches: Iterable[Batch], outputs: Sequence[OutputFn]
) -> Iterator[BatchOutputs]:
    """Run every member on every batch; logits and features come from the same forward pass."""
    width = done = 0
    for batch in batches:
        with torch.no_grad():
            if features in outputs and not width:
                width = _max_feature_width(executor, members, batch)
            tensors = dict(_run_batch(executor, members, batch, outputs, width))
        local = torch.tensor(len(batch), device=batch.index.device)
        total = int(executor.all_reduce({"samples": local})["samples"])
        yield BatchOutputs(tensors, batch, done + executor.shard(total).start, total)
        done += total


def _run_batch(
    executor: Collectives, members: Sequence[MemberModule], batch: Batch, outputs: Sequence[OutputFn], width: int
) -> Iterator[tuple[OutputFn, Tensor]]:
    both = features in outputs
    if both:
        joined = executor.all_gather(
            executor.map_members(_logits_then_features(width), members, [batch] * len(members))
        )
        yield logits, joined[..., :-width]
        yield features, joined[..., -width:]
    for output in outputs:
        if not (both and output in (logits, features)):
            yield output, executor.all_gather(executor.map_members(output, members, [batch] * len(members)))


def _logits_then_features(width: int) -> OutputFn:
    """Return an output of logits, then features padded to `width`, so that members of different widths stack."""

    def output(member: MemberModule, batch: Batch) -> Tensor:
        out, hidden = logits_and_features(member, batch)
        return torch.cat([out, F.pad(hidden, (0, width - hidden.shape[1])).to(out.dtype)], -1)

    return LoopedOutput(output)  # hooks do not run inside vmap's functional call


def _max_feature_width(executor: Collectives, members: Sequence[MemberModule], batch: Batch) -> int:
    """Return the largest feature width of any member; a member without features is an error in every process."""
    width, problem = 0, None
    for member in members:
        try:
            width = max(width, features(member, batch.take(slice(0, 1))).shape[1])
        except NoFeaturesError as error:
            problem = error
    if all_reduce_max(executor, int(problem is not None)):
        raise problem or NoFeaturesError("A member held by another process does not end in an nn.Linear")
    return all_reduce_max(executor, width)


@torch.no_grad()
def accumulate(
    executor: Collectives,
    stream: Iterable[BatchOutputs],
    metrics: Mapping[str, Metric],
    subsets: Sequence[MemberSubset | None] = (None,),
    *,
    samples: int = 0,
    on_batch: Callable[[int], None] = lambda samples: None,
) -> dict[tuple[MemberSubset | None, str], TensorTree]:
    """Return the sums of every metric for every subset (None: all members), added over batches and processes.

    Metrics with the same `update` share one sum. A subset with fewer members than a metric needs is left out.
    `samples` is the expected number of samples; metrics that concatenate rows then allocate memory once.
    """
    sums: dict[tuple[MemberSubset | None, Any], MetricState] = {}
    updates = {(metric.update, metric.output): metric for metric in metrics.values()}
    outputs = dict.fromkeys(metric.output for metric in updates.values())
    done = 0
    for batch in stream:
        for subset, output in product(subsets, outputs):
            values = batch.outputs[output]
            if output == features and subset is not None and len(subset) < len(values):
                continue  # sums of features are D x D for every pair: computed for all members only
            if subset is not None:
                values = values.index_select(0, torch.tensor(subset, device=values.device))
            with memo_scope(values):
                for update, metric in updates.items():
                    if metric.output is output and len(values) >= metric.min_members:
                        sums.setdefault((subset, update), MetricState(metric, samples)).add(values, batch)
        done += batch.total
        on_batch(batch.total)
    reduced = {where: state.reduced(executor, done) for where, state in sums.items()}
    wanted = [(subset, name, (metric.update, metric.output)) for subset in subsets for name, metric in metrics.items()]
    return {(subset, name): reduced[subset, update] for subset, name, update in wanted if (subset, update) in reduced}


@dataclass(slots=True)
class MetricState:
    """The sums of one metric over the samples of this process."""

    metric: Metric
    expected: int = 0  # samples
    total: TensorTree = field(default_factory=dict)  # sums, or rows at their positions among all samples

    def add(self, outputs: Tensor, batch: BatchOutputs) -> None:
        """Add one batch."""
        new = self.metric.update(outputs, batch.batch)
        if self.metric.reduce == "cat":
            self.write_rows(batch.start, new)
        else:
            self.total = {name: self.total[name] + new[name] for name in new} if self.total else new

    def write_rows(self, start: int, rows: TensorTree) -> None:
        """Write rows to keep; `start` is the position of the first."""
        for name, values in rows.items():
            end = start + len(values)
            stored = self.total.pop(name, values[:0])
            self.total[name] = stored = _grow(stored, end, max(self.expected, len(stored) * 3 // 2))
            stored[start:end] = values

    def reduced(self, executor: Collectives, samples: int) -> TensorTree:
        """Return the sums over all processes."""
        if self.metric.reduce == "sum":
            device = next((t.device for t in self.total.values() if t.device.type != "cpu"), torch.device("cpu"))
            return executor.all_reduce({name: tensor.to(device) for name, tensor in self.total.items()})
        rows: TensorTree = {}
        for name in list(self.total):
            padded = _grow(self.total.pop(name), samples, samples)[:samples]
            rows[name] = executor.all_reduce({name: padded})[name]
        return rows


def _grow(rows: Tensor, needed: int, capacity: int) -> Tensor:
    """Return the rows, padded with zeros to `capacity` if there are fewer than needed."""
    if needed <= len(rows):
        return rows
    grown = rows.new_zeros(max(needed, capacity), *rows.shape[1:])
    grown[: len(rows)] = rows
    return grown
