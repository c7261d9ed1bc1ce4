"""Log the training loss, accuracy, and validation metrics of the members of a job."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from plateaux.core.errors import DivergedError
from plateaux.core.progress import CheckpointWritten, MemberUpdate, Progress
from plateaux.core.types import Estimate
from plateaux.loss_landscape.callback import probe_values
from plateaux.storage.run import Run
from plateaux.training.jobs import Job
from plateaux.training.loop.epoch_stats import EpochStats

EVENT_INTERVAL_S = 0.5


class MetricLogger:
    """Writes the log lines of members, and sends progress events."""

    def __init__(self, run: Run, job: Job, progress: Progress) -> None:
        self.recipe, self.job, self.progress = run.recipe, job, progress
        self.start_time = time.monotonic()
        self.last_event = 0.0

    def add_up(
        self, members: Sequence[EpochStats], epoch: int, step: int, *, check_inputs: bool = True
    ) -> list[tuple[EpochStats, DivergedError]]:
        """Add the pending losses of every member, and return the members whose loss became NaN or infinite.

        Sums are taken step by step in order, so the result does not depend on when this is called. If inputs are the
        cause of a NaN loss, DataError is raised instead.
        """
        diverged: list[tuple[EpochStats, DivergedError]] = []
        for member in members:
            if not member.pending:
                continue
            pending, member.pending = member.pending, []
            losses = [float(stats.loss) for stats, _ in pending]
            try:
                member.check_finite(losses, epoch, step)
            except DivergedError as error:
                diverged.append((member, error))
            for loss, (stats, size) in zip(losses, pending, strict=True):
                member.loss += loss * size
                member.correct += float(stats.correct) if stats.correct is not None else 0.0
                member.samples += size
        if diverged and check_inputs:  # the losses of at most `log_every` steps were pending
            diverged[0][0].check_inputs(epoch, max(0, step - self.recipe.run.log_every), step)
        return diverged

    def log_steps(self, members: Sequence[EpochStats], epoch: int, step: int) -> None:
        """Add a line with the mean loss of the epoch so far to the log of every member."""
        for member in members:
            if member.samples:
                member.state.sync_lr()
                lr = member.state.optimizer.param_groups[0]["lr"]
                member.lines.append({"epoch": epoch, "step": step, "loss": member.loss / member.samples, "lr": lr})

    def log_epoch(self, member: EpochStats, epoch: int, validation: Mapping[str, Estimate]) -> None:
        """Add a line with the metrics of a whole epoch to the log of a member; send them with the values of probes."""
        metrics: dict[str, float] = {}
        if member.samples:  # 0 if the member was inactive in every step
            metrics["train loss"] = member.loss / member.samples
            metrics["train accuracy"] = member.correct / member.samples
        metrics |= {f"validation {name}": estimate.value for name, estimate in validation.items()}
        probes = probe_values([line for line in member.lines if "probe" in line and line["epoch"] == epoch])
        line: dict[str, Any] = {"epoch": epoch, **metrics}
        member.lines.append(line)
        epochs = self.recipe.train.epochs
        self.progress(MemberUpdate(member.state.number, epochs=epochs, epoch=epoch, metrics={**metrics, **probes}))

    def send_checkpoints(self, members: Sequence[EpochStats], epoch: int, step: int) -> None:
        """Send that the members have checkpoints at a position."""
        for member in members:
            self.progress(CheckpointWritten(member.state.number, epoch, step))

    def send_progress(self, members: Sequence[EpochStats], epoch: int, step: int, steps: int) -> None:
        """Send the position of every member, its speed, and the time left, at most twice per second."""
        now = time.monotonic()
        if now - self.last_event < EVENT_INTERVAL_S:
            return
        self.last_event = now
        start = self.job.start[0] * steps + self.job.start[1]
        steps_per_second = (epoch * steps + step - start) / max(now - self.start_time, 1e-9)
        seconds_left = (self.job.stop * steps - epoch * steps - step) / max(steps_per_second, 1e-9)
        for member in members:
            metrics: dict[str, float] = {}
            if member.samples:
                metrics["loss"] = member.loss / member.samples
                if member.correct:
                    metrics["accuracy"] = member.correct / member.samples
            self.progress(
                MemberUpdate(
                    member.state.number,
                    epochs=self.recipe.train.epochs,
                    epoch=epoch,
                    steps=steps,
                    step=step,
                    metrics=metrics,
                    samples_per_second=steps_per_second * self.recipe.data.batch_size,
                    seconds_left=seconds_left,
                )
            )
