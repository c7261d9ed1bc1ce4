"""Evaluation on a Ray cluster: members x samples are predicted in shards, and only sums return to the driver.

A shard of samples is a range of whole batches. Some tasks run a block of members each; another stacks their outputs
and accumulates the metrics on the node where the outputs are. Logits move between nodes, never to the driver.
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
from plateaux.core.metric import Metric
from plateaux.core.outputs import OutputFn
from plateaux.core.progress import Progress, WorkDone, log_messages
from plateaux.core.types import Batch, TensorTree
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.distributed.executors.ray import RayExecutor
from plateaux.evaluation.class_mask import mask_classes
from plateaux.evaluation.evaluator import Evaluator, RunSums
from plateaux.evaluation.finite import require_finite
from plateaux.evaluation.metric_loop import BatchOutputs, MemberSubset, accumulate, run_members
from plateaux.evaluation.options import EvalOptions
from plateaux.evaluation.splits import EvalSplit
from plateaux.storage.run import Run

MAX_SHARD_BYTES = 64 << 20  # of all members' outputs for one shard
SHARDS_PER_WORKER = 2  # in flight


@dataclass(frozen=True, slots=True)
class EvalShard:
    """Some members and a range of samples: a part of an evaluation that any worker can run."""

    members: tuple[int, ...]
    start: int  # position of the first sample
    stop: int

    def __str__(self) -> str:
        members = ("member " if len(self.members) == 1 else "members ") + ", ".join(map(str, self.members))
        return f"predict samples {self.start:,} to {self.stop:,} with {members}"


def eval_shards(members: Sequence[int], samples: int, *, block: int, size: int) -> Iterator[list[EvalShard]]:
    """Split members x samples into shards: for every `size` samples, one shard for each `block` members."""
    blocks = [tuple(members[i : i + block]) for i in range(0, len(members), block)]
    for start in range(0, samples, size):
        yield [EvalShard(some, start, min(start + size, samples)) for some in blocks]


@dataclass(frozen=True)
class EvalTask:
    """What a worker needs to run members on samples; sent to each worker once."""

    root: str
    split: EvalSplit
    metrics: Mapping[str, Metric]
    subsets: tuple[MemberSubset, ...]
    components: Components = NO_COMPONENTS
    limit: int | None = None  # only the first N samples

    @property
    def outputs(self) -> list[OutputFn]:
        return list(dict.fromkeys(metric.output for metric in self.metrics.values()))


class RayEvaluator(Evaluator):
    """Evaluates a run on a Ray cluster. Cached logits are read without the cluster."""

    def accumulate(
        self,
        split: EvalSplit,
        metrics: Mapping[str, Metric],
        subsets: Sequence[MemberSubset],
        *,
        progress: Progress = log_messages,
    ) -> tuple[RunSums, dict[str, Any]]:
        assert isinstance(self.executor, RayExecutor)
        if not self.options.no_cache and self.is_cached(split, metrics):
            return super().accumulate(split, metrics, subsets, progress=progress)
        metadata, ids = self.open_ids(split)
        limit = split.limit or self.options.limit
        task = EvalTask(str(self.run.store.root), split, metrics, tuple(subsets), self.components, limit)
        total: RunSums = {}
        done = 0
        for shard, sums in self.executor.map_reduce(self._shards(len(ids)), predict_shard, reduce_shard, task):
            merge(total, sums, metrics, shard, len(ids))
            done += shard.stop - shard.start
            progress(WorkDone(done, len(ids)))
        return total, {**metadata, "samples": len(ids), "logits": "computed on a cluster"}

    def _shards(self, samples: int) -> list[list[EvalShard]]:
        """Choose shards so that every worker is busy, outputs stay small, and few workers read the same samples."""
        assert isinstance(self.executor, RayExecutor)
        batch = max(self.recipe.data.batch_size, 256)
        wanted = SHARDS_PER_WORKER * self.executor.max_workers()
        max_samples = MAX_SHARD_BYTES // (4 * len(self.numbers) * self.data_info.classes)
        size = max(1, min(max_samples, -(-samples // wanted)) // batch) * batch
        count = -(-samples // size)
        block = -(-len(self.numbers) // min(len(self.numbers), -(-wanted // count)))
        return list(eval_shards(self.numbers, samples, block=block, size=size))


@lru_cache(maxsize=2)
def _cached_evaluator(root: str, members: tuple[int, ...], components: Components) -> Evaluator:
    return _evaluator(root, members, components)


def _evaluator(root: str, members: tuple[int, ...], components: Components) -> Evaluator:
    return Evaluator(Run.open(root), components=components, options=EvalOptions(members=members))


def predict_shard(task: EvalTask, shard: EvalShard) -> dict[str, Any]:
    """Return the outputs of some members for some samples, with the samples' labels and ids."""
    load = _cached_evaluator if task.components.data is None else _evaluator  # data in memory are not kept on workers
    evaluator = load(task.root, shard.members, task.components)
    source, ids = task.split.open(evaluator.recipe, evaluator.data)
    ids = ids[: task.limit][shard.start : shard.stop]
    data, source = evaluator.model_inputs(source, ids)
    batches = eval_batches(evaluator.recipe, data, source, ids, device=evaluator.device)
    outputs_by_batch = run_members(SINGLE_PROCESS, evaluator.modules, batches, task.outputs)
    stream = list(mask_classes(outputs_by_batch, task.split.classes))
    outputs = [torch.cat([batch.outputs[output] for batch in stream], 1).cpu() for output in task.outputs]
    labels = torch.cat([batch.batch.y for batch in stream]).cpu()
    ids = torch.cat([batch.batch.index for batch in stream]).cpu()
    sizes = [len(batch.batch) for batch in stream]
    return {"outputs": outputs, "labels": labels, "ids": ids, "sizes": sizes, "members": shard.members}


def reduce_shard(task: EvalTask, shard: EvalShard, *blocks: Mapping[str, Any]) -> RunSums:
    """Return the metrics' sums for a shard, from the outputs of all blocks of members."""
    numbers = [number for block in blocks for number in block["members"]]
    hint = "Evaluate without a cluster to see whether the weights or the inputs are the cause"
    stream = require_finite(_stack_blocks(task, blocks), SINGLE_PROCESS, numbers, task.split.name, lambda _: hint)
    return accumulate(SINGLE_PROCESS, stream, task.metrics, task.subsets)


def _stack_blocks(task: EvalTask, blocks: Sequence[Mapping[str, Any]]) -> Iterator[BatchOutputs]:
    stacked = {
        output: _stack_padded([block["outputs"][position] for block in blocks])
        for position, output in enumerate(task.outputs)
    }
    ids, labels = blocks[0]["ids"], blocks[0]["labels"]
    start = 0
    for size in blocks[0]["sizes"]:
        part = slice(start, start + size)
        batch = Batch(ids[part], labels[part], ids[part])
        yield BatchOutputs({output: values[:, part] for output, values in stacked.items()}, batch, start, size)
        start += size


def _stack_padded(blocks: Sequence[Tensor]) -> Tensor:
    """Concatenate blocks of members; features of different widths are padded with zeros."""
    width = max(block.shape[-1] for block in blocks)
    return torch.cat([F.pad(block, (0, width - block.shape[-1])) for block in blocks])


def merge(total: RunSums, sums: RunSums, metrics: Mapping[str, Metric], shard: EvalShard, samples: int) -> None:
    """Add the sums of one shard to the total."""
    for (subset, name), tree in sums.items():
        if metrics[name].reduce == "sum":
            old: TensorTree | None = total.get((subset, name))
            total[subset, name] = tree if old is None else {part: old[part] + tree[part] for part in tree}
            continue
        empty = {part: rows.new_zeros(samples, *rows.shape[1:]) for part, rows in tree.items()}
        stored = total.setdefault((subset, name), empty)
        for part, rows in tree.items():
            stored[part][shard.start : shard.stop] = rows
