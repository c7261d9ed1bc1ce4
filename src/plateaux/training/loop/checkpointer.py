"""Write checkpoints and final weights of the members of a job to the run folder, and load checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch

from plateaux.config.builders.data import bn_update_batches
from plateaux.config.builders.model import member_state_dict, shared_param_names
from plateaux.config.recipe import Recipe, diff
from plateaux.core import tensor_tree
from plateaux.core.errors import RunError
from plateaux.core.executor import Collectives
from plateaux.core.member import Forward, at_params
from plateaux.core.method import Method
from plateaux.core.runtime import autocast
from plateaux.core.types import Inputs
from plateaux.data.sources import DataSplits
from plateaux.models.modes import update_bn
from plateaux.storage.member_writer import MemberWriter
from plateaux.storage.run import MemberProgress, Run
from plateaux.training.jobs import Job
from plateaux.training.loop.epoch_stats import EpochStats, to_plain
from plateaux.training.loop.sequential import warm_start
from plateaux.training.loop.state import GradScaler, TrainState


class Checkpointer:
    """Saves and loads the state of members; a checkpoint is valid once `progress.json` names it."""

    def __init__(
        self,
        run: Run,
        writers: Mapping[int, MemberWriter],
        data: DataSplits,
        job: Job,
        method: Method,
        executor: Collectives,
        device: torch.device,
    ) -> None:
        self.run, self.writers, self.data, self.job, self.method, self.executor = (
            run,
            writers,
            data,
            job,
            method,
            executor,
        )
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
        writer, is_joint, partition = self.writers[member.state.number], self.method.is_joint, self.method.partition
        part = writer.put_log(member.progress, member.lines)
        member.lines = []
        member.progress = replace(member.progress, log_parts=(*member.progress.log_parts, part))
        with self.resident(member.state):
            state = state_dict(member.state)
            state["epoch"] = (member.loss, member.correct, member.samples)
            state["progress"] = to_plain(member.progress)
            name = writer.put_state(member.progress, state)
        # Joint members keep one more checkpoint, so that there is one that all members have.
        older = member.progress.checkpoints[-1:] if is_joint else ()
        at_partition = partition is not None and (epoch, step) == (partition.after[0], 0)
        member.progress = replace(
            member.progress,
            checkpoints=(*older, (epoch, step, name)),
            partition_checkpoint=name if at_partition else member.progress.partition_checkpoint,
        )
        writer.commit(member.progress)
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
            return self.writers[state.number].put_weights(member_weights(self.recipe, state), epoch=epoch, best=best)

    def finish(self, member: EpochStats, stop_reason: str) -> None:
        """Write the final weights, and mark the member as finished."""
        progress = member.progress
        if self.recipe.train.select == "last" or progress.best_epoch is None:
            name = self.put_weights(member.state, progress.epoch)
            source = f"{describe_weights(member.state, progress.epoch)}, the last"
        elif self.executor.is_writer():
            assert progress.weights is not None
            writer = self.writers[member.state.number]
            name = writer.put_weights(writer.get_weights(progress.weights), epoch=progress.best_epoch)
            source = progress.weights_source.removesuffix(" so far")
        if self.executor.is_writer():
            finished = replace(progress, finished=True, weights=name, weights_source=source, stop_reason=stop_reason)
            self.writers[member.state.number].commit(finished, release=True)


def state_dict(state: TrainState) -> dict[str, Any]:
    """Return everything that is needed to resume a member exactly."""
    state.sync_lr()
    scheduler = state.lr_scheduler if state.shared_lr_scheduler is None else state.shared_lr_scheduler.lr_scheduler
    return {
        "params": {name: param.detach() for name, param in state.params.items()},
        "buffers": dict(state.buffers),
        "optimizer": state.optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
        "scaler": asdict(state.scaler) if state.scaler is not None else None,
        "average": state.average.state_dict() if state.average is not None else None,
    }


@torch.no_grad()
def load_state_dict(state: TrainState, stored: dict[str, Any]) -> None:
    """Load what `state_dict` returned; a checkpoint of another architecture is an error."""
    _check_same_shapes(state, stored)
    for name, param in state.params.items():
        param.copy_(stored["params"][name])
    _check_masks(state)
    for name, buffer in state.buffers.items():
        buffer.copy_(stored["buffers"][name])
    state.optimizer.load_state_dict(stored["optimizer"])
    if state.lr_scheduler is not None:
        state.lr_scheduler.load_state_dict(stored["lr_scheduler"])
    if state.shared_lr_scheduler is not None:
        state.shared_lr_scheduler.restore(state.optimizer, stored["lr_scheduler"])
    if state.scaler is not None:
        state.scaler = GradScaler(**stored["scaler"])
    if state.average is not None:
        state.average.load_state_dict(stored["average"], next(iter(state.params.values())).device)


def _check_masks(state: TrainState) -> None:
    """Raise an error if weights outside the masks are live: training would set them to zero without a notice."""
    pruned = [name for name, mask in state.masks.items() if bool((state.params[name] * ~mask).any())]
    if pruned:
        raise RunError(
            f"The checkpoint of member {state.number} was pruned by another rule: {pruned[0]} has live weights where "
            "this version prunes. Resume with the version that started the run, or start again with another --out"
        )


def _check_same_shapes(state: TrainState, stored: dict[str, Any]) -> None:
    """Raise RunError if the weights of a checkpoint are not those of the model."""
    for kind, own in (("params", state.params), ("buffers", state.buffers)):
        old = {name: list(tensor.shape) for name, tensor in stored[kind].items()}
        new = {name: list(tensor.shape) for name, tensor in own.items()}
        changes = diff(old, new)
        if changes:
            shown = "\n  ".join([*changes[:10], *([f"... and {len(changes) - 10} more"] if len(changes) > 10 else [])])
            raise RunError(
                f"The checkpoint of member {state.number} belongs to another architecture. Shapes (checkpoint -> "
                f"model):\n  {shown}\nPass the model that the run was started with, or choose another --out"
            )


def member_weights(recipe: Recipe, state: TrainState) -> dict[str, torch.Tensor]:
    """Return the weights that are stored in a member's file: those that it does not share with other members."""
    return member_state_dict(state.module, shared_param_names(recipe, state.module))


@contextmanager
def averaged_params(
    state: TrainState, batches: Callable[[], Iterable[Inputs]], forward: Forward = nullcontext
) -> Iterator[None]:
    """Temporarily set a member to its averaged weights (SWA), with BatchNorm statistics computed from batches.

    Averaged weights produce other activations than those seen in training.
    """
    average = state.average
    if average is None or not average.count:
        yield
        return
    params = {name: average.tree[name] for name in state.params}
    with at_params(state.params, params, buffers=state.buffers):
        tensor_tree.write(state.buffers, {**state.buffers, **average.tree})
        update_bn(state.module, batches(), forward)
        yield


def describe_weights(state: TrainState, epoch: int) -> str:
    """Return which weights of a member are used after this number of epochs, for the log."""
    count = 0 if state.average is None else state.average.count
    return f"epoch {epoch}, the mean of the last {count} steps" if count else f"epoch {epoch}"
