"""Log the training loss, accuracy and validation metrics of the members of a job."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plateaux.core.callbacks import Tell
from plateaux.core.errors import DivergedError
from plateaux.core.types import Estimate
from plateaux.storage.run import Run
from plateaux.training.epoch_stats import EpochStats
from plateaux.training.jobs import Job
from plateaux.training.tensorboard import TensorBoardLogger

EVENT_EVERY_S = 0.5


class MetricLogger:
    """Writes log lines of members, TensorBoard records, and progress events."""

    def __init__(self, run: Run, job: Job, held: Iterable[int], log: Tell) -> None:
        self.recipe, self.job, self.log = run.recipe, job, log
        self.tensorboard = {
            number: TensorBoardLogger(Path(run.store.root) / "tensorboard" / str(number))
            for number in held
            if self.recipe.run.tensorboard
        }
        self.begun = time.monotonic()
        self.last_event = 0.0

    def add_up(self, members: Sequence[EpochStats], epoch: int, done: int) -> list[tuple[EpochStats, DivergedError]]:
        """Add the pending losses of every member, and return the members whose loss became NaN or infinite.

        Sums are taken sample by sample in order, so that the result does not depend on when this is called.
        """
        diverged: list[tuple[EpochStats, DivergedError]] = []
        for member in [each for each in members if each.pending]:
            recent, member.pending = member.pending, []
            losses = [float(stats.loss) for stats, _ in recent]
            try:
                member.check(losses, epoch, done)
            except DivergedError as problem:
                diverged.append((member, problem))
            for loss, (stats, size) in zip(losses, recent, strict=True):
                member.loss += loss * size
                member.correct += float(stats.correct) if stats.correct is not None else 0.0
                member.seen += size
        return diverged

    def log_steps(self, members: Sequence[EpochStats], epoch: int, done: int) -> None:
        """Add a line with the mean loss of the epoch so far to every member's log."""
        for member in [each for each in members if each.seen]:
            member.state.step_lr_scheduler()
            rate = member.state.optimizer.param_groups[0]["lr"]
            member.lines.append({"epoch": epoch, "step": done, "loss": member.loss / member.seen, "lr": rate})

    def log_epoch(self, member: EpochStats, epoch: int, validation: dict[str, Estimate]) -> None:
        """Add a line with the metrics of a whole epoch to a member's log."""
        line: dict[str, Any] = {"epoch": epoch}
        if member.seen:  # not inactive in every step
            line |= {"train loss": member.loss / member.seen, "train accuracy": member.correct / member.seen}
        line |= {f"validation {name}": value.value for name, value in validation.items()}
        member.lines.append(line)
        if member.state.number in self.tensorboard:
            self.tensorboard[member.state.number].add(epoch, line)
        self.log({"member": member.state.number, "done": epoch, "epochs": self.recipe.train.epochs, **line})

    def send_progress(self, members: Sequence[EpochStats], epoch: int, done: int, steps: int) -> None:
        """Send where every member is, its speed and the time left, at most twice a second."""
        now = time.monotonic()
        if now - self.last_event < EVENT_EVERY_S:
            return
        self.last_event = now
        start = self.job.start[0] * steps + self.job.start[1]
        rate = (epoch * steps + done - start) / max(now - self.begun, 1e-9)
        left = (self.job.stop * steps - epoch * steps - done) / max(rate, 1e-9)
        for member in members:
            self.log(
                {
                    "member": member.state.number,
                    "epoch": epoch,
                    "epochs": self.recipe.train.epochs,
                    "step": done,
                    "steps": steps,
                    "loss": member.loss / member.seen if member.seen else None,
                    "accuracy": member.correct / member.seen if member.seen and member.correct else None,
                    "rate": rate * self.recipe.data.batch_size,
                    "left": left,
                }
            )
