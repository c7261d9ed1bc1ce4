"""Run one job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from plateaux.config.builders.data import build_training_data, on_device
from plateaux.config.builders.training import build_executor, build_method
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe
from plateaux.core.executor import Executor
from plateaux.core.progress import Progress
from plateaux.core.runtime import configure_runtime, get_device, is_rank_zero
from plateaux.evaluation.loading import load_members
from plateaux.storage.feature_cache import with_cached_features
from plateaux.storage.run import Run, partition_summary_path
from plateaux.training.job_records import JobRecorder, record_job
from plateaux.training.jobs import Job
from plateaux.training.partition import assign_samples
from plateaux.training.planning import remaining_part
from plateaux.training.trainer import Trainer

EXIT_GRACE_S = 60.0  # seconds that a process on a lost node may take to notice, and to let go of its member


@dataclass(frozen=True, slots=True)
class JobRunner:
    """Carries out jobs of one run, in whatever process it is called."""

    root: str
    recipe: Recipe
    components: Components = NO_COMPONENTS

    def __call__(self, job: Job, progress: Progress, *, device: str | None = None, processes: int = 1) -> None:
        """Take the members of a job from where they stand to where it stops."""
        configure_runtime(processes=processes, threads=self.recipe.executor.threads)
        run = replace(Run.open(self.root), recipe=self.recipe)
        executor = build_executor(self.recipe, self.components)
        with record_job(run, job, progress, enabled=executor.is_remote and is_rank_zero()) as recorder:
            if job.kind == "assign":
                _assign_samples(run, job, self.components, recorder.progress)
            else:
                self._train(run, job, executor, recorder, device)

    def _train(self, run: Run, job: Job, executor: Executor, recorder: JobRecorder, device: str | None) -> None:
        held = [job.members[row] for row in executor.local_members(len(job.members))]
        method = build_method(self.recipe, 0, self.components)
        with ExitStack() as locks, _deterministic(self.recipe.train.deterministic):
            if executor.is_writer():
                for number in held:
                    locks.enter_context(run.lock(number, timeout=EXIT_GRACE_S if executor.is_remote else 0))
                    run.store.remove_partial(f"members/{number}")
            executor.barrier()  # or one who waited for a lock would find members further on than the others did
            left = remaining_part(
                job, {number: run.progress(number) for number in job.members}, is_joint=method.is_joint
            )
            if left is None:
                return
            recorder.set_start(left.start)
            held = [number for number in held if number in left.members]
            place = get_device(device or executor.device)
            data = on_device(
                with_cached_features(self.recipe, build_training_data(self.recipe, self.components), self.components),
                place,
            )
            follows = bool(held) and method.member_order == "sequential"
            earlier = load_members(run, data, range(held[0]), self.components) if follows else []
            Trainer(run, data, left, held, executor, place, self.components, recorder.progress, earlier=earlier).fit()


def _assign_samples(run: Run, job: Job, components: Components, progress: Progress) -> None:
    """Take the decision of a meeting, once: the other processes of a mesh find it in the folder."""
    rendezvous = build_method(run.recipe, 0, components).partition
    assert rendezvous is not None
    if is_rank_zero() and not run.store.has(partition_summary_path(job.stop)):
        for folder in ("sharpness", "sam_sets"):  # nobody writes there now: every member has left its scores
            run.store.remove_partial(folder)
        assign_samples(run, rendezvous, job.stop, progress, members=job.members)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
