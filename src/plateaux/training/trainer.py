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
from plateaux.loss_landscape.callback import Recorder
from plateaux.storage.run import MemberProgress, Run
from plateaux.training.averaged_weights import at_average, in_words
from plateaux.training.checkpoint import restore, state_of, weights_of
from plateaux.training.epoch_stats import Runner, plain
from plateaux.training.jobs import Job
from plateaux.training.offload import parking
from plateaux.training.partition import Scorer, notes_of
from plateaux.training.sequential import beside, go_on
from plateaux.training.setup import learners_of, paces_of
from plateaux.training.state import ABSENT, Learner, Way
from plateaux.training.step import step
from plateaux.training.tensorboard import Tracker
from plateaux.training.validation import validated, validation_measures

GO_ON, SAVE, STOP = 0, 1, 2  # what a process may wish between two steps; the strongest wish is everybody's


class Course:
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
        self.run, self.data, self.job, self.executor, self.tell = run, data, job, executor, tell
        self.recipe = run.recipe
        self.device = device
        self.train_ids, self.valid_ids = train_val_split(self.recipe, data)
        self.measures = validation_measures(self.recipe.train.keep)
        self.recorder = Recorder(self.recipe, data, self.train_ids, device, allow=given.trust)
        self.method = build_method(self.recipe, 0, given)
        self.joint, self.meets = self.method.is_joint, self.method.partition
        self.earlier = earlier  # members that have finished, and are seen by the one in turn
        self.lost: list[DivergedError] = []  # members that diverged while the others went on
        self.runners = self._runners(held, given)
        self.trackers = {
            n: Tracker(Path(run.store.root) / "tensorboard" / str(n)) for n in held if self.recipe.run.tensorboard
        }
        self.clock = time.monotonic()  # of the last checkpoint
        self.begun = time.monotonic()
        self.told = 0.0

    def _runners(self, held: list[int], given: Components) -> list[Runner]:
        probe = build_loader(self.recipe, self.data, 0, shared=True, device=self.device, ids=self.train_ids)
        learners = learners_of(
            self.recipe, self.data, held, self.executor, device=self.device, steps=probe.steps(), given=given
        )
        self.steps, self.paces = probe.steps(), paces_of(learners)
        for learner in learners:
            if self.job.stop > self.job.start[0]:
                learner.notes = notes_of(self.run, self.meets, learner.number, self.job.start[0])
        shared = uses_shared_order(self.recipe, self.method)
        runners = []
        for learner in learners:
            feed = probe if shared else self._own_feed(learner.number)
            runners.append(self._resumed(Runner(learner, feed, self.run.progress(learner.number))))
        if runners and self.executor.is_writer():
            names = shared_param_names(self.recipe, runners[0].learner.module)
            state = runners[0].learner.module.state_dict()
            self.run.put_shared({name: state[name] for name in sorted(names & state.keys())})
        return runners

    def _own_feed(self, number: int) -> MemberLoader:
        return build_loader(self.recipe, self.data, number, shared=False, device=self.device, ids=self.train_ids)

    def _resumed(self, runner: Runner) -> Runner:
        """Put a member where the job starts; a log part written after that place is forgotten."""
        epoch, at = self.job.start
        names = {(e, s): name for e, s, name in runner.progress.checkpoints}
        if (epoch, at) == (0, 0):
            runner.progress = MemberProgress(seconds=runner.progress.seconds)
            if self.method.member_order == "onward" and runner.learner.number:
                go_on(runner.learner, self.run)
            return runner
        state = self.run.store.get_state(names[epoch, at])
        restore(runner.learner, state)
        runner.loss, runner.right, runner.seen = state["epoch"]
        # A state after this place belongs to an attempt that its group could not follow.
        kept = tuple(each for each in runner.progress.checkpoints if each[:2] <= self.job.start)
        progress = {
            **state["progress"],
            "log_parts": tuple(state["progress"]["log_parts"]),
            "partition_checkpoint": runner.progress.partition_checkpoint,
        }
        runner.progress = MemberProgress(**{**progress, "checkpoints": kept, "seconds": runner.progress.seconds})
        return runner

    def go(self) -> None:
        """Run the job; Ctrl-C and SIGTERM end it with a checkpoint."""
        epoch, at = self.job.start
        with graceful_shutdown() as asked, ExitStack() as stack:
            way = self.way(stack)
            self._retire(epoch)
            # On a mesh another process's members may go on when there are none (left) here: agreements are everybody's.
            while epoch < self.job.stop and self.executor.all_reduce_max(int(bool(self.runners))):
                self.one_epoch(epoch, at, way, asked)
                epoch, at = epoch + 1, 0
            for runner in self.runners:  # before the scratch that parked members lie on is gone
                if self.job.stop == self.recipe.train.epochs:
                    self._finish(runner, "")
            self._leave_scores(asked)
            wish = self._wish(asked)
            if self.lost:
                raise DivergedError("\n".join(map(str, self.lost)))
            if wish == STOP:
                raise Interrupted("Stopped, with this job done. Run the same command again for what is missing")

    def _leave_scores(self, asked: StopFlag) -> None:
        """Score the training samples where the job ends at a meeting."""
        if self.meets is None or self.job.stop not in self.meets.after:
            return
        where = (self.run, self.data, self.train_ids, self.executor, self.device, self.tell)
        scorer = Scorer(*where, stop=lambda: self._wish(asked) == STOP)
        for group in [[runner] for runner in self.runners] if self.executor.offloads else [self.runners]:
            with ExitStack() as awake:
                for runner in group:
                    awake.enter_context(self.awake(runner.learner))
                begun = time.monotonic()
                scorer.score([runner.learner for runner in group], self.job.stop)
            share = (time.monotonic() - begun) / max(1, len(group))
            for number in [runner.learner.number for runner in group if self.executor.is_writer()]:
                now = self.run.progress(number)
                self.run.commit(number, replace(now, seconds=now.seconds + share))

    def way(self, stack: ExitStack) -> Way:
        """Return how steps are taken; `stack` holds what must be given back at the end."""
        way = Way(self.recipe.train.precision, self.device, self.recipe.optimizer.accumulate)
        way = replace(way, members=len(self.job.members), paces=self.paces, alone=self.method.member_order != "any")
        if self.earlier:
            rows = beside(self.earlier, self.method.objective.output, self.recipe, self.device)
            way = replace(way, beside=rows)
        if self.executor.offloads and len(self.runners) > 1:
            way = replace(way, awake=parking(stack.enter_context(self.run.store.scratch())))
            for runner in self.runners:  # who is absent from the first steps rests on disk too
                with way.awake(runner.learner):
                    pass
        self.awake = way.awake
        return way

    def one_epoch(self, epoch: int, at: int, way: Way, asked: StopFlag) -> None:
        """Take every member through one epoch, from step `at` on."""
        streams: dict[int, Iterator[Batch]] = {}
        for runner in self.runners:
            streams.setdefault(id(runner.feed), runner.feed.epoch(epoch, start=at, shard=self.executor.shard))
        for number in range(at, self.steps):
            if self.runners:
                self._one_step(epoch, number, streams, way, asked)
            self._after_step(epoch, number + 1, self.steps, asked)
        self._after_epoch(epoch + 1, asked)

    def _one_step(
        self, epoch: int, number: int, streams: dict[int, Iterator[Batch]], way: Way, asked: StopFlag
    ) -> None:
        learners = [runner.learner for runner in self.runners]
        try:
            drawn = {feed: next(streams[feed]) for feed in {id(runner.feed): None for runner in self.runners}}
        except DataError:
            if not asked.is_set():
                raise
            self._stop(epoch, number)  # a signal to the whole process group takes the loader's workers too
        batches = [drawn[id(runner.feed)] for runner in self.runners]
        total = min(self.recipe.data.batch, len(self.runners[0].feed.ids) - number * self.recipe.data.batch)
        tallies = step(self.executor, learners, batches, way, share=len(batches[0]) / total)
        for runner, tally, batch in zip(self.runners, tallies, batches, strict=True):
            if tally is not ABSENT:
                runner.pending.append((tally, len(batch)))

    def _after_step(self, epoch: int, done: int, steps: int, asked: StopFlag) -> None:
        if done % self.recipe.run.log_every == 0 or done == steps:
            self._log_steps(epoch, done)
        self._news(epoch, done, steps)
        if done == steps:
            return
        wish = self._wish(asked)
        if wish == SAVE:
            self._checkpoint(epoch, done)
        if wish == STOP:
            self._stop(epoch, done)

    def _wish(self, asked: StopFlag) -> int:
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
            for runner in self.runners:
                with self._in_use(runner.learner):
                    found[runner.learner.number] = self._validated(runner)
        last = epoch == self.job.stop
        for runner in self.runners if self.recorder.due(epoch) else []:
            with self.awake(runner.learner):
                tracker = self.trackers.get(runner.learner.number)
                runner.lines += self.recorder.ask(
                    runner.learner.module, runner.learner.number, epoch, None if tracker is None else tracker.add
                )
        for pace in self.paces:
            if not pace.every_step:
                pace.move()
        for runner in list(self.runners):
            schedule = runner.learner.schedule
            if schedule is not None and not runner.learner.every_step:
                schedule.step()
            numbers = found.get(runner.learner.number, {})
            self._log_epoch(runner, epoch, numbers)
            if numbers:
                self._judge(runner, epoch, numbers)
            runner.loss, runner.right, runner.seen = 0.0, 0.0, 0
            runner.progress = replace(runner.progress, epoch=epoch, step=0)
        wish = self._wish(asked)
        if last or wish != GO_ON or epoch % self.recipe.run.checkpoint_epochs == 0:
            self._checkpoint(epoch, 0)
        self._retire(epoch)
        if wish == STOP and not last:
            self._stop(epoch, 0)

    def _retire(self, epoch: int) -> None:
        """Finish the members that were no better for too long; after a resume too, so that none trains a bit longer."""
        patience = self.recipe.train.patience
        for runner in list(self.runners):
            if patience is not None and runner.progress.epochs_since_best >= patience and epoch < self.job.stop:
                self._finish(runner, f"no better for {patience} validations")
                self.runners.remove(runner)

    @contextmanager
    def _in_use(self, learner: Learner) -> Iterator[None]:
        """Wake a member and put it where it is used: at its moving average, where it keeps one."""
        precision, shard = self.recipe.train.precision, self.executor.shard
        with (
            self.awake(learner),
            at_average(
                learner,
                lambda: bn_update_batches(self.recipe, self.data, self.device, shard),
                lambda: autocast(precision, self.device),
            ),
        ):
            yield

    def _validated(self, runner: Runner) -> dict[str, Estimate]:
        return validated(self.recipe, self.data, runner.feed.source, self.valid_ids, runner.learner, self.measures)

    def _judge(self, runner: Runner, epoch: int, numbers: dict[str, Estimate]) -> None:
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
            stored = self._put_weights(runner.learner, epoch, best=True)
            words = f"{in_words(runner.learner, epoch)}, the best {name} on validation samples so far"
            runner.progress = replace(runner.progress, weights=stored, weights_source=words)

    def _add_up(self, epoch: int, done: int) -> None:
        """Add what every member saw since the last time, sample by sample in order: when it is done changes no bit."""
        for runner in [each for each in self.runners if each.pending]:
            recent, runner.pending = runner.pending, []
            losses = [float(tally.loss) for tally, _ in recent]
            try:
                runner.check(losses, epoch, done)
            except DivergedError as problem:
                if self.joint or self.executor.shard(2) != slice(0, 2):  # copies of a member must go on together
                    raise
                self.lost.append(problem)  # the others do not look at it, and go on
                self.runners.remove(runner)
            for loss, (tally, size) in zip(losses, recent, strict=True):
                runner.loss += loss * size
                runner.right += float(tally.right) if tally.right is not None else 0.0
                runner.seen += size

    def _log_steps(self, epoch: int, done: int) -> None:
        self._add_up(epoch, done)
        for runner in [each for each in self.runners if each.seen]:
            runner.learner.keep_pace()
            rate = runner.learner.optimizer.param_groups[0]["lr"]
            runner.lines.append({"epoch": epoch, "step": done, "loss": runner.loss / runner.seen, "lr": rate})

    def _log_epoch(self, runner: Runner, epoch: int, numbers: dict[str, Estimate]) -> None:
        line: dict[str, Any] = {"epoch": epoch}
        if runner.seen:  # not absent from every step
            line |= {"train loss": runner.loss / runner.seen, "train accuracy": runner.right / runner.seen}
        line |= {f"validation {name}": value.value for name, value in numbers.items()}
        runner.lines.append(line)
        if runner.learner.number in self.trackers:
            self.trackers[runner.learner.number].add(epoch, line)
        self.tell({"member": runner.learner.number, "done": epoch, "epochs": self.recipe.train.epochs, **line})

    def _news(self, epoch: int, done: int, steps: int) -> None:
        now = time.monotonic()
        if now - self.told < 0.5:
            return
        self.told = now
        start = self.job.start[0] * steps + self.job.start[1]
        made = epoch * steps + done - start
        rate = made / max(now - self.begun, 1e-9)
        left = (self.job.stop * steps - epoch * steps - done) / max(rate, 1e-9)
        for runner in self.runners:
            self.tell(
                {
                    "member": runner.learner.number,
                    "epoch": epoch,
                    "epochs": self.recipe.train.epochs,
                    "step": done,
                    "steps": steps,
                    "loss": runner.loss / runner.seen if runner.seen else None,
                    "accuracy": runner.right / runner.seen if runner.seen and runner.right else None,
                    "rate": rate * self.recipe.data.batch,
                    "left": left,
                }
            )

    def _checkpoint(self, epoch: int, at: int) -> None:
        """Write where every member is: its state and log first, then the progress that names them."""
        self._add_up(epoch, at)
        now = time.monotonic()
        for runner in self.runners:
            number = runner.learner.number
            if any(each[:2] == (epoch, at) for each in runner.progress.checkpoints):
                continue  # nothing happened since
            seconds = runner.progress.seconds + (now - self.clock) / len(self.runners)
            runner.progress = replace(runner.progress, epoch=epoch, step=at, seconds=seconds)
            if not self.executor.is_writer():
                continue
            part = self.run.put_log(number, runner.progress, runner.lines)
            runner.lines = []
            runner.progress = replace(runner.progress, log_parts=(*runner.progress.log_parts, part))
            with self.awake(runner.learner):
                state = state_of(runner.learner)
                state["epoch"] = (runner.loss, runner.right, runner.seen)
                state["progress"] = plain(runner.progress)
                name = self.run.put_state(number, runner.progress, state)
            older = (
                runner.progress.checkpoints[-1:] if self.joint else ()
            )  # one back, so that a group finds a common place
            met = (
                name
                if self.meets is not None and (epoch, at) == (self.meets.after[0], 0)
                else runner.progress.partition_checkpoint
            )
            runner.progress = replace(
                runner.progress, checkpoints=(*older, (epoch, at, name)), partition_checkpoint=met
            )
            self.run.commit(number, runner.progress)
            runner.progress = replace(runner.progress, previous_weights=runner.progress.weights if self.joint else None)
        self.clock = now

    def _put_weights(self, learner: Learner, epoch: int, *, best: bool = False) -> str | None:
        """Write the weights a member is used at, where this process writes; copies of it take its statistics too."""
        with self._in_use(learner):
            if not self.executor.is_writer():
                return None
            return self.run.put_weights(learner.number, weights_of(self.recipe, learner), epoch=epoch, best=best)

    def _finish(self, runner: Runner, why: str) -> None:
        """Write the weights to use and say that the member is done."""
        number, progress = runner.learner.number, runner.progress
        if self.recipe.train.keep == "last" or progress.best_epoch is None:
            name = self._put_weights(runner.learner, progress.epoch)
            words = f"{in_words(runner.learner, progress.epoch)}, the last"
        elif self.executor.is_writer():
            assert progress.weights is not None
            weights = self.run.store.get_tensors(progress.weights)
            name = self.run.put_weights(number, weights, epoch=progress.best_epoch)
            words = progress.weights_source.removesuffix(" so far")
        if self.executor.is_writer():
            self.run.commit(
                number, replace(progress, finished=True, weights=name, weights_source=words, stop_reason=why)
            )
