"""A meeting: every member leaves its scores in the run folder, the decision is taken from there, all take notes.

sharpness/<epoch>/<member>.safetensors    one number a training sample; below zero: not trained on
sam_sets/<epoch>/<member>.safetensors     one bit a training sample: whether to be careful about it
sam_sets/<epoch>/summary.json             shares, overlaps, rank correlations; written last: it makes the decision true
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
from plateaux.core.executor import Executor, all_reduce_max
from plateaux.core.member import MemberModule
from plateaux.core.method import DataPartition
from plateaux.core.progress import MemberUpdate, Message, Progress, log_messages
from plateaux.core.types import Batch, derive_seed
from plateaux.data.partition.masks import lookup, write_sam_sets
from plateaux.data.sources import DataSplits
from plateaux.models.modes import eval_mode
from plateaux.optim.grad_norms import max_batch_size
from plateaux.storage.run import Run, partition_summary_path, sam_set_path, sharpness_path
from plateaux.storage.store import Store
from plateaux.training.jobs import PartitionStatus
from plateaux.training.state import TrainState

CHUNK_SAMPLES = 1 << 18  # samples of one member in memory while deciding
MAX_SCORING_BYTES = 1 << 30  # bytes that scoring one batch may take


def partition_statuses(run: Run, partition: DataPartition | None) -> list[PartitionStatus]:
    """Return the meetings of a run as its folder shows them."""
    return [_partition_status(run, epoch) for epoch in partition.after] if partition is not None else []


def _partition_status(run: Run, epoch: int) -> PartitionStatus:
    members = range(run.recipe.members)
    scored = frozenset(n for n in members if run.store.has(sharpness_path(epoch, n)))
    if not run.store.has(partition_summary_path(epoch)):
        return PartitionStatus(epoch, scored)
    summary = run.store.get_json(partition_summary_path(epoch))
    return PartitionStatus(epoch, scored, summary["members"], frozenset(summary.get("without", ())))


@dataclass(frozen=True, slots=True)
class SharpnessScorer:
    """Scores the training samples for members that have come to a meeting."""

    run: Run
    data: DataSplits
    ids: Tensor  # of the training samples
    executor: Executor
    device: torch.device
    progress: Progress = log_messages
    stop: Callable[[], bool] = lambda: False  # asked after every batch: all processes get the same answer

    def score(self, learners: Sequence[TrainState], epoch: int) -> None:
        """Leave the members' scores in the run folder; those that lie there are not made again."""
        todo = [each for each in learners if not self.run.store.has(sharpness_path(epoch, each.number))]
        if not all_reduce_max(self.executor, int(bool(todo))):
            return
        numbers = ", ".join(str(each.number) for each in todo)
        text = f"scoring {len(self.ids):,} samples for the data partition after epoch {epoch}: member {numbers}"
        self.progress(Message(text))
        found = {each.number: np.full(len(self.data.train), -1.0, dtype=np.float32) for each in todo}
        begun, done, told = time.monotonic(), 0, 0.0
        with eval_mode([each.module for each in todo]):
            for ids, batch in self._batches():
                for learner in todo:
                    found[learner.number][ids] = self._scores(learner, ids, batch)
                done += len(ids)
                if (now := time.monotonic()) - told > 0.5:
                    told = now
                    left = (len(self.ids) - done) * (now - begun) / done
                    epochs, scored = self.run.recipe.train.epochs, done / len(self.ids)
                    for learner in todo:
                        update = MemberUpdate(
                            learner.number, epochs=epochs, epoch=epoch, scored=scored, seconds_left=left
                        )
                        self.progress(update)
                if self.stop():
                    raise Interrupted(
                        f"Stopped while scoring at epoch {epoch}, with the checkpoint before it. "
                        "Run the same command again to go on"
                    )
        for learner in todo:
            self._write(learner, epoch, found[learner.number])

    def _batches(self) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Yield the training samples as they are, in the order of their ids: all ids, and what is to be scored here."""
        recipe, tuned = self.run.recipe, self.run.info.autotune
        assert tuned is not None
        assert tuned.scoring_batch is not None
        size = tuned.scoring_batch
        batches = eval_batches(
            recipe, self.data, self.data.train, self.ids, batch_size=size, device=self.device, shard=self.executor.shard
        )
        for ids, batch in zip(torch.split(self.ids.cpu(), size), batches, strict=True):
            yield ids.numpy(), batch

    def _scores(self, learner: TrainState, ids: NDArray[np.int64], batch: Batch) -> NDArray[np.float32]:
        """Return one member's scores of a whole batch, whoever worked on which of its samples."""
        assert learner.method.partition is not None
        whole = torch.zeros(len(ids), dtype=torch.float64, device=self.device)
        if len(batch):
            mine = learner.method.partition.output(MemberModule(learner.module, own=learner.params), batch)
            whole[self.executor.shard(len(ids))] = mine.detach().double()
        scores = self.executor.all_reduce({"scores": whole})["scores"].float().cpu().numpy()
        if not np.isfinite(scores).all():
            bad = int(ids[~np.isfinite(scores)][0])
            raise DivergedError(
                f"Member {learner.number} scores sample {bad} with no number. Try a smaller optimizer.lr, or look at "
                "the sample"
            )
        return scores

    def _write(self, learner: TrainState, epoch: int, found: NDArray[np.float32]) -> None:
        if not self.executor.is_writer():
            return
        rendezvous = learner.method.partition
        assert rendezvous is not None
        about = {
            **_facts(self.run, epoch),
            "member": str(learner.number),
            "score": str(rendezvous.metadata.get("score")),
        }
        name = sharpness_path(epoch, learner.number)
        with self.run.store.array_writer(name, np.float32, len(found), about) as write:
            write(found)


def scoring_batch(recipe: Recipe, data: DataSplits, module: nn.Module) -> int:
    """Return how many samples are scored at once: what BOUND bytes hold."""
    batch = next(eval_batches(recipe, data, data.train, torch.arange(min(2, len(data.train))), batch_size=2))
    with eval_mode([module]):
        return max_batch_size(MemberModule(module), batch, bound=MAX_SCORING_BYTES)


@dataclass(frozen=True, slots=True)
class StoredScores:
    """The scores of all members as they lie in the run folder."""

    store: Store
    epoch: int
    numbers: Sequence[int]
    samples: int
    seed: int

    @property
    def members(self) -> int:
        return len(self.numbers)

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        names = [sharpness_path(self.epoch, number) for number in self.numbers]
        for rows in zip(*(self.store.iter_array(name, CHUNK_SAMPLES) for name in names), strict=True):
            yield np.stack(rows)


def assign_samples(
    run: Run,
    partition: DataPartition,
    epoch: int,
    progress: Progress = log_messages,
    *,
    members: Sequence[int] | None = None,
) -> None:
    """Take the decision of a meeting from the scores in the run folder, and write the notes of all who are there.

    Should some be missing from `members`, the others go on without them, for good; the summary says so.
    """
    everyone, samples = range(run.recipe.members), run.info.data.train.samples
    members = everyone if members is None else members
    for member in members:
        _check(run, sharpness_path(epoch, member), samples)
    scores = StoredScores(run.store, epoch, members, samples, derive_seed(run.recipe.seed, "meeting", epoch))
    about = {**_facts(run, epoch), **{name: str(value) for name, value in partition.metadata.items()}}
    length = -(-samples // 8)
    with ExitStack() as files:
        writers = [
            files.enter_context(
                run.store.array_writer(sam_set_path(epoch, member), np.uint8, length, {**about, "member": str(member)})
            )
            for member in members
        ]
        found = write_sam_sets(scores, partition.assign, writers)
    without = sorted(set(everyone) - set(members))
    lacks = {"without": without} if without else {}
    run.store.put_json(
        partition_summary_path(epoch),
        {"members": len(everyone), **lacks, "epoch": epoch, **partition.metadata, **found},
    )
    shares = ", ".join(f"{100 * (share or 0):.1f} %" for share in found["share"])
    text = f" (permanently without {', '.join(f'member {number}' for number in without)})" if without else ""
    progress(Message(f"data partition after epoch {epoch}{text}: members apply SAM to {shares} of the samples"))


def load_sam_set(
    run: Run, partition: DataPartition | None, member: int, epoch: int
) -> Callable[[Tensor], Tensor] | None:
    """Return the notes a member holds once `epoch` epochs are completed; none before its first meeting."""
    met = [each for each in partition.after if each <= epoch] if partition is not None else []
    if not met:
        return None
    samples = run.info.data.train.samples
    bits = _check(run, sam_set_path(met[-1], member), -(-samples // 8))
    return partial(lookup, bits)


def _facts(run: Run, epoch: int) -> dict[str, str]:
    train = run.info.data.train
    return {"fingerprint": train.fingerprint, "samples": str(train.samples), "epoch": str(epoch)}


def _check(run: Run, name: str, length: int) -> NDArray[Any]:
    """Return an array of a meeting, mapped; refuse one that is about other samples."""
    about, values = run.store.get_array(name)
    mine = _facts(run, 0)["fingerprint"]
    if about.get("fingerprint") != mine or len(values) != length:
        raise RunError(
            f"{run.store.root / name} is about other samples: data fingerprint {about.get('fingerprint')}, "
            f"{len(values)} entries; this run has {mine}, {length} entries. Put back what belongs to this run, or "
            "start again in another --out"
        )
    return values
