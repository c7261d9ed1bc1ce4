"""Train the members of one job: epochs, steps, validation, checkpoints, and early stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NoReturn

import torch
from torch import nn

from plateaux.config.builders.data import build_loader, train_val_split, uses_shared_order
from plateaux.config.builders.model import shared_param_names
from plateaux.core.errors import DataError, DivergedError, Interrupted
from plateaux.core.executor import Executor, all_reduce_max
from plateaux.core.progress import Progress
from plateaux.core.types import Batch, Estimate
from plateaux.data.sources import DataSplits
from plateaux.distributed.stop_signal import StopFlag, graceful_shutdown
from plateaux.loss_landscape.callback import ProbeCallback
from plateaux.storage.member_writer import MemberWriter
from plateaux.storage.run import Run
from plateaux.training.jobs import Job
from plateaux.training.loop.checkpointer import Checkpointer, describe_weights
from plateaux.training.loop.epoch_stats import EpochStats
from plateaux.training.loop.metric_logger import MetricLogger
from plateaux.training.loop.offload import offload_to_disk
from plateaux.training.loop.sequential import frozen_outputs
from plateaux.training.loop.setup import build_train_states, shared_lr_schedulers
from plateaux.training.loop.state import INACTIVE, StepOptions
from plateaux.training.loop.step import step
from plateaux.training.loop.validation import validate_member, validation_metrics
from plateaux.training.partition import SharpnessScorer, load_sam_set

CONTINUE, SAVE, STOP = 0, 1, 2  # requests of a process between two steps; the maximum over all processes wins


class Trainer:
    """Trains the members of a job in lockstep, from its start to its stop."""

    def __init__(
        self,
        run: Run,
        data: DataSplits,
        job: Job,
        local_members: list[int],
        writers: Mapping[int, MemberWriter],
        executor: Executor,
        device: torch.device,
        progress: Progress,
        *,
        finished_members: Sequence[nn.Module] = (),
    ) -> None:
        self.run, self.data, self.job, self.executor, self.progress = run, data, job, executor, progress
        self.recipe, self.device = run.recipe, device
        self.train_ids, self.valid_ids = train_val_split(self.recipe, data)
        self.metrics = validation_metrics(self.recipe.train.select)
        self.probe_callback = ProbeCallback(self.recipe, data, self.train_ids, device, run.components)
        self.method = run.experiment.method()
        self.finished_members = finished_members  # whose outputs are part of the loss of sequential methods
        self.diverged: list[DivergedError] = []  # errors of members that diverged while the others continue
        self.checkpointer = Checkpointer(run, writers, data, job, self.method, executor, device)
        self.members = self._build_members(local_members)
        self.logger = MetricLogger(run, job, progress)
        self.checkpointer.last_save = time.monotonic()  # building the members is not part of their training time

    def _build_members(self, numbers: list[int]) -> list[EpochStats]:
        shared_loader = build_loader(self.recipe, self.data, 0, shared=True, device=self.device, ids=self.train_ids)
        self.steps = shared_loader.steps()
        states = build_train_states(
            self.run.experiment, self.data, numbers, self.executor, device=self.device, steps=self.steps
        )
        self.shared_lr_schedulers = shared_lr_schedulers(states)
        if self.job.stop > self.job.start[0]:
            for state in states:
                state.sam_set = load_sam_set(self.run, self.method.partition, state.number, self.job.start[0])
        is_shared = uses_shared_order(self.recipe, self.method)
        members = []
        for state in states:
            loader = shared_loader
            if not is_shared:
                number, ids = state.number, self.train_ids
                loader = build_loader(self.recipe, self.data, number, shared=False, device=self.device, ids=ids)
            members.append(self.checkpointer.resume(EpochStats(state, loader, self.run.progress(state.number))))
        if members and self.executor.is_writer():
            names = shared_param_names(self.recipe, members[0].state.module)
            tensors = members[0].state.module.state_dict()
            shared = {name: tensors[name] for name in sorted(names & tensors.keys())}
            self.checkpointer.writers[members[0].state.number].put_shared(shared)
        return members

    def fit(self) -> None:
        """Run the job; Ctrl-C and SIGTERM end it with a checkpoint."""
        epoch, first_step = self.job.start
        with graceful_shutdown() as stop, ExitStack() as stack:
            options = self.step_options(stack)
            self._stop_early(epoch)
            # On a mesh, other processes may still train members when none are left here, and collectives need all.
            while epoch < self.job.stop and all_reduce_max(self.executor, int(bool(self.members))):
                self.train_epoch(epoch, first_step, options, stop)
                epoch, first_step = epoch + 1, 0
            for member in self.members:  # before the scratch folder of offloaded members is deleted
                if self.job.stop == self.recipe.train.epochs:
                    self.checkpointer.finish(member, "")
            self._write_sharpness(stop)
            request = self._requested_action(stop)
            if self.diverged:
                raise DivergedError("\n".join(map(str, self.diverged)))
            if request == STOP:
                raise Interrupted("Stopped after this job was completed. Run the same command again to resume")

    def _write_sharpness(self, stop: StopFlag) -> None:
        """Score the training samples if the job ends at a partition epoch."""
        partition = self.method.partition
        if partition is None or self.job.stop not in partition.after:
            return
        scorer = SharpnessScorer(
            self.run,
            self.data,
            self.train_ids,
            self.executor,
            self.device,
            self.progress,
            is_stopped=lambda: self._requested_action(stop) == STOP,
        )
        for group in [[member] for member in self.members] if self.executor.offloads else [self.members]:
            with ExitStack() as resident:
                for member in group:
                    resident.enter_context(self.checkpointer.resident(member.state))
                start_time = time.monotonic()
                scorer.score([member.state for member in group], self.job.stop)
            seconds = (time.monotonic() - start_time) / max(1, len(group))
            for member in group if self.executor.is_writer() else []:
                writer = self.checkpointer.writers[member.state.number]
                writer.commit(replace(writer.progress, seconds=writer.progress.seconds + seconds))

    def step_options(self, stack: ExitStack) -> StepOptions:
        """Return the options of every step; `stack` deletes the scratch folder of offloaded members at the end."""
        options = StepOptions(
            self.recipe.train.precision,
            self.device,
            self.recipe.optimizer.gradient_accumulation_steps,
            members=len(self.job.members),
            shared_lr_schedulers=self.shared_lr_schedulers,
            is_independent=self.method.member_order != "parallel",
        )
        if self.finished_members:
            outputs = frozen_outputs(self.finished_members, self.method.objective.output, self.recipe, self.device)
            options = replace(options, frozen_outputs=outputs)
        if self.executor.offloads and len(self.members) > 1:
            resident = offload_to_disk(stack.enter_context(self.run.store.scratch()))
            options = replace(options, offloads=True, resident=resident)
            for member in self.members:  # also those that are inactive in the first steps
                with options.resident(member.state):
                    pass
        self.checkpointer.resident = options.resident
        return options

    def train_epoch(self, epoch: int, first_step: int, options: StepOptions, stop: StopFlag) -> None:
        """Train every member for one epoch, starting at step `first_step`."""
        streams: dict[int, Iterator[Batch]] = {}
        for member in self.members:
            stream = member.loader.epoch(epoch, start=first_step, shard=self.executor.shard)
            streams.setdefault(id(member.loader), stream)
        size = self.recipe.data.batch_size
        for index in range(first_step, self.steps):
            if self.members:
                states = [member.state for member in self.members]
                batches = self._next_batches(epoch, index, streams, stop)
                total = min(size, len(self.members[0].loader.ids) - index * size)
                results = step(self.executor, states, batches, options, share=len(batches[0]) / total)
                for member, stats, batch in zip(self.members, results, batches, strict=True):
                    if stats is not INACTIVE:
                        member.pending.append((stats, len(batch)))
            self._after_step(epoch, index + 1, stop)
        self._after_epoch(epoch + 1, stop)

    def _next_batches(self, epoch: int, index: int, streams: dict[int, Iterator[Batch]], stop: StopFlag) -> list[Batch]:
        """Return the next batch of every member; members with one loader share its batches."""
        try:
            batches = {key: next(streams[key]) for key in {id(member.loader): None for member in self.members}}
        except DataError:
            if not stop.is_set():
                raise
            self._stop(epoch, index)  # a signal to the process group also ends the workers of the data loader
        return [batches[id(member.loader)] for member in self.members]

    def _after_step(self, epoch: int, done: int, stop: StopFlag) -> None:
        if done % self.recipe.run.log_every == 0 or done == self.steps:
            self._add_up(epoch, done)
            self.logger.log_steps(self.members, epoch, done)
        self.logger.send_progress(self.members, epoch, done, self.steps)
        if done == self.steps:
            return
        request = self._requested_action(stop)
        if request == SAVE:
            self._save(epoch, done)
        if request == STOP:
            self._stop(epoch, done)

    def _requested_action(self, stop: StopFlag) -> int:
        own = STOP if stop.is_set() else SAVE if self.checkpointer.is_due else CONTINUE
        return all_reduce_max(self.executor, own)

    def _save(self, epoch: int, step: int) -> None:
        self._add_up(epoch, step)
        self.logger.send_checkpoints(self.checkpointer.save(self.members, epoch, step), epoch, step)

    def _stop(self, epoch: int, step: int) -> NoReturn:
        self._save(epoch, step)
        raise Interrupted(
            f"Stopped at epoch {epoch}, step {step}, with a checkpoint. Run the same command again to resume"
        )

    def _add_up(self, epoch: int, done: int) -> None:
        """Add up pending losses; remove members that diverged, or raise if others depend on them."""
        may_read = not self.executor.data_size > 1  # else all processes would have to read the batches again
        for member, error in self.logger.add_up(self.members, epoch, done, check_inputs=may_read):
            if self.method.is_joint or self.executor.data_size > 1:  # all processes of a member must stop together
                raise error
            self.diverged.append(error)
            self.members.remove(member)

    def _after_epoch(self, epoch: int, stop: StopFlag) -> None:
        validation = self._validate(epoch)
        is_last = epoch == self.job.stop
        self._run_probes(epoch)
        for shared in self.shared_lr_schedulers:
            if not shared.every_step:
                shared.step()
        for member in list(self.members):
            lr_scheduler = member.state.lr_scheduler
            if lr_scheduler is not None and not member.state.every_step:
                lr_scheduler.step()
            metrics = validation.get(member.state.number, {})
            self.logger.log_epoch(member, epoch, metrics)
            if metrics:
                self._track_best(member, epoch, metrics)
            member.loss, member.correct, member.samples = 0.0, 0.0, 0
            member.progress = replace(member.progress, epoch=epoch, step=0)
        request = self._requested_action(stop)
        if is_last or request != CONTINUE or epoch % self.recipe.run.checkpoint_every_epochs == 0:
            self._save(epoch, 0)
        self._stop_early(epoch)
        if request == STOP and not is_last:
            self._stop(epoch, 0)

    def _validate(self, epoch: int) -> dict[int, dict[str, Estimate]]:
        results: dict[int, dict[str, Estimate]] = {}
        if len(self.valid_ids) and epoch % self.recipe.train.validate_every == 0:
            for member in self.members:
                with self.checkpointer.weights_in_use(member.state):
                    source, ids = member.loader.source, self.valid_ids
                    metrics = validate_member(self.recipe, self.data, source, ids, member.state, self.metrics)
                    results[member.state.number] = metrics
        return results

    def _run_probes(self, epoch: int) -> None:
        for member in self.members if self.probe_callback.due(epoch) else []:
            state = member.state
            with self.checkpointer.resident(state):
                member.lines += self.probe_callback.run(state.module, state.number, epoch)

    def _stop_early(self, epoch: int) -> None:
        """Finish members whose validation metric has not improved for `early_stopping_patience` validations."""
        patience = self.recipe.train.early_stopping_patience
        for member in list(self.members):
            if patience is not None and member.progress.epochs_since_best >= patience and epoch < self.job.stop:
                self.checkpointer.finish(member, f"no improvement for {patience} validations")
                self.members.remove(member)

    def _track_best(self, member: EpochStats, epoch: int, metrics: dict[str, Estimate]) -> None:
        """Save the best weights on validation samples, and count the validations since then."""
        select = self.recipe.train.select
        name = select.removeprefix("best:") if select != "last" else "nll"
        value = metrics[name].value
        sign = 1 if self.metrics[name].higher_is_better else -1
        best = member.progress.best
        if best is not None and not (sign * value > sign * best or math.isnan(best)):  # NaN is never an improvement
            member.progress = replace(member.progress, epochs_since_best=member.progress.epochs_since_best + 1)
            return
        member.progress = replace(member.progress, best=value, best_epoch=epoch, epochs_since_best=0)
        if select != "last":
            stored = self.checkpointer.put_weights(member.state, epoch, best=True)
            source = f"{describe_weights(member.state, epoch)}, the best {name} on validation samples so far"
            member.progress = replace(member.progress, weights=stored, weights_source=source)
