"""Send the numbers of a run to its trackers, each of which is called by a thread of its own.

This runs in the process that plans the jobs: there, the progress events of all members arrive, whichever process trains
them. On a mesh, it runs in every process that writes the files of members.

trackers/<tracker>/<member>.json      the id by which the tracker continues the run, and the last epoch that it has
trackers/<tracker>/ensemble.json      the same for the ensemble
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Annotated, Any, Literal

from pydantic import Field

from plateaux.config.recipe import flatten
from plateaux.config.tracker_check import check_trackers, tracker_target
from plateaux.core.errors import Interrupted, PlateauxError, first_line
from plateaux.core.executor import Collectives
from plateaux.core.process_info import is_rank_zero, rank_and_world_size
from plateaux.core.progress import MemberUpdate, ProgressEvent
from plateaux.core.ranges import StoredInt
from plateaux.core.tracker import BUILT_IN, TrackedRun, Tracker
from plateaux.evaluation.results import MetricResult
from plateaux.loss_landscape.callback import probe_values
from plateaux.storage.atomic import write_atomic
from plateaux.storage.json_shapes import read_shape
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run, RunLike
from plateaux.storage.safe_files import open_folder

logger = logging.getLogger(__name__)
ENSEMBLE = None  # in place of the number of a member
QUEUE_SIZE = 1000  # epochs of members that a tracker has not handled yet
CLOSE_SECONDS = 60.0  # after training, for all trackers together
STOP_SECONDS = 10.0  # after training was stopped or has failed
PARENT_WAIT_S = 60.0  # for the process of a mesh that starts the ensemble
FILES = re.compile(r"recipe\.toml|environment\.json|report\.(html|md|json|csv)")  # of the run folder

Status = Literal["finished", "stopped", "failed"]
TrackerId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


@dataclass(frozen=True, slots=True)
class StoredTracker:
    """What is stored about one member, or the ensemble, in one tracker."""

    id: TrackerId | None = None
    step: StoredInt = 0


class RunTrackers:
    """The trackers of a run. Whatever a tracker does, no method raises, and only `close` waits, for a limited time."""

    def __init__(self, run: Run, names: Sequence[str]) -> None:
        self.trackers = [RunTracker(run, name) for name in names]

    def handle(self, event: ProgressEvent) -> None:
        """Log an event, if it ends an epoch."""
        if isinstance(event, MemberUpdate) and (epoch := event.completed_epoch) is not None:
            for tracker in self.trackers:
                tracker.log(event.member, epoch, event.metrics)

    def close(
        self, status: Status, results: Mapping[str, Any], files: Sequence[Path], *, complete: Sequence[int]
    ) -> None:
        """End the runs in the trackers, after all epochs of the members in `complete`, and report what was lost."""
        seconds = CLOSE_SECONDS if status == "finished" else STOP_SECONDS
        end = time.monotonic() + seconds
        for tracker in self.trackers:
            tracker.calls.put(partial(tracker.close, status, results, files, complete))
        for tracker in self.trackers:
            tracker.wait(seconds, end)


class RunTracker:
    """One tracker of a run: an object for each member and one for the ensemble, which one thread creates and calls.

    A call that fails is repeated with the next epoch, in order, so that a tracker that works again gets all numbers.
    """

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self.slug = name if name in BUILT_IN else "tracker-" + re.sub(r"\W", "-", name)
        self.objects: dict[int | None, Tracker] = {}
        self.states: dict[int | None, StoredTracker] = {}
        self.pending: dict[int, dict[int, Mapping[str, float]]] = {}  # by member and epoch
        self.last: dict[int | None, dict[str, Any]] = {}  # the last numbers of each member
        self.missing: set[tuple[int, int]] = set()  # members and epochs that the tracker does not have
        self.has_reported = self.has_ended = False
        self.calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        if is_rank_zero():
            self.calls.put(partial(self._object, ENSEMBLE))
        self.thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)  # it may hang
        self.thread.start()

    def log(self, member: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Queue the numbers of an epoch, unless the tracker is far behind."""
        self.missing.add((member, epoch))
        if self.calls.qsize() < QUEUE_SIZE:
            self.calls.put(partial(self._log, member, epoch, metrics))

    def wait(self, seconds: float, end: float) -> None:
        """Wait until the thread ends, until the time `end` of `time.monotonic`, and report what went wrong."""
        self.thread.join(max(0.0, end - time.monotonic()))
        if self.thread.is_alive():
            self.has_ended = True  # it calls the tracker no more, because the next training may
            self._report(f"did not finish within {seconds:g} s and was left behind")
        if self.missing:
            logger.warning(
                "The tracker %r lacks the numbers of %d epochs of members. The logs in the run folder are complete",
                self.name,
                len(self.missing),
            )

    def close(self, status: Status, results: Mapping[str, Any], files: Sequence[Path], complete: Sequence[int]) -> None:
        """Send what is missing, and end all members, then the ensemble with the files."""
        for member in sorted({*complete, *self.pending}):
            self._try(self._send, member, complete=member in complete)
        for each in sorted(self.objects, key=lambda member: (member is ENSEMBLE, member or 0)):
            self._try(self._close, each, status, results, files)
        self.has_ended = True

    def _work(self) -> None:
        while not self.has_ended:
            self._try(self.calls.get())

    def _try(self, call: Callable[..., object], *arguments: Any, **options: Any) -> None:
        try:
            if not self.has_ended:
                call(*arguments, **options)
        except (Exception, SystemExit) as error:  # libraries raise anything
            self._report(f"failed: {type(error).__name__}: {first_line(error)}")

    def _log(self, member: int, epoch: int, metrics: Mapping[str, float]) -> None:
        self.pending.setdefault(member, {})[epoch] = metrics
        self._send(member)

    def _send(self, member: int, *, complete: bool = False) -> None:
        """Send the epochs that the tracker lacks, those of an earlier process from the log in the run folder."""
        pending = self.pending.setdefault(member, {})
        last = max(pending, default=0)
        if complete:
            last = max(last, self.run.progress(member).epoch)
            if self._state(member).step >= last:
                return
        tracker = self._object(member)
        epochs = range(self._state(member).step + 1, last + 1)
        if not pending.keys() >= set(epochs):
            pending |= {epoch: values for epoch, values in self._stored(member) if epoch in epochs} | pending
        for epoch, metrics in sorted(pending.items()):
            if epoch in epochs:
                if self.has_ended:
                    return
                values = {name.replace(" ", "/", 1): value for name, value in metrics.items()}
                tracker.log(values, epoch)
                self.last[member] = {"epoch": epoch, **values}
                self._save(member, self._state(member).id, epoch, durable=not getattr(tracker, "buffers", False))
            del pending[epoch]
            self.missing.discard((member, epoch))

    def _close(self, member: int | None, status: Status, results: Mapping[str, Any], files: Sequence[Path]) -> None:
        summary = {**_summary(self.run), **results} if member is ENSEMBLE else self.last.get(member, {})
        with TemporaryDirectory() as folder:
            copies = self._copies(files, Path(folder)) if member is ENSEMBLE else []
            self.objects[member].close({**summary, "status": status}, copies)
        self._save(member, self._state(member).id, self._state(member).step)

    def _object(self, member: int | None) -> Tracker:
        """Return the object of a member, or of the ensemble; a new one continues the run of an earlier process."""
        if member not in self.objects:
            parent = None if member is ENSEMBLE else self._parent()
            recipe = self.run.recipe if member is ENSEMBLE else self.run.recipe.for_member(member)
            name, stored = Path(str(self.run)).resolve().name, self._state(member)
            module, _, attribute = tracker_target(self.name).partition(":")
            tracker: Tracker = getattr(import_module(module), attribute)()
            tracked = TrackedRun(name, member, recipe.run.group, self._folder(member), stored.id, parent)
            run_id = tracker.start(tracked, flatten(recipe.to_dict()))
            self._save(member, run_id, stored.step if run_id == stored.id else 0)  # 0: it begins a new run
            self.objects[member] = tracker
        return self.objects[member]

    def _parent(self) -> str | None:
        """Return the id of the ensemble; on a mesh, the first process starts it."""
        end = time.monotonic() + PARENT_WAIT_S
        if is_rank_zero():
            self._object(ENSEMBLE)
        while not self.run.store.has(self._file(ENSEMBLE)) and time.monotonic() < end:
            time.sleep(0.1)
        return self._state(ENSEMBLE).id

    def _state(self, member: int | None) -> StoredTracker:
        file = self._file(member)
        if member in self.states or not self.run.store.has(file):
            return self.states.get(member, StoredTracker())
        advice = "delete it; the tracker then begins a new run"
        return read_shape(StoredTracker, self.run.store.get_json(file), self.run.store.root / file, advice)

    def _save(self, member: int | None, run_id: str | None, step: int, *, durable: bool = True) -> None:
        """Record what the tracker has, in the run folder if it keeps that after a kill."""
        tree, origin = {"id": run_id, "step": step}, f"what {tracker_target(self.name)}.start returned"
        self.states[member] = read_shape(StoredTracker, tree, origin, "return such an id")
        if durable:
            self.run.store.put_json(self._file(member), asdict(self.states[member]))

    def _file(self, member: int | None) -> str:
        return f"trackers/{self.slug}/{_part(member)}.json"

    def _folder(self, member: int | None) -> Path | None:
        """Return the folder for the files of a tracker, after a check that no symbolic link leads out of the run."""
        store, parts = self.run.store, (self.slug, _part(member))
        if not isinstance(store, LocalStore):
            return None
        for length in (1, 2):
            with suppress(FileNotFoundError), open_folder(store.root, parts[:length]):
                pass
        return store.root.resolve().joinpath(*parts)

    def _stored(self, member: int) -> Iterable[tuple[int, dict[str, float]]]:
        try:
            return stored_epochs(self.run, member).items()
        except PlateauxError as problem:
            self._report(f"does not get earlier epochs of member {member}: {first_line(problem)}")
            return ()

    def _copies(self, files: Sequence[Path], folder: Path) -> list[Path]:
        """Copy files of the caller, and of the run folder, which may be remote or contain symbolic links."""
        contents = {name: self.run.store.get(name) for name in self.run.store.names() if FILES.fullmatch(name)}
        contents |= {file.name: file.read_bytes() for file in files}
        for name, content in contents.items():
            write_atomic(folder / name, content)
        return [folder / name for name in contents]

    def _report(self, problem: str) -> None:
        if not self.has_reported:
            self.has_reported = True
            logger.warning(
                "The tracker %r %s. Training is not affected. Fix the cause and run the same command again to send "
                "what is missing, or leave the tracker out of run.trackers",
                self.name,
                problem,
            )


def _part(member: int | None) -> str:
    return "ensemble" if member is ENSEMBLE else str(member)


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
def track(run: Run, executor: Collectives) -> Iterator[RunTrackers]:
    """Start the trackers of a run, if this process owns some, and close them when the block ends."""
    trackers = RunTrackers(run, run.recipe.run.trackers if executor.is_writer() else ())
    status: Status = "failed"
    try:
        yield trackers
        status = "finished"
    except (Interrupted, KeyboardInterrupt):
        status = "stopped"
        raise
    finally:
        is_alone = rank_and_world_size()[1] == 1
        trackers.close(status, {}, [], complete=range(run.recipe.members if is_alone else 0))


def log_results(
    run: RunLike,
    results: Iterable[MetricResult] = (),
    *,
    files: Sequence[str | Path] = (),
) -> None:
    """Add results and files, such as a report, to what the trackers of a run have.

    Args:
        run: A run, its folder, or its URL.
        results: What `plateaux.evaluate` returned; the values of the ensemble become part of its summary.
        files: Files to add to those of the run folder: recipe.toml, environment.json, and report.*.
    """
    opened = Run.open(run)
    check_trackers(opened.recipe, opened.components)
    values: dict[str, float] = {}
    for result in results:
        with suppress(KeyError):  # it has one value per class or bin
            values[f"{result.split}/{result.metric}"] = result.value
    trackers = RunTrackers(opened, opened.recipe.run.trackers)
    trackers.close("finished", values, [Path(file) for file in files], complete=())


def _summary(run: Run) -> dict[str, Any]:
    """Return what is known of the ensemble without an evaluation."""
    try:
        progress = run.all_progress()
    except PlateauxError:  # the run is damaged, which training reports
        return {}
    finished = sum(each.finished for each in progress)
    epoch = max(each.epoch for each in progress)
    return {"epoch": epoch, "members/finished": finished, "seconds": sum(each.seconds for each in progress)}
