"""The course of one job: epochs, steps, validation, checkpoints, and the end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from plateaux.config.builders.data import bn_update_batches, build_loader, train_val_split, uses_shared_order
from plateaux.config.builders.model import shared_param_names
from plateaux.config.builders.training import build_method
from plateaux.config.components import Components
from plateaux.core.callbacks import Tell
from plateaux.core.errors import DataError, DivergedError, Interrupted
from plateaux.core.executor import Executor
from plateaux.core.runtime import autocast
from plateaux.core.types import Batch, Estimate
from plateaux.data.loader import MemberLoader
from plateaux.data.sources import DataSplits
from plateaux.distributed.stop_signal import StopFlag, graceful_shutdown
from plateaux.loss_landscape.callback import ProbeCallback
from plateaux.storage.run import MemberProgress, Run
from plateaux.training.averaged_weights import averaged_params, describe_weights
from plateaux.training.checkpoint import load_state_dict, member_weights, state_dict
from plateaux.training.epoch_stats import EpochStats, to_plain
from plateaux.training.jobs import Job
from plateaux.training.offload import offload_to_disk
from plateaux.training.partition import SharpnessScorer, load_sam_set
from plateaux.training.sequential import frozen_outputs, warm_start
from plateaux.training.setup import build_train_states, shared_lr_schedulers
from plateaux.training.state import INACTIVE, StepOptions, TrainState
from plateaux.training.step import step
from plateaux.training.tensorboard import TensorBoardLogger
from plateaux.training.validation import validate_member, validation_metrics

GO_ON, SAVE, STOP = 0, 1, 2  # what a process may wish between two steps; the strongest wish is everybody's


class Trainer:
    """Takes the members of a job side by side from its start to its stop."""

    def __init__(
        self,
        run: Run,
        data: DataSplits,
        job: Job,
        held: list[int],
        executor: Executor,
        device: torch.device,
        given: Components,
        tell: Tell,
        *,
        earlier: Sequence[nn.Module] = (),
    ) -> None:
        self.run, self.data, self.job, self.executor, self.log = run, data, job, executor, tell
        self.recipe = run.recipe
        self.device = device
        self.train_ids, self.valid_ids = train_val_split(self.recipe, data)
        self.measures = validation_metrics(self.recipe.train.keep)
        self.probe_callback = ProbeCallback(self.recipe, data, self.train_ids, device, trust=given.trust)
        self.method = build_method(self.recipe, 0, given)
        self.is_joint, self.partition_epochs = self.method.is_joint, self.method.partition
        self.earlier = earlier  # members that have finished, and are seen by the one in turn
        self.lost: list[DivergedError] = []  # members that diverged while the others went on
        self.members = self._build_members(held, given)
        self.tensorboard = {
            n: TensorBoardLogger(Path(run.store.root) / "tensorboard" / str(n))
            for n in held
            if self.recipe.run.tensorboard
        }
        self.clock = time.monotonic()  # of the last checkpoint
        self.begun = time.monotonic()
        self.told = 0.0

    def _build_members(self, held: list[int], given: Components) -> list[EpochStats]:
        probe = build_loader(self.recipe, self.data, 0, shared=True, device=self.device, ids=self.train_ids)
        learners = build_train_states(
            self.recipe, self.data, held, self.executor, device=self.device, steps=probe.steps(), given=given
        )
        self.steps, self.paces = probe.steps(), shared_lr_schedulers(learners)
        for learner in learners:
            if self.job.stop > self.job.start[0]:
                learner.sam_set = load_sam_set(self.run, self.partition_epochs, learner.number, self.job.start[0])
        shared = uses_shared_order(self.recipe, self.method)
        runners = []
        for learner in learners:
            feed = probe if shared else self._member_loader(learner.number)
            runners.append(self._resumed(EpochStats(learner, feed, self.run.progress(learner.number))))
        if runners and self.executor.is_writer():
            names = shared_param_names(self.recipe, runners[0].state.module)
            state = runners[0].state.module.state_dict()
            self.run.put_shared({name: state[name] for name in sorted(names & state.keys())})
        return runners

    def _member_loader(self, number: int) -> MemberLoader:
        return build_loader(self.recipe, self.data, number, shared=False, device=self.device, ids=self.train_ids)

    def _resumed(self, runner: EpochStats) -> EpochStats:
        """Put a member where the job starts; a log part written after that place is forgotten."""
        epoch, at = self.job.start
        names = {(e, s): name for e, s, name in runner.progress.checkpoints}
        if (epoch, at) == (0, 0):
            runner.progress = MemberProgress(seconds=runner.progress.seconds)
            if self.method.member_order == "chained" and runner.state.number:
                warm_start(runner.state, self.run)
            return runner
        state = self.run.store.get_state(names[epoch, at])
        load_state_dict(runner.state, state)
        runner.loss, runner.correct, runner.seen = state["epoch"]
        # A state after this place belongs to an attempt that its group could not follow.
        kept = tuple(each for each in runner.progress.checkpoints if each[:2] <= self.job.start)
        progress = {
            **state["progress"],
            "log_parts": tuple(state["progress"]["log_parts"]),
            "partition_checkpoint": runner.progress.partition_checkpoint,
        }
        runner.progress = MemberProgress(**{**progress, "checkpoints": kept, "seconds": runner.progress.seconds})
        return runner

    def fit(self) -> None:
        """Run the job; Ctrl-C and SIGTERM end it with a checkpoint."""
        epoch, at = self.job.start
        with graceful_shutdown() as asked, ExitStack() as stack:
            way = self.step_options(stack)
            self._finish_member(epoch)
            # On a mesh another process's members may go on when there are none (left) here: agreements are everybody's.
            while epoch < self.job.stop and self.executor.all_reduce_max(int(bool(self.members))):
                self.one_epoch(epoch, at, way, asked)
                epoch, at = epoch + 1, 0
            for runner in self.members:  # before the scratch that parked members lie on is gone
                if self.job.stop == self.recipe.train.epochs:
                    self._finish(runner, "")
            self._write_sharpness(asked)
            wish = self._requested_action(asked)
            if self.lost:
                raise DivergedError("\n".join(map(str, self.lost)))
            if wish == STOP:
                raise Interrupted("Stopped, with this job done. Run the same command again for what is missing")

    def _write_sharpness(self, asked: StopFlag) -> None:
        """Score the training samples where the job ends at a meeting."""
        if self.partition_epochs is None or self.job.stop not in self.partition_epochs.after:
            return
        where = (self.run, self.data, self.train_ids, self.executor, self.device, self.log)
        scorer = SharpnessScorer(*where, stop=lambda: self._requested_action(asked) == STOP)
        for group in [[runner] for runner in self.members] if self.executor.offloads else [self.members]:
            with ExitStack() as awake:
                for runner in group:
                    awake.enter_context(self.awake(runner.state))
                begun = time.monotonic()
                scorer.score([runner.state for runner in group], self.job.stop)
            share = (time.monotonic() - begun) / max(1, len(group))
            for number in [runner.state.number for runner in group if self.executor.is_writer()]:
                now = self.run.progress(number)
                self.run.commit(number, replace(now, seconds=now.seconds + share))

    def step_options(self, stack: ExitStack) -> StepOptions:
        """Return how steps are taken; `stack` holds what must be given back at the end."""
        way = StepOptions(self.recipe.train.precision, self.device, self.recipe.optimizer.accumulate)
        way = replace(
            way,
            members=len(self.job.members),
            shared_lr_schedulers=self.paces,
            is_independent=self.method.member_order != "parallel",
        )
        if self.earlier:
            rows = frozen_outputs(self.earlier, self.method.objective.output, self.recipe, self.device)
            way = replace(way, frozen_outputs=rows)
        if self.executor.offloads and len(self.members) > 1:
            way = replace(way, resident=offload_to_disk(stack.enter_context(self.run.store.scratch())))
            for runner in self.members:  # who is absent from the first steps rests on disk too
                with way.resident(runner.state):
                    pass
        self.awake = way.resident
        return way

    def one_epoch(self, epoch: int, at: int, way: StepOptions, asked: StopFlag) -> None:
        """Take every member through one epoch, from step `at` on."""
        streams: dict[int, Iterator[Batch]] = {}
        for runner in self.members:
            streams.setdefault(id(runner.loader), runner.loader.epoch(epoch, start=at, shard=self.executor.shard))
        for number in range(at, self.steps):
            if self.members:
                self._one_step(epoch, number, streams, way, asked)
            self._after_step(epoch, number + 1, self.steps, asked)
        self._after_epoch(epoch + 1, asked)

    def _one_step(
        self, epoch: int, number: int, streams: dict[int, Iterator[Batch]], way: StepOptions, asked: StopFlag
    ) -> None:
        learners = [runner.state for runner in self.members]
        try:
            drawn = {feed: next(streams[feed]) for feed in {id(runner.loader): None for runner in self.members}}
        except DataError:
            if not asked.is_set():
                raise
            self._stop(epoch, number)  # a signal to the whole process group takes the loader's workers too
        batches = [drawn[id(runner.loader)] for runner in self.members]
        total = min(self.recipe.data.batch, len(self.members[0].loader.ids) - number * self.recipe.data.batch)
        tallies = step(self.executor, learners, batches, way, share=len(batches[0]) / total)
        for runner, tally, batch in zip(self.members, tallies, batches, strict=True):
            if tally is not INACTIVE:
                runner.pending.append((tally, len(batch)))

    def _after_step(self, epoch: int, done: int, steps: int, asked: StopFlag) -> None:
        if done % self.recipe.run.log_every == 0 or done == steps:
            self._log_steps(epoch, done)
        self._progress_event(epoch, done, steps)
        if done == steps:
            return
        wish = self._requested_action(asked)
        if wish == SAVE:
            self._checkpoint(epoch, done)
        if wish == STOP:
            self._stop(epoch, done)

    def _requested_action(self, asked: StopFlag) -> int:
        minutes = self.recipe.run.checkpoint_minutes
        due = minutes is not None and time.monotonic() - self.clock > 60 * minutes
        return self.executor.all_reduce_max(STOP if asked.is_set() else SAVE if due else GO_ON)

    def _stop(self, epoch: int, at: int) -> NoReturn:
        self._checkpoint(epoch, at)
        raise Interrupted(
            f"Stopped at epoch {epoch}, step {at}, with a checkpoint. Run the same command again to go on"
        )

    def _after_epoch(self, epoch: int, asked: StopFlag) -> None:
        found: dict[int, dict[str, Estimate]] = {}
        if len(self.valid_ids) and epoch % self.recipe.train.validate_every == 0:
            for runner in self.members:
                with self._weights_in_use(runner.state):
                    found[runner.state.number] = self._validate(runner)
        last = epoch == self.job.stop
        for runner in self.members if self.probe_callback.due(epoch) else []:
            with self.awake(runner.state):
                tracker = self.tensorboard.get(runner.state.number)
                runner.lines += self.probe_callback.run(
                    runner.state.module, runner.state.number, epoch, None if tracker is None else tracker.add
                )
        for pace in self.paces:
            if not pace.every_step:
                pace.step()
        for runner in list(self.members):
            schedule = runner.state.lr_scheduler
            if schedule is not None and not runner.state.every_step:
                schedule.step()
            numbers = found.get(runner.state.number, {})
            self._log_epoch(runner, epoch, numbers)
            if numbers:
                self._track_best(runner, epoch, numbers)
            runner.loss, runner.correct, runner.seen = 0.0, 0.0, 0
            runner.progress = replace(runner.progress, epoch=epoch, step=0)
        wish = self._requested_action(asked)
        if last or wish != GO_ON or epoch % self.recipe.run.checkpoint_epochs == 0:
            self._checkpoint(epoch, 0)
        self._finish_member(epoch)
        if wish == STOP and not last:
            self._stop(epoch, 0)

    def _finish_member(self, epoch: int) -> None:
        """Finish the members that were no better for too long; after a resume too, so that none trains a bit longer."""
        patience = self.recipe.train.patience
        for runner in list(self.members):
            if patience is not None and runner.progress.epochs_since_best >= patience and epoch < self.job.stop:
                self._finish(runner, f"no better for {patience} validations")
                self.members.remove(runner)

    @contextmanager
    def _weights_in_use(self, learner: TrainState) -> Iterator[None]:
        """Wake a member and put it where it is used: at its moving average, where it keeps one."""
        precision, shard = self.recipe.train.precision, self.executor.shard
        with (
            self.awake(learner),
            averaged_params(
                learner,
                lambda: bn_update_batches(self.recipe, self.data, self.device, shard),
                lambda: autocast(precision, self.device),
            ),
        ):
            yield

    def _validate(self, runner: EpochStats) -> dict[str, Estimate]:
        return validate_member(
            self.recipe, self.data, runner.loader.source, self.valid_ids, runner.state, self.measures
        )

    def _track_best(self, runner: EpochStats, epoch: int, numbers: dict[str, Estimate]) -> None:
        """Remember the best weights on validation samples, and how long ago they were."""
        keep = self.recipe.train.keep
        name = keep.removeprefix("best:") if keep != "last" else "nll"
        number = numbers[name].value
        sign = 1 if self.measures[name].higher_is_better == "higher" else -1
        best = runner.progress.best
        if best is not None and not (sign * number > sign * best or math.isnan(best)):  # no number is never better
            runner.progress = replace(runner.progress, epochs_since_best=runner.progress.epochs_since_best + 1)
            return
        runner.progress = replace(runner.progress, best=number, best_epoch=epoch, epochs_since_best=0)
        if keep != "last":
            stored = self._put_weights(runner.state, epoch, best=True)
            words = f"{describe_weights(runner.state, epoch)}, the best {name} on validation samples so far"
            runner.progress = replace(runner.progress, weights=stored, weights_source=words)

    def _add_up(self, epoch: int, done: int) -> None:
        """Add what every member saw since the last time, sample by sample in order: when it is done changes no bit."""
        for runner in [each for each in self.members if each.pending]:
            recent, runner.pending = runner.pending, []
            losses = [float(tally.loss) for tally, _ in recent]
            try:
                runner.check(losses, epoch, done)
            except DivergedError as problem:
                if self.is_joint or self.executor.shard(2) != slice(0, 2):  # copies of a member must go on together
                    raise
                self.lost.append(problem)  # the others do not look at it, and go on
                self.members.remove(runner)
            for loss, (tally, size) in zip(losses, recent, strict=True):
                runner.loss += loss * size
                runner.correct += float(tally.correct) if tally.correct is not None else 0.0
                runner.seen += size

    def _log_steps(self, epoch: int, done: int) -> None:
        self._add_up(epoch, done)
        for runner in [each for each in self.members if each.seen]:
            runner.state.step_lr_scheduler()
            rate = runner.state.optimizer.param_groups[0]["lr"]
            runner.lines.append({"epoch": epoch, "step": done, "loss": runner.loss / runner.seen, "lr": rate})

    def _log_epoch(self, runner: EpochStats, epoch: int, numbers: dict[str, Estimate]) -> None:
        line: dict[str, Any] = {"epoch": epoch}
        if runner.seen:  # not absent from every step
            line |= {"train loss": runner.loss / runner.seen, "train accuracy": runner.correct / runner.seen}
        line |= {f"validation {name}": value.value for name, value in numbers.items()}
        runner.lines.append(line)
        if runner.state.number in self.tensorboard:
            self.tensorboard[runner.state.number].add(epoch, line)
        self.log({"member": runner.state.number, "done": epoch, "epochs": self.recipe.train.epochs, **line})

    def _progress_event(self, epoch: int, done: int, steps: int) -> None:
        now = time.monotonic()
        if now - self.told < 0.5:
            return
        self.told = now
        start = self.job.start[0] * steps + self.job.start[1]
        made = epoch * steps + done - start
        rate = made / max(now - self.begun, 1e-9)
        left = (self.job.stop * steps - epoch * steps - done) / max(rate, 1e-9)
        for runner in self.members:
            self.log(
                {
                    "member": runner.state.number,
                    "epoch": epoch,
                    "epochs": self.recipe.train.epochs,
                    "step": done,
                    "steps": steps,
                    "loss": runner.loss / runner.seen if runner.seen else None,
                    "accuracy": runner.correct / runner.seen if runner.seen and runner.correct else None,
                    "rate": rate * self.recipe.data.batch,
                    "left": left,
                }
            )

    def _checkpoint(self, epoch: int, at: int) -> None:
        """Write where every member is: its state and log first, then the progress that names them."""
        self._add_up(epoch, at)
        now = time.monotonic()
        for runner in self.members:
            number = runner.state.number
            if any(each[:2] == (epoch, at) for each in runner.progress.checkpoints):
                continue  # nothing happened since
            seconds = runner.progress.seconds + (now - self.clock) / len(self.members)
            runner.progress = replace(runner.progress, epoch=epoch, step=at, seconds=seconds)
            if not self.executor.is_writer():
                continue
            part = self.run.put_log(number, runner.progress, runner.lines)
            runner.lines = []
            runner.progress = replace(runner.progress, log_parts=(*runner.progress.log_parts, part))
            with self.awake(runner.state):
                state = state_dict(runner.state)
                state["epoch"] = (runner.loss, runner.correct, runner.seen)
                state["progress"] = to_plain(runner.progress)
                name = self.run.put_state(number, runner.progress, state)
            older = (
                runner.progress.checkpoints[-1:] if self.is_joint else ()
            )  # one back, so that a group finds a common place
            met = (
                name
                if self.partition_epochs is not None and (epoch, at) == (self.partition_epochs.after[0], 0)
                else runner.progress.partition_checkpoint
            )
            runner.progress = replace(
                runner.progress, checkpoints=(*older, (epoch, at, name)), partition_checkpoint=met
            )
            self.run.commit(number, runner.progress)
            runner.progress = replace(
                runner.progress, previous_weights=runner.progress.weights if self.is_joint else None
            )
        self.clock = now

    def _put_weights(self, learner: TrainState, epoch: int, *, best: bool = False) -> str | None:
        """Write the weights a member is used at, where this process writes; copies of it take its statistics too."""
        with self._weights_in_use(learner):
            if not self.executor.is_writer():
                return None
            return self.run.put_weights(learner.number, member_weights(self.recipe, learner), epoch=epoch, best=best)

    def _finish(self, runner: EpochStats, why: str) -> None:
        """Write the weights to use and say that the member is done."""
        number, progress = runner.state.number, runner.progress
        if self.recipe.train.keep == "last" or progress.best_epoch is None:
            name = self._put_weights(runner.state, progress.epoch)
            words = f"{describe_weights(runner.state, progress.epoch)}, the last"
        elif self.executor.is_writer():
            assert progress.weights is not None
            weights = self.run.store.get_tensors(progress.weights)
            name = self.run.put_weights(number, weights, epoch=progress.best_epoch)
            words = progress.weights_source.removesuffix(" so far")
        if self.executor.is_writer():
            self.run.commit(
                number, replace(progress, finished=True, weights=name, weights_source=words, stop_reason=why)
            )
