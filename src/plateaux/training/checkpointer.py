"""Write checkpoints and final weights of the members of a job to the run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from plateaux.config.builders.data import bn_update_batches
from plateaux.core.executor import Collectives
from plateaux.core.method import Method
from plateaux.core.runtime import autocast
from plateaux.data.sources import DataSplits
from plateaux.storage.run import MemberProgress, Run
from plateaux.training.averaged_weights import averaged_params, describe_weights
from plateaux.training.checkpoint import load_state_dict, member_weights, state_dict
from plateaux.training.epoch_stats import EpochStats, to_plain
from plateaux.training.jobs import Job
from plateaux.training.sequential import warm_start
from plateaux.training.state import TrainState


class Checkpointer:
    """Saves and loads the state of members; a checkpoint is valid once `progress.json` names it."""

    def __init__(
        self, run: Run, data: DataSplits, job: Job, method: Method, executor: Collectives, device: torch.device
    ) -> None:
        self.run, self.data, self.job, self.method, self.executor = run, data, job, method, executor
        self.recipe, self.device = run.recipe, device
        # Loads an offloaded member; the trainer replaces it if members are offloaded.
        self.resident: Callable[[TrainState], AbstractContextManager[Any]] = lambda _: nullcontext()
        self.last_save = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the recipe's interval in minutes has passed since the last checkpoint."""
        minutes = self.recipe.run.checkpoint_every_minutes
        return minutes is not None and time.monotonic() - self.last_save > 60 * minutes

    def resume(self, member: EpochStats) -> EpochStats:
        """Load the state of a member at the start of the job; log parts that were written later are dropped."""
        start = self.job.start
        if start == (0, 0):
            member.progress = MemberProgress(seconds=member.progress.seconds)
            if self.method.member_order == "chained" and member.state.number:
                warm_start(member.state, self.run)
            return member
        names = {(epoch, step): name for epoch, step, name in member.progress.checkpoints}
        state = self.run.get_state(member.state.number, names[start])
        load_state_dict(member.state, state)
        member.loss, member.correct, member.samples = state["epoch"]
        # Later checkpoints belong to an attempt in which other members of the group did not get as far.
        checkpoints = tuple(checkpoint for checkpoint in member.progress.checkpoints if checkpoint[:2] <= start)
        progress = {
            **state["progress"],
            "log_parts": tuple(state["progress"]["log_parts"]),
            "partition_checkpoint": member.progress.partition_checkpoint,
            "digests": member.progress.digests,
        }
        member.progress = MemberProgress(**{**progress, "checkpoints": checkpoints, "seconds": member.progress.seconds})
        return member

    def save(self, members: Sequence[EpochStats], epoch: int, step: int) -> list[EpochStats]:
        """Write the state and the log of members first, then the progress that names them; return those written."""
        now = time.monotonic()
        new = [each for each in members if not any(known[:2] == (epoch, step) for known in each.progress.checkpoints)]
        for member in new:
            seconds = member.progress.seconds + (now - self.last_save) / len(members)
            member.progress = replace(member.progress, epoch=epoch, step=step, seconds=seconds)
            if self.executor.is_writer():
                self._save_one(member, epoch, step)
        self.last_save = now
        return new

    def _save_one(self, member: EpochStats, epoch: int, step: int) -> None:
        number, is_joint, partition = member.state.number, self.method.is_joint, self.method.partition
        part = self.run.put_log(number, member.progress, member.lines)
        member.lines = []
        member.progress = replace(member.progress, log_parts=(*member.progress.log_parts, part))
        with self.resident(member.state):
            state = state_dict(member.state)
            state["epoch"] = (member.loss, member.correct, member.samples)
            state["progress"] = to_plain(member.progress)
            name = self.run.put_state(number, member.progress, state)
        # Joint members keep one more checkpoint, so that there is one that all members have.
        older = member.progress.checkpoints[-1:] if is_joint else ()
        at_partition = partition is not None and (epoch, step) == (partition.after[0], 0)
        member.progress = replace(
            member.progress,
            checkpoints=(*older, (epoch, step, name)),
            partition_checkpoint=name if at_partition else member.progress.partition_checkpoint,
        )
        self.run.commit(number, member.progress)
        member.progress = replace(member.progress, previous_weights=member.progress.weights if is_joint else None)

    @contextmanager
    def weights_in_use(self, state: TrainState) -> Iterator[None]:
        """Load a member and set it to the weights that are used for predictions: averaged weights if it has them."""
        precision, shard = self.recipe.train.precision, self.executor.shard
        with (
            self.resident(state),
            averaged_params(
                state,
                lambda: bn_update_batches(self.recipe, self.data, self.device, shard),
                lambda: autocast(precision, self.device),
            ),
        ):
            yield

    def put_weights(self, state: TrainState, epoch: int, *, best: bool = False) -> str | None:
        """Write the weights for predictions, if this process is the writer; all processes update BatchNorm."""
        with self.weights_in_use(state):
            if not self.executor.is_writer():
                return None
            return self.run.put_weights(state.number, member_weights(self.recipe, state), epoch=epoch, best=best)

    def finish(self, member: EpochStats, stop_reason: str) -> None:
        """Write the final weights, and mark the member as finished."""
        number, progress = member.state.number, member.progress
        if self.recipe.train.select == "last" or progress.best_epoch is None:
            name = self.put_weights(member.state, progress.epoch)
            source = f"{describe_weights(member.state, progress.epoch)}, the last"
        elif self.executor.is_writer():
            assert progress.weights is not None
            weights = self.run.store.get_tensors(progress.weights, self.run.digest(number, progress.weights))
            name = self.run.put_weights(number, weights, epoch=progress.best_epoch)
            source = progress.weights_source.removesuffix(" so far")
        if self.executor.is_writer():
            finished = replace(progress, finished=True, weights=name, weights_source=source, stop_reason=stop_reason)
            self.run.commit(number, finished)
