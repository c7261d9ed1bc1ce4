"""Run one job of a run: train its members, or partition the training samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from plateaux.config.builders.data import on_device
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.executor import Executor
from plateaux.core.process_info import is_rank_zero
from plateaux.core.progress import Progress
from plateaux.core.runtime import configure_runtime, get_device
from plateaux.evaluation.loaded_run import load_members
from plateaux.storage.feature_cache import with_cached_features
from plateaux.storage.member_writer import MemberWriter, write_member
from plateaux.storage.run import Run, partition_summary_path
from plateaux.training.job_records import JobRecorder, record_job
from plateaux.training.jobs import Job
from plateaux.training.loop.trainer import Trainer
from plateaux.training.partition import assign_samples
from plateaux.training.planning import remaining_part

EXIT_GRACE_S = 60.0  # a process on a lost node may need this long to notice, and to release its lock


@dataclass(frozen=True, slots=True)
class JobRunner:
    """Runs jobs of one run in the process that calls it; another process gets it without the executor of this one."""

    root: str
    experiment: Experiment
    executor: Executor | None = None  # None: the one of the recipe
    session: str = ""  # of the call of `train`, which may replace the claims of its own processes that died

    def __reduce__(self) -> tuple[Any, ...]:
        return JobRunner, (self.root, self.experiment, None, self.session)

    @property
    def recipe(self) -> Recipe:
        return self.experiment.recipe

    def __call__(self, job: Job, progress: Progress, *, device: str | None = None, processes: int = 1) -> None:
        """Run a job; `processes` is the number of processes that share this machine."""
        configure_runtime(processes=processes, threads=self.recipe.executor.threads)
        run = replace(Run.open(self.root), experiment=self.experiment)
        executor = self.executor or self.experiment.executor()
        with record_job(run, job, progress, enabled=executor.is_remote and is_rank_zero()) as recorder:
            if job.kind == "assign":
                _partition_samples(run, job, recorder.progress)
            else:
                self._train(run, job, executor, recorder, device)

    def _train(self, run: Run, job: Job, executor: Executor, recorder: JobRecorder, device: str | None) -> None:
        local_members = [job.members[row] for row in executor.local_members(len(job.members))]
        method = self.experiment.method()
        writers: dict[int, MemberWriter] = {}
        with ExitStack() as stack, _deterministic(self.recipe.train.deterministic):
            if executor.is_writer():
                for number in local_members:
                    timeout = EXIT_GRACE_S if executor.is_remote else 0
                    writer = write_member(run, number, session=self.session, timeout=timeout)
                    writers[number] = stack.enter_context(writer)
            executor.barrier()  # all members are claimed before the progress is read, so all processes read the same
            progress = {number: run.progress(number) for number in job.members}
            remaining = remaining_part(job, progress, is_joint=method.is_joint)
            if remaining is None:
                return
            recorder.set_start(remaining.start)
            local_members = [number for number in local_members if number in remaining.members]
            torch_device = get_device(device or executor.device)
            data = with_cached_features(self.recipe, self.experiment.training_data, self.experiment.components)
            data = on_device(data, torch_device)
            finished: Sequence[nn.Module] = ()
            if local_members and method.member_order == "sequential":
                finished = load_members(run, range(local_members[0]))
            Trainer(
                run,
                data,
                remaining,
                local_members,
                writers,
                executor,
                torch_device,
                recorder.progress,
                finished_members=finished,
            ).fit()


def _partition_samples(run: Run, job: Job, progress: Progress) -> None:
    """Partition the training samples once; the other processes of a mesh read the result from the run folder."""
    partition = run.experiment.method().partition
    assert partition is not None
    if is_rank_zero() and not run.store.has(partition_summary_path(job.stop)):
        for folder in ("sharpness", "sam_sets"):  # all scores are written, so no other process writes here now
            run.store.remove_partial(folder)
        assign_samples(run, partition, job.stop, progress, members=job.members)


@contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    import torch

    if not enabled or torch.are_deterministic_algorithms_enabled():
        yield  # nothing changes: the function below imports the compiler of torch, which takes seconds
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
