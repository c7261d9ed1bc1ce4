"""The evaluation walk: one forward pass for all measures, sums that add over batches and over processes.

    heard = hear(executor, views, batches, offers)         # or read from the run folder: nothing below can tell
    sums = settle(executor, heard, measures, casts)        # casts: which members, by position, make up an ensemble

Samples may be spread over processes: each settles its own, and what was settled is added up once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plateaux.core.executor import Executor, all_reduce_max
from plateaux.core.member import MemberModule
from plateaux.core.metric import Metric
from plateaux.core.outputs import LoopedOutput, NoFeaturesError, OutputFn, features, logits, logits_and_features
from plateaux.core.types import Batch, Estimate, TensorTree
from plateaux.ensembles.log_probs import memo_scope

MemberSubset = tuple[int, ...]
"""The members that make up an ensemble, by their positions in the table."""


@dataclass(frozen=True, slots=True)
class BatchOutputs:
    """What every member said about one batch: a table `[M, B, ...]` for each offer."""

    outputs: Mapping[OutputFn, Tensor]
    batch: Batch
    start: int  # where the batch begins among all samples of the walk
    whole: int  # samples of the batch that all processes hold together


def evaluate_metrics(
    executor: Executor,
    views: Sequence[MemberModule],
    batches: Iterable[Batch],
    measures: Mapping[str, Metric],
    *,
    seen: Callable[[int], None] = lambda _: None,
) -> dict[str, Mapping[str, Estimate]]:
    """Return what every measure finds about the members' predictions; `seen` hears of the samples done."""
    offers = dict.fromkeys(measure.output for measure in measures.values())
    heard = run_members(executor, views, batches, list(offers))
    sums = accumulate(executor, heard, measures, seen=seen)
    return {name: measures[name].compute(merged) for (_, name), merged in sums.items()}


def run_members(
    executor: Executor, views: Sequence[MemberModule], batches: Iterable[Batch], offers: Sequence[OutputFn]
) -> Iterator[BatchOutputs]:
    """Ask every member about every batch; logits and features come from the same forward pass."""
    width = done = 0
    for batch in batches:
        with torch.no_grad():
            if features in offers and not width:
                width = _agreed_width(executor, views, batch)
            tables = dict(_tables(executor, views, batch, offers, width))
        here = torch.tensor(len(batch), device=batch.index.device)
        whole = int(executor.all_reduce({"samples": here})["samples"])
        yield BatchOutputs(tables, batch, done + executor.shard(whole).start, whole)
        done += whole


def _tables(
    executor: Executor, views: Sequence[MemberModule], batch: Batch, offers: Sequence[OutputFn], width: int
) -> Iterator[tuple[OutputFn, Tensor]]:
    both = features in offers
    if both:
        table = executor.all_gather(executor.map_members(_side_by_side(width), views, [batch] * len(views)))
        yield logits, table[..., :-width]
        yield features, table[..., -width:]
    for offer in offers:
        if not (both and offer in (logits, features)):
            yield offer, executor.all_gather(executor.map_members(offer, views, [batch] * len(views)))


def _side_by_side(width: int) -> OutputFn:
    """Offer logits, then features with zeros up to `width`: members of different widths lie in one table."""

    def offer(view: MemberModule, batch: Batch) -> Tensor:
        out, seen = logits_and_features(view, batch)
        return torch.cat([out, F.pad(seen, (0, width - seen.shape[1])).to(out.dtype)], -1)

    return LoopedOutput(offer)  # hooks do not run inside vmap's functional call


def _agreed_width(executor: Executor, views: Sequence[MemberModule], batch: Batch) -> int:
    """Return the largest width of any member's features; where one has none, every process hears of it."""
    width, problem = 0, None
    for view in views:
        try:
            width = max(width, features(view, batch.take(slice(0, 1))).shape[1])
        except NoFeaturesError as found:
            problem = found
    if all_reduce_max(executor, int(problem is not None)):
        raise problem or NoFeaturesError("A member held by another process does not end in an nn.Linear")
    return all_reduce_max(executor, width)


@torch.no_grad()
def accumulate(
    executor: Executor,
    stream: Iterable[BatchOutputs],
    measures: Mapping[str, Metric],
    subsets: Sequence[MemberSubset | None] = (None,),
    *,
    samples: int = 0,
    seen: Callable[[int], None] = lambda _: None,
) -> dict[tuple[MemberSubset | None, str], TensorTree]:
    """Return every measure's sums for every cast (None: everybody), added up over batches and processes.

    Measures that settle alike are settled once. One that takes more members than a cast has is left out of it.
    `samples` says how many are expected: where rows are kept, there is then room for them from the start.
    """
    sums: dict[tuple[MemberSubset | None, Any], MetricState] = {}
    owners = {(measure.update, measure.output): measure for measure in measures.values()}
    offers = dict.fromkeys(measure.output for measure in owners.values())
    done = 0
    for each in stream:
        for cast, offer in product(subsets, offers):
            table = each.outputs[offer]
            if offer == features and cast is not None and len(cast) < len(table):
                continue  # sums of features are D x D for every pair: kept for everybody once, and for no subset
            table = table if cast is None else table.index_select(0, torch.tensor(cast, device=table.device))
            with memo_scope(table):
                for question, measure in owners.items():
                    if measure.output is offer and len(table) >= measure.min_members:
                        sums.setdefault((cast, question), MetricState(measure, samples)).add(table, each)
        done += each.whole
        seen(each.whole)
    merged = {where: found.reduced(executor, done) for where, found in sums.items()}
    asked = [(cast, name, (measure.update, measure.output)) for cast in subsets for name, measure in measures.items()]
    return {(cast, name): merged[cast, question] for cast, name, question in asked if (cast, question) in merged}


@dataclass(slots=True)
class MetricState:
    """What one measure has settled so far, of the samples held here."""

    measure: Metric
    expected: int = 0  # samples
    total: TensorTree = field(default_factory=dict)  # sums, or rows where they belong among all samples

    def add(self, table: Tensor, heard: BatchOutputs) -> None:
        """Settle one batch."""
        new = self.measure.update(table, heard.batch)
        if self.measure.reduce == "cat":
            self.lay(heard.start, new)
        else:
            self.total = {name: self.total[name] + new[name] for name in new} if self.total else new

    def lay(self, start: int, rows: TensorTree) -> None:
        """Lay down rows to keep, the first of them at `start`."""
        for name, part in rows.items():
            end = start + len(part)
            room = self.total.pop(name, part[:0])
            self.total[name] = room = _with_room(room, end, max(self.expected, len(room) * 3 // 2))
            room[start:end] = part

    def reduced(self, executor: Executor, samples: int) -> TensorTree:
        """Return what all processes settled about so many samples."""
        if self.measure.reduce == "sum":
            place = next((t.device for t in self.total.values() if t.device.type != "cpu"), torch.device("cpu"))
            return executor.all_reduce({name: tensor.to(place) for name, tensor in self.total.items()})
        found: TensorTree = {}
        for name in list(self.total):
            whole = _with_room(self.total.pop(name), samples, samples)[:samples]
            found[name] = executor.all_reduce({name: whole})[name]
        return found


def _with_room(rows: Tensor, needed: int, better: int) -> Tensor:
    """Return the rows with zeros after them, so that there are as many as needed; if any are lacking, better more."""
    if needed <= len(rows):
        return rows
    room = rows.new_zeros(max(needed, better), *rows.shape[1:])
    room[: len(rows)] = rows
    return room
