"""A measurement spread over a cluster: members x samples are asked in shards, and only sums come back.

Every shard of samples is a run of whole batches. Some tasks ask a block of members each, another lays their answers
side by side and settles them where they are; the tables travel between the cluster's nodes, never to the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plateaux.config.builders.data import eval_batches
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.callbacks import Seen, nothing
from plateaux.core.metric import Metric
from plateaux.core.outputs import OutputFn
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.distributed.executors.ray import RayExecutor
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.metric_loop import BatchOutputs, MemberSubset, accumulate, run_members
from plateaux.evaluation.splits import EvalSplit
from plateaux.storage.run import Run

TABLE = 64 << 20  # bytes of all members' answers about one shard
AHEAD = 2  # shards under way for every place of the cluster

Settled = dict[tuple[MemberSubset | None, str], TensorTree]


@dataclass(frozen=True, slots=True)
class EvalShard:
    """Some members and some samples to ask them about: a part of a measurement that any process can carry out."""

    members: tuple[int, ...]
    start: int  # the first sample, by its place in the walk
    stop: int

    def __str__(self) -> str:
        who = ("member " if len(self.members) == 1 else "members ") + ", ".join(map(str, self.members))
        return f"ask {who} about samples {self.start:,} to {self.stop:,}"


def eval_shards(members: Sequence[int], samples: int, *, block: int, size: int) -> Iterator[list[EvalShard]]:
    """Cut members x samples into shards: for every run of `size` samples one shard for each `block` members."""
    blocks = [tuple(members[i : i + block]) for i in range(0, len(members), block)]
    for start in range(0, samples, size):
        yield [EvalShard(some, start, min(start + size, samples)) for some in blocks]


@dataclass(frozen=True)
class EvalTask:
    """What a process of the cluster must know to ask members about samples; it travels once."""

    root: str
    target: EvalSplit
    measures: Mapping[str, Metric]
    subsets: tuple[MemberSubset, ...]
    components: Components = NO_COMPONENTS
    samples: int | None = None  # only the first so many

    @property
    def offers(self) -> list[OutputFn]:
        return list(dict.fromkeys(measure.output for measure in self.measures.values()))


class RayEvaluator(Evaluator):
    """Members of a run that are asked by the processes of a cluster; answers that are kept need no cluster."""

    def accumulate(
        self,
        target: EvalSplit,
        measures: Mapping[str, Metric],
        casts: Sequence[MemberSubset],
        *,
        samples: int | None = None,
        fresh: bool = False,
        seen: Seen = nothing,
    ) -> tuple[Settled, dict[str, Any]]:
        assert isinstance(self.executor, RayExecutor)
        if not fresh and self.caches(target, measures, samples):
            return super().accumulate(target, measures, casts, samples=samples, seen=seen)
        known, ids = self.opened(target, samples)
        question = EvalTask(
            str(self.run.store.root), target, measures, tuple(casts), self.components, target.limit or samples
        )
        merged: Settled = {}
        done = 0
        for shard, found in self.executor.map_reduce(self._shards(len(ids)), predict_shard, reduce_shard, question):
            merge(merged, found, measures, shard, len(ids))
            done += shard.stop - shard.start
            seen(done, len(ids))
        return merged, {**known, "samples": len(ids), "logits": "fresh, on a cluster"}

    def _shards(self, samples: int) -> list[list[EvalShard]]:
        """Cut so that every place has work, tables stay small, and samples are read by few."""
        assert isinstance(self.executor, RayExecutor)
        batch = max(self.recipe.data.batch_size, 256)
        wanted = AHEAD * self.executor.max_workers()
        room = TABLE // (4 * len(self.numbers) * self.data_info.classes)
        size = max(1, min(room, -(-samples // wanted)) // batch) * batch
        count = -(-samples // size)
        block = -(-len(self.numbers) // min(len(self.numbers), -(-wanted // count)))
        return list(eval_shards(self.numbers, samples, block=block, size=size))


@lru_cache(maxsize=2)
def _panel(root: str, members: tuple[int, ...], components: Components) -> Evaluator:
    return Evaluator(Run.open(root), members, components=components)


def predict_shard(task: EvalTask, shard: EvalShard) -> dict[str, Any]:
    """Return what some members say about some samples: a table for every offer, and the samples' labels and ids."""
    key = task.components if task.components.data is None else NO_COMPONENTS
    panel = (
        _panel(task.root, shard.members, key)
        if key is task.components
        else Evaluator(Run.open(task.root), shard.members, components=task.components)
    )
    source, ids = task.target.open(panel.recipe, panel.data)
    ids = ids[: task.samples][shard.start : shard.stop]
    data, source = panel.ready(source, ids)
    batches = eval_batches(panel.recipe, data, source, ids, device=panel.device)
    heard = list(run_members(SINGLE_PROCESS, panel.modules, batches, task.offers))
    tables = [torch.cat([each.outputs[offer] for each in heard], 1).cpu() for offer in task.offers]
    labels, index = (torch.cat([getattr(each.batch, name) for each in heard]).cpu() for name in ("y", "index"))
    return {"tables": tables, "labels": labels, "index": index, "sizes": [len(each.batch) for each in heard]}


def reduce_shard(task: EvalTask, shard: EvalShard, *said: Mapping[str, Any]) -> Settled:
    """Return what follows from everybody's answers about a shard, as sums, or rows to keep."""
    return accumulate(SINGLE_PROCESS, _laid_down(task, said), task.measures, task.subsets)


def _laid_down(question: EvalTask, said: Sequence[Mapping[str, Any]]) -> Iterator[BatchOutputs]:
    tables = {
        offer: _side_by_side([each["tables"][position] for each in said])
        for position, offer in enumerate(question.offers)
    }
    start = 0
    for size in said[0]["sizes"]:
        part = slice(start, start + size)
        batch = Batch(said[0]["index"][part], said[0]["labels"][part], said[0]["index"][part])
        yield BatchOutputs({offer: table[:, part] for offer, table in tables.items()}, batch, start, size)
        start += size


def _side_by_side(tables: Sequence[Tensor]) -> Tensor:
    """Lay blocks of members under each other; features of different widths are filled up with zeros."""
    width = max(table.shape[-1] for table in tables)
    return torch.cat([F.pad(table, (0, width - table.shape[-1])) for table in tables])


def merge(whole: Settled, found: Settled, measures: Mapping[str, Metric], shard: EvalShard, samples: int) -> None:
    """Add what was found about a shard to what is known of all samples."""
    for (cast, name), tree in found.items():
        if measures[name].reduce == "sum":
            old = whole.get((cast, name))
            whole[cast, name] = tree if old is None else {part: old[part] + tree[part] for part in tree}
            continue
        empty = {part: rows.new_zeros(samples, *rows.shape[1:]) for part, rows in tree.items()}
        laid = whole.setdefault((cast, name), empty)
        for part, rows in tree.items():
            laid[part][shard.start : shard.stop] = rows
