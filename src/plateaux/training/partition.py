"""Data partition: members store the sharpness of the samples, samples are assigned, and members read their sets.

sharpness/<epoch>/<member>.safetensors    one score per training sample; negative: the member does not train on it
sam_sets/<epoch>/<member>.safetensors     one bit per training sample: whether the member applies SAM to it
sam_sets/<epoch>/summary.json             fractions, overlaps, rank correlations; written last, so it marks completion
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from plateaux.config.builders.data import eval_batches
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DivergedError, Interrupted, RunError
from plateaux.core.executor import Collectives, all_reduce_max
from plateaux.core.member import MemberModule
from plateaux.core.method import AssignFn, DataPartition
from plateaux.core.progress import MemberUpdate, Message, Progress, SamplesPartitioned, log_messages
from plateaux.core.types import Batch, derive_seed
from plateaux.data.partition.masks import lookup, write_sam_sets
from plateaux.data.sources import DataSplits
from plateaux.models.modes import eval_mode
from plateaux.optim.grad_norms import max_batch_size
from plateaux.storage.run import Run, partition_summary_path, sam_set_path, sharpness_path
from plateaux.storage.store import Store
from plateaux.training.jobs import PartitionStatus
from plateaux.training.loop.state import TrainState

CHUNK_SAMPLES = 1 << 18  # samples of one member in memory while samples are assigned
MAX_SCORING_BYTES = 1 << 30  # memory for scoring one batch
EVENT_INTERVAL_S = 0.5


def partition_statuses(run: Run, partition: DataPartition | None) -> list[PartitionStatus]:
    """Return the status of every data partition of a run, read from its folder."""
    return [_partition_status(run, epoch) for epoch in partition.after] if partition is not None else []


def _partition_status(run: Run, epoch: int) -> PartitionStatus:
    members = range(run.recipe.members)
    scored = frozenset(number for number in members if run.store.has_recorded(sharpness_path(epoch, number)))
    if not run.store.has(partition_summary_path(epoch)):
        return PartitionStatus(epoch, scored)
    summary = run.partition_summary(partition_summary_path(epoch))
    return PartitionStatus(epoch, scored, summary.members, frozenset(summary.without))


@dataclass(frozen=True, slots=True)
class SharpnessScorer:
    """Scores the training samples for members that have reached a data partition."""

    run: Run
    data: DataSplits
    ids: Tensor  # of the training samples
    executor: Collectives
    device: torch.device
    progress: Progress = log_messages
    is_stopped: Callable[[], bool] = lambda: False  # called after every batch; equal in all processes

    def score(self, states: Sequence[TrainState], epoch: int) -> None:
        """Write the scores of members to the run folder, except those that are stored already."""
        pending = [state for state in states if not self.run.store.has_recorded(sharpness_path(epoch, state.number))]
        if not all_reduce_max(self.executor, int(bool(pending))):
            return
        numbers = ", ".join(str(state.number) for state in pending)
        self.progress(
            Message(f"scoring {len(self.ids):,} samples for the data partition after epoch {epoch}: member {numbers}")
        )
        scores = {state.number: np.full(len(self.data.train), -1.0, dtype=np.float32) for state in pending}
        start_time, done, last_event = time.monotonic(), 0, 0.0
        with eval_mode([state.module for state in pending]):
            for ids, batch in self._batches():
                for state in pending:
                    scores[state.number][ids] = self._score_batch(state, ids, batch)
                done += len(ids)
                if (now := time.monotonic()) - last_event > EVENT_INTERVAL_S:
                    last_event = now
                    seconds_left = (len(self.ids) - done) * (now - start_time) / done
                    self._send_progress(pending, epoch, done / len(self.ids), seconds_left)
                if self.is_stopped():
                    raise Interrupted(
                        f"Stopped while scoring samples at epoch {epoch}, after a checkpoint. "
                        "Run the same command again to resume"
                    )
        for state in pending:
            self._write(state, epoch, scores[state.number])

    def _send_progress(self, states: Sequence[TrainState], epoch: int, scored: float, seconds_left: float) -> None:
        epochs = self.run.recipe.train.epochs
        for state in states:
            self.progress(
                MemberUpdate(state.number, epochs=epochs, epoch=epoch, scored=scored, seconds_left=seconds_left)
            )

    def _batches(self) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Yield the training samples in order, without augmentation: ids of a full batch, and this process's share."""
        recipe, tuned = self.run.recipe, self.run.info.autotune
        assert tuned is not None
        assert tuned.scoring_batch is not None
        size = tuned.scoring_batch
        batches = eval_batches(
            recipe, self.data, self.data.train, self.ids, batch_size=size, device=self.device, shard=self.executor.shard
        )
        for ids, batch in zip(torch.split(self.ids.cpu(), size), batches, strict=True):
            yield ids.numpy(), batch

    def _score_batch(self, state: TrainState, ids: NDArray[np.int64], batch: Batch) -> NDArray[np.float32]:
        """Return the scores of one member for a full batch, summed over the processes that share it."""
        assert state.method.partition is not None
        full = torch.zeros(len(ids), dtype=torch.float64, device=self.device)
        if len(batch):
            own = state.method.partition.output(MemberModule(state.module, own=state.params), batch)
            full[self.executor.shard(len(ids))] = own.detach().double()
        scores = self.executor.all_reduce({"scores": full})["scores"].float().cpu().numpy()
        if not np.isfinite(scores).all():
            sample = int(ids[~np.isfinite(scores)][0])
            raise DivergedError(
                f"The score of member {state.number} for sample {sample} is NaN or infinite. Lower optimizer.lr, or "
                "inspect the sample"
            )
        return scores

    def _write(self, state: TrainState, epoch: int, scores: NDArray[np.float32]) -> None:
        if not self.executor.is_writer():
            return
        partition = state.method.partition
        assert partition is not None
        metadata = {
            **_data_metadata(self.run, epoch),
            "member": str(state.number),
            "score": str(partition.metadata.get("score")),
        }
        name = sharpness_path(epoch, state.number)
        with self.run.store.array_writer(name, np.float32, len(scores), metadata) as write:
            write(scores)


def scoring_batch(recipe: Recipe, data: DataSplits, module: nn.Module) -> int:
    """Return the batch size for scoring: the largest that fits into MAX_SCORING_BYTES."""
    batch = next(eval_batches(recipe, data, data.train, torch.arange(min(2, len(data.train))), batch_size=2))
    with eval_mode([module]):
        return max_batch_size(MemberModule(module), batch, bound=MAX_SCORING_BYTES)


@dataclass(frozen=True, slots=True)
class StoredScores:
    """The scores of all members, read from stored arrays in chunks."""

    store: Store
    names: Sequence[str]  # of the arrays, one per member
    samples: int
    seed: int

    @property
    def members(self) -> int:
        return len(self.names)

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        for rows in zip(*(self.store.iter_array(name, CHUNK_SAMPLES) for name in self.names), strict=True):
            yield np.stack(rows)

    def write_sets(self, assign: AssignFn, files: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        """Assign the samples, write the set of every member to a file with metadata, and return the summary."""
        length = -(-self.samples // 8)
        with ExitStack() as stack:
            writers = [
                stack.enter_context(self.store.array_writer(name, np.uint8, length, metadata))
                for name, metadata in files.items()
            ]
            return write_sam_sets(self, assign, writers)


def assign_samples(
    run: Run,
    partition: DataPartition,
    epoch: int,
    progress: Progress = log_messages,
    *,
    members: Sequence[int] | None = None,
) -> None:
    """Assign the samples to the SAM sets of members, using the scores in the run folder, and store the sets.

    If `members` lacks some, the others continue without them permanently; the summary names them.
    """
    all_members, samples = range(run.recipe.members), run.info.data.train.samples
    members = all_members if members is None else members
    for member in members:
        _load_array(run, sharpness_path(epoch, member), samples)
    names = [sharpness_path(epoch, member) for member in members]
    scores = StoredScores(run.store, names, samples, derive_seed(run.recipe.seed, "meeting", epoch))
    metadata = {**_data_metadata(run, epoch), **{name: str(value) for name, value in partition.metadata.items()}}
    files = {sam_set_path(epoch, member): {**metadata, "member": str(member)} for member in members}
    summary = scores.write_sets(partition.assign, files)
    without = sorted(set(all_members) - set(members))
    run.store.put_json(
        partition_summary_path(epoch),
        {
            "members": len(all_members),
            **({"without": without} if without else {}),
            "epoch": epoch,
            **partition.metadata,
            **summary,
        },
    )
    shares = ", ".join(f"{100 * (share or 0):.1f} %" for share in summary["share"])
    text = f" (permanently without {', '.join(f'member {number}' for number in without)})" if without else ""
    progress(SamplesPartitioned(epoch))
    progress(Message(f"data partition after epoch {epoch}{text}: members apply SAM to {shares} of the samples"))


def load_sam_set(
    run: Run, partition: DataPartition | None, member: int, epoch: int
) -> Callable[[Tensor], Tensor] | None:
    """Return the SAM set of a member after `epoch` epochs, as a function of sample ids; None before the first one."""
    partitions = [after for after in partition.after if after <= epoch] if partition is not None else []
    if not partitions:
        return None
    samples = run.info.data.train.samples
    bits = _load_array(run, sam_set_path(partitions[-1], member), -(-samples // 8))
    return partial(lookup, bits)


def _data_metadata(run: Run, epoch: int) -> dict[str, str]:
    train = run.info.data.train
    return {"fingerprint": train.fingerprint, "samples": str(train.samples), "epoch": str(epoch)}


def _load_array(run: Run, name: str, length: int) -> NDArray[Any]:
    """Return a stored array as a memory map; raise RunError if it belongs to other samples."""
    metadata, values = run.store.get_array(name)
    fingerprint = run.info.data.train.fingerprint
    if metadata.get("fingerprint") != fingerprint or len(values) != length:
        raise RunError(
            f"{run.store.root / name} belongs to other samples: data fingerprint {metadata.get('fingerprint')}, "
            f"{len(values)} entries; this run has {fingerprint}, {length} entries. Restore the file of this run, or "
            "start again with another --out"
        )
    return values
