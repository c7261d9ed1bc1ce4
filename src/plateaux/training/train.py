"""Train an ensemble: plan the missing jobs, run them, and plan again.

    run = train(Recipe.load("recipes/quickstart.toml"), out="runs/quickstart")

A job trains one member, or a group of members in lockstep, from a checkpoint to an epoch. If it ends early, the next
plan starts from its last checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import torch

from plateaux.config.builders.model import build_member
from plateaux.config.components import Components, Model
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DataError, Interrupted, PlateauxError, RecipeError, RunError
from plateaux.core.executor import Collectives, Executor, Failure, all_reduce_max
from plateaux.core.method import LossFn
from plateaux.core.process_info import is_rank_zero
from plateaux.core.progress import Message, Progress, ProgressEvent, log_messages
from plateaux.core.runtime import get_device
from plateaux.data.sources import DataSplits, Source
from plateaux.storage.feature_cache import prepare_features, training_sources, with_cached_features
from plateaux.storage.member_writer import drop_checkpoints, unnamed_objects
from plateaux.storage.open_run import resolved, without_stored_data
from plateaux.storage.remote_fs import parse_address
from plateaux.storage.run import Run, RunLike
from plateaux.storage.run_info import AutotuneInfo
from plateaux.storage.stored_data import read_stored_data, store_data
from plateaux.training import branching
from plateaux.training.autotune import autotune
from plateaux.training.callbacks import Callback, CallbackFailure, CallbackList, check_callbacks
from plateaux.training.class_weights import balance_classes
from plateaux.training.job_runner import JobRunner
from plateaux.training.model_check import check_data_and_model
from plateaux.training.partition import scoring_batch
from plateaux.training.planning import pending_jobs
from plateaux.training.recipe_rules import check
from plateaux.training.trackers import track

logger = logging.getLogger(__name__)
MAX_ATTEMPTS = 3  # at a job whose process died


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data: DataSplits | None = None,
    model: Model | None = None,
    loss: LossFn | None = None,
    unlabeled: Source | None = None,
    trust: Sequence[str] = (),
    download: bool = False,
    branch_from: RunLike | None = None,
    accept_changes: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: Progress = log_messages,
) -> Run:
    """Train the missing part of a run and return the run; the same call resumes a run that was interrupted.

    Args:
        recipe: What to train.
        out: The run folder, or its URL.
        data: Replaces the dataset named in the recipe. Data of `plateaux.from_arrays` are stored in the run folder.
        model: Replaces the model named in the recipe.
        loss: Replaces the loss named in the recipe.
        unlabeled: Samples whose labels are not used, for methods that need them.
        trust: Modules whose functions the recipe may call, and trackers that it may start, such as `wandb`.
        download: Allow downloads: of names `hf:user/name`, and of pretrained weights of timm.
        branch_from: A run, its folder, or its URL. Members start from the checkpoints that it wrote at its first data
            partition; both runs must train the same way up to it.
        accept_changes: Resume a run although its data or the code of its model have changed; the changes are recorded
            in the run.
        callbacks: Their methods are called in this process after epochs, checkpoints, and data partitions.
        progress: Called with progress events.
    """
    return train_experiment(
        Experiment(recipe, Components(data, model, loss, unlabeled, tuple(trust), download)),
        out,
        branch_from=branch_from,
        accept_changes=accept_changes,
        callbacks=callbacks,
        progress=progress,
    )


def train_experiment(
    experiment: Experiment,
    out: str | Path,
    *,
    branch_from: RunLike | None = None,
    accept_changes: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: Progress = log_messages,
) -> Run:
    """Train an experiment; see `train`."""
    recipe, components = experiment.recipe, experiment.components
    if components.data is None and (stored := read_stored_data(out)) is not None:
        experiment = Experiment(recipe, replace(components, data=stored))
    check_callbacks(callbacks)
    is_joint = check(experiment)
    experiment = balance_classes(experiment)
    executor = experiment.executor()
    if is_joint and all_reduce_max(executor, int(not executor.local_members(recipe.members))):
        raise RecipeError(
            f"Members of {recipe.method.name!r} share one loss, so every process of the mesh must hold a member. "
            f"Use at most {recipe.members} x executor.data_parallel processes"
        )
    session = uuid4().hex
    parent = None if branch_from is None else Run.open(branch_from)  # before anything is written
    run = _open(experiment, out, executor, progress, accept_changes=accept_changes)
    if parent is not None and is_rank_zero():
        branching.branch_from(run, parent, session=session)
    executor.barrier()
    run.check_weights()
    _prepare_features(run, executor)
    run_job = JobRunner(str(out), resolved(run), executor, session)
    with closing(executor), track(run, executor) as trackers:
        listeners = (progress, trackers.handle, CallbackList(run, callbacks if executor.is_writer() else ()).handle)
        try:
            failures = _run_jobs(run, executor, run_job, partial(_send, listeners))
        except Interrupted as stop:
            raise Interrupted(f"{stop}{_without_checkpoint(run)}") from None
        except CallbackFailure as failure:
            raise failure.problem from failure.__cause__
        if failures:
            raise _combine_failures(failures)
        _clean_up(run, executor, session)
    return without_stored_data(run)


def _send(listeners: Sequence[Progress], event: ProgressEvent) -> None:
    for listener in listeners:
        listener(event)


def _run_jobs(run: Run, executor: Executor, run_job: JobRunner, progress: Progress) -> list[Failure]:
    """Launch the missing jobs until none are left or none can run; return the failures that were not retried.

    Processes of a mesh make the same decisions: each learns which members failed, here or in another process.
    """
    attempts, has_failed = 1, False
    failed_jobs, failed_members = list[Failure](), set[int]()
    while True:
        jobs = pending_jobs(run, without=failed_members)
        logger.debug("pending jobs: %s", ", ".join(map(str, jobs)) or "none")
        executor.barrier()  # all processes must plan before one starts, because a data partition changes the plan
        if not jobs:
            break
        failures = executor.launch(jobs, run_job, progress)
        in_failed_jobs = _union(executor, {n for failure in failures for n in failure.job.members}, run.recipe.members)
        if failures and attempts < MAX_ATTEMPTS and any(failure.died for failure in failures):
            attempts += 1
            died = sum(failure.died for failure in failures)
            progress(Message(f"{died} process(es) died; planning the remaining jobs again"))
        elif in_failed_jobs:
            has_failed = True
            failed_jobs += failures
            # Others of the same job may have completed it.
            incomplete = pending_jobs(run, without=failed_members)
            failed_members |= in_failed_jobs & {number for job in incomplete for number in job.members}
            if run.recipe.run.min_members is None:
                break
    if has_failed and not failed_jobs:
        raise RunError(
            "Members of another process failed. The members of this process are finished or have a checkpoint; "
            "run the same command again to resume"
        )
    return failed_jobs


def _union(executor: Collectives, members: set[int], total: int) -> set[int]:
    """Return the members that any process names; all processes have written their files when this returns."""
    named = torch.zeros(total, dtype=torch.int64, device=executor.device)
    named[list(members)] = 1
    return set(executor.all_reduce({"named": named}, "max", group="world")["named"].nonzero().flatten().tolist())


def _open(
    experiment: Experiment,
    out: str | Path,
    executor: Collectives,
    progress: Progress,
    *,
    accept_changes: bool,
) -> Run:
    """Create the run folder in one process, and open it in all processes."""
    recipe, components = experiment.recipe, experiment.components
    if "tensorboard" in recipe.run.trackers and parse_address(out) is not None:
        raise RecipeError(
            f"TensorBoard appends to files, which the object store of {out} does not support; remove 'tensorboard' "
            "from run.trackers"
        )
    if is_rank_zero():
        data = experiment.training_data
        info = check_data_and_model(recipe, data, components, get_device(executor.device))
        run = Run.begin(out, experiment, info, accept_changes=accept_changes)
        if components.data is not None and components.data.keep_in_run:
            store_data(run, components.data)
        if run.info.autotune is None:
            tuned = autotune(experiment, progress)
            if experiment.method().partition is not None:
                tuned["scoring_batch"] = scoring_batch(recipe, data, build_member(recipe, data, 0, components))
            if tuned:
                run.with_autotune(AutotuneInfo.from_dict(tuned))
    executor.barrier()
    return replace(Run.open(out), experiment=experiment)


def _prepare_features(run: Run, executor: Collectives) -> None:
    """Compute the backbone features that training reads. The backbone is freed; a job holds its own."""
    if run.recipe.model.cache_features:
        data = with_cached_features(run.resolved_recipe(), run.experiment.training_data, run.components)
        prepare_features(training_sources(run.recipe, data), executor)


def _without_checkpoint(run: Run) -> str:
    """Return a sentence on the members that lose their progress, if any."""
    numbers = [number for number, each in enumerate(run.all_progress()) if not (each.checkpoints or each.finished)]
    listed = ", ".join(map(str, numbers))
    return f". These members have no checkpoint yet and start from the beginning: {listed}" if numbers else ""


def _combine_failures(failures: list[Failure]) -> PlateauxError:
    if len(failures) == 1 or all(isinstance(failure.problem, DataError) for failure in failures):
        problem = failures[0].problem  # the data are the same for all members
        return problem if isinstance(problem, PlateauxError) else RunError(str(problem))
    lines = [f"{failure.job}: {failure.problem}" for failure in failures]
    return RunError(
        "Some jobs failed, and the others are finished. Run the same command again to resume the failed ones:\n  "
        + "\n  ".join(lines)
    )


def _clean_up(run: Run, executor: Collectives, session: str) -> None:
    """Delete checkpoints of a finished run, unless the recipe keeps them, and what killed processes left."""
    if is_rank_zero():
        for number, progress in enumerate(run.all_progress()):
            has_checkpoints = bool(progress.checkpoints or progress.partition_checkpoint)
            drops = has_checkpoints and run.recipe.run.keep_checkpoints == "none"
            if drops or progress.claim or unnamed_objects(run.store, number, progress):
                drop_checkpoints(run, number, keep=not drops, session=session)
    executor.barrier()
