"""Send the numbers of a run to its trackers, each of which has a process of its own.

This runs in the process that plans the jobs: there, the progress events of all members arrive, whichever process trains
them. On a mesh, it runs in every process that writes the files of members.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from plateaux.config.builders.trackers import check_trackers, tracker_target
from plateaux.config.components import Components
from plateaux.config.recipe import flatten
from plateaux.core.errors import Interrupted, PlateauxError, first_line
from plateaux.core.executor import Executor
from plateaux.core.process_info import is_rank_zero, rank_and_world_size
from plateaux.core.progress import MemberUpdate, ProgressEvent
from plateaux.core.tracker import BUILT_IN
from plateaux.distributed.background_process import BackgroundProcess, close_all
from plateaux.evaluation.results import MetricResult
from plateaux.loss_landscape.callback import probe_values
from plateaux.storage.remote_fs import parse_address
from plateaux.storage.run import Run, RunLike
from plateaux.training.tracker_process import ENSEMBLE

logger = logging.getLogger(__name__)
MODULE = "plateaux.training.tracker_process"
QUEUE_SIZE = 1000  # messages that a tracker has not handled yet: one per member and epoch
CLOSE_SECONDS = 60.0  # after training, for all trackers together
STOP_SECONDS = 10.0  # after training was stopped or has failed; the processes of a killed run have as long to end
GRACE_SECONDS = 5.0  # after which a tracker ends by itself if the process that should end it is gone
FILES = re.compile(r"recipe\.toml|environment\.json|report\.(html|md|json|csv)")  # of the run folder

Status = Literal["finished", "stopped", "failed"]


class RunTrackers:
    """The trackers of a run. Whatever a tracker does, no method raises, and only `close` waits, for a limited time."""

    def __init__(self, run: Run, names: Sequence[str], *, with_ensemble: bool = True) -> None:
        self.trackers = [_RunTracker(run, name, with_ensemble=with_ensemble) for name in names]

    def handle(self, event: ProgressEvent) -> None:
        """Log an event, if it ends an epoch."""
        if isinstance(event, MemberUpdate) and (epoch := event.completed_epoch) is not None:
            for tracker in self.trackers:
                tracker.log_epoch(event.member, epoch, event.metrics)

    def close(self, status: Status, summary: Mapping[str, Any], files: Sequence[str], *, every_member: bool) -> None:
        """Send what is missing and the summaries, end the processes, and report problems that were not reported."""
        seconds = CLOSE_SECONDS if status == "finished" else STOP_SECONDS
        for tracker in self.trackers:
            tracker.finish(status, summary, files, every_member=every_member, seconds=seconds)
        killed = close_all([tracker.process for tracker in self.trackers], seconds)
        for tracker in self.trackers:
            tracker.report_end(seconds if tracker.process in killed else None)


class _RunTracker:
    """One tracker of a run."""

    def __init__(self, run: Run, name: str, *, with_ensemble: bool) -> None:
        self.run, self.name = run, name
        self.epochs: dict[int, int] = {}  # the last epoch that was sent, by member
        self.summaries: dict[str, dict[str, Any]] = {}
        self.refused: set[tuple[int, int]] = set()  # members and epochs that did not fit into the queue
        self.has_reported = False
        self.process = BackgroundProcess(MODULE, limit=QUEUE_SIZE)
        root = run.store.root
        local = parse_address(str(root)) is None
        self.process.send({
            "root": str(Path(root).resolve()) if local else str(root), "name": Path(str(root)).resolve().name,
            "group": run.recipe.run.group, "target": tracker_target(name), "grace": STOP_SECONDS,
            "slug": name if name in BUILT_IN else "tracker-" + re.sub(r"\W", "-", name),
        })  # fmt: skip
        if with_ensemble:
            self.process.send({"of": ENSEMBLE, "config": flatten(run.recipe.to_dict())})

    def log_epoch(self, member: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Send the numbers of an epoch, and before them those of earlier epochs that were not sent."""
        last = self.epochs.get(member, 0)
        if epoch <= last:  # trained again, with the same numbers
            return
        self._report_errors()
        if self.process.is_full:
            self.refused.add((member, epoch))
            return
        if epoch > last + 1:
            self._send_stored(member, epoch - 1)
        self._send(member, epoch, metrics)

    def finish(
        self,
        status: Status,
        summary: Mapping[str, Any],
        files: Sequence[str],
        *,
        every_member: bool,
        seconds: float,
    ) -> None:
        """Send what is missing, and the last message."""
        for member in range(self.run.recipe.members) if every_member else list(self.epochs):
            self._send_stored(member)
        summaries = {**self.summaries, ENSEMBLE: dict(summary)}
        closing = {"status": status, "summaries": summaries, "files": list(files)}
        self.process.send({"close": closing, "grace": seconds + GRACE_SECONDS}, force=True)

    def report_end(self, killed_after: float | None) -> None:
        """Report how the process ended, if something went wrong."""
        lost = self._report_errors()
        if killed_after is not None:
            self._report(f"did not finish within {killed_after:g} s and was ended")
        elif self.process.exit_code:
            self._report(f"ended unexpectedly (exit code {self.process.exit_code})")
        lost += len(self.refused)
        if lost:
            logger.warning(
                "The tracker %r lacks the numbers of %d epochs of members. The logs in the run folder are complete",
                self.name,
                lost,
            )

    def _send(self, member: int, epoch: int, metrics: Mapping[str, float]) -> None:
        message: dict[str, Any] = {"of": str(member), "step": epoch}
        message["values"] = {name.replace(" ", "/", 1): value for name, value in metrics.items()}
        if member not in self.epochs:
            message["config"] = flatten(self.run.recipe.for_member(member).to_dict())
        if self.process.send(message):
            self.epochs[member] = epoch
            self.refused.discard((member, epoch))
            self.summaries[str(member)] = {"epoch": epoch, **message["values"]}
        else:
            self.refused.add((member, epoch))

    def _send_stored(self, member: int, until: int | None = None) -> None:
        """Send epochs from the log in the run folder: of an earlier process, or of a job whose process died."""
        last = self.epochs.get(member, 0)
        try:
            if last >= (self.run.progress(member).epoch if until is None else until):
                return
            stored = stored_epochs(self.run, member)
        except PlateauxError as problem:
            self._report(f"does not get earlier epochs of member {member}: {first_line(problem)}")
            return
        for epoch, metrics in stored.items():
            if last < epoch and (until is None or epoch <= until):
                self._send(member, epoch, metrics)

    def _report_errors(self) -> int:
        """Report the first error in the replies; return how many numbers are lost."""
        replies = self.process.replies()
        for reply in replies:
            if "error" in reply:
                self._report(f"failed: {reply['error']}")
        return sum(reply.get("lost", 0) for reply in replies)

    def _report(self, problem: str) -> None:
        if not self.has_reported:
            self.has_reported = True
            logger.warning(
                "The tracker %r %s. Training is not affected. Fix the cause and run the same command again to send "
                "what is missing, or leave the tracker out of run.trackers",
                self.name,
                problem,
            )


def stored_epochs(run: Run, member: int) -> dict[int, dict[str, float]]:
    """Return the numbers of every epoch in the log of a member, as they were when the epoch ended."""
    epochs: dict[int, dict[str, float]] = {}
    for line in run.log(member):
        if "step" not in line and isinstance(epoch := line.get("epoch"), int):
            values = probe_values([line]) if "probe" in line else {**line, "epoch": None}
            numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
            epochs[epoch] = {**numbers, **epochs.get(epoch, {})}
    return epochs


@contextmanager
def track(run: Run, executor: Executor) -> Iterator[RunTrackers]:
    """Start the trackers of a run, if this process owns some, and close them when the block ends."""
    trackers = RunTrackers(run, run.recipe.run.trackers if executor.is_writer() else (), with_ensemble=is_rank_zero())
    status: Status = "failed"
    try:
        yield trackers
        status = "finished"
    except (Interrupted, KeyboardInterrupt):
        status = "stopped"
        raise
    finally:
        if trackers.trackers:
            is_alone = rank_and_world_size()[1] == 1
            trackers.close(status, _summary(run), _files(run) if is_rank_zero() else [], every_member=is_alone)


def log_results(
    run: RunLike,
    results: Iterable[MetricResult] = (),
    *,
    files: Sequence[str | Path] = (),
    trust: Sequence[str] = (),
) -> None:
    """Add results and files, such as a report, to what the trackers of a run have.

    Args:
        run: A run, its folder, or its URL.
        results: What `plateaux.evaluate` returned; the values of the ensemble become part of its summary.
        files: Files to add to those of the run folder: recipe.toml, environment.json, and report.*.
        trust: Trackers that the recipe of the run may start, such as `wandb`.
    """
    opened = Run.open(run)
    check_trackers(opened.recipe, Components(trust=tuple(trust)))
    trackers = RunTrackers(opened, opened.recipe.run.trackers)
    values: dict[str, float] = {}
    for result in results:
        with suppress(KeyError):  # it has one value per class or bin
            values[f"{result.split}/{result.metric}"] = result.value
    added = [str(Path(file).resolve()) for file in files]
    trackers.close("finished", {**_summary(opened), **values}, [*_files(opened), *added], every_member=False)


def _summary(run: Run) -> dict[str, Any]:
    """Return what is known of the ensemble without an evaluation."""
    try:
        progress = run.all_progress()
    except PlateauxError:  # the run is damaged, which training reports
        return {}
    finished = sum(each.finished for each in progress)
    epoch = max(each.epoch for each in progress)
    return {"epoch": epoch, "members/finished": finished, "seconds": sum(each.seconds for each in progress)}


def _files(run: Run) -> list[str]:
    """Return the names of the files of a run that are copied to a tracker."""
    try:
        return [name for name in run.store.names() if FILES.fullmatch(name)]
    except PlateauxError:
        return []
