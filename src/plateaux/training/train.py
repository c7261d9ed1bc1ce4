"""Train: plan what is missing, carry it out, plan again.

    run = train(Recipe.load("recipes/quickstart.toml"), out="runs/quickstart")

A job takes one member, or a group that steps side by side, from a checkpoint to an epoch. Whatever ends it early, the
next plan begins where its last checkpoint lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from plateaux.config.builders.data import build_training_data
from plateaux.config.builders.model import build_member
from plateaux.config.builders.training import build_executor, build_method
from plateaux.config.components import Components, Model
from plateaux.config.recipe import Recipe
from plateaux.core.errors import PlateauxError, RecipeError, RunError
from plateaux.core.executor import Executor, Failure, all_reduce_max
from plateaux.core.method import LossFn
from plateaux.core.progress import Message, Progress, log_messages
from plateaux.core.runtime import is_rank_zero
from plateaux.data.sources import DataSplits, Source
from plateaux.storage.feature_cache import prepare_features, training_sources, with_cached_features
from plateaux.storage.remote_fs import parse_address
from plateaux.storage.run import Run, RunLike
from plateaux.storage.run_info import AutotuneInfo, DataInfo, RunInfo
from plateaux.training import branching
from plateaux.training.autotune import autotune
from plateaux.training.checks import check
from plateaux.training.job_runner import JobRunner
from plateaux.training.partition import scoring_batch
from plateaux.training.planning import pending_jobs

ATTEMPTS = 3  # how often a job whose process died is tried before the run is given up


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data: DataSplits | None = None,
    model: Model | None = None,
    loss: LossFn | None = None,
    unlabeled: Source | None = None,
    trust: Sequence[str] = (),
    branch_from: RunLike | None = None,
    progress: Progress = log_messages,
) -> Run:
    """Train the missing part of a run and return the run. The same call again does only the remaining work.

    Args:
        recipe: What to train.
        out: The run folder, or its URL.
        data, model, loss: Python objects that replace those named in the recipe.
        unlabeled: Samples whose labels are not used, for methods that need them.
        trust: Modules whose functions the recipe may call.
        branch_from: A run, its folder, or its URL. Members start from its state at the first data partition; both
            runs must be equal up to that point.
        progress: Called with progress events.
    """
    components = Components(data, model, loss, unlabeled, tuple(trust))
    joint = check(recipe, components)
    executor = build_executor(recipe, components)
    if joint and all_reduce_max(executor, int(not executor.local_members(recipe.members))):
        raise RecipeError(
            f"members of {recipe.method.name!r} meet at every step, so every process of the mesh must hold one: "
            f"use at most {recipe.members} x executor.data_parallel processes"
        )
    other = None if branch_from is None else Run.open(branch_from)  # before anything is written
    run = _open(recipe, out, executor, components, progress)
    if other is not None and is_rank_zero():
        branching.branch_from(run, other, components)
    executor.barrier()
    if recipe.model.cache_features:
        seen = with_cached_features(run.resolved_recipe(), build_training_data(recipe, components), components)
        prepare_features(training_sources(recipe, seen), executor)
    work = JobRunner(str(out), run.resolved_recipe(), components)
    with closing(executor):
        lost = _run_jobs(run, executor, work, components, progress)
    if lost:
        raise _raise_failures(lost)
    _tidy(run, executor)
    return run


def _run_jobs(
    run: Run, executor: Executor, work: JobRunner, components: Components, progress: Progress
) -> list[Failure]:
    """Launch what is missing until nothing is, or nothing can be done; return what failed for good."""
    attempts, lost = 1, list[Failure]()
    while True:
        jobs = pending_jobs(
            run, **components.keywords(), without={number for failure in lost for number in failure.job.members}
        )
        executor.barrier()  # nobody begins before everybody has planned: a decision begun would change the plan
        if not jobs:
            break
        failures = executor.launch(jobs, work, progress)
        failed = all_reduce_max(executor, int(bool(failures)))  # nobody plans before everybody has written
        if failures and attempts < ATTEMPTS and any(failure.died for failure in failures):
            attempts += 1
            died = sum(failure.died for failure in failures)
            progress(Message(f"{died} process(es) died; planning the remaining jobs again"))
        elif failures:
            lost += failures
            if run.recipe.run.min_members is None:
                break
        elif failed:
            raise RunError(
                "Members held by another process failed; those held here are done, or kept as far as they are"
            )
    return lost


def _open(recipe: Recipe, out: str | Path, executor: Executor, components: Components, progress: Progress) -> Run:
    """Begin the run in one process; the others of a mesh find it there."""
    if recipe.run.tensorboard and parse_address(out) is not None:
        raise RecipeError(f"TensorBoard's files are appended to, which {out} cannot; leave out run.tensorboard")
    if is_rank_zero():
        data = build_training_data(recipe, components)
        fresh = Run.begin(out, recipe, RunInfo(DataInfo.from_splits(data)))
        if fresh.info.autotune is None:
            chosen = autotune(recipe, components, progress)
            if build_method(recipe, 0, components).partition is not None:
                chosen["scoring_batch"] = scoring_batch(recipe, data, build_member(recipe, data, 0, components))
            if chosen:
                fresh.with_autotune(AutotuneInfo.from_dict(chosen))
    executor.barrier()
    return replace(Run.open(out), recipe=recipe)


def _raise_failures(failures: list[Failure]) -> PlateauxError:
    if len(failures) == 1:
        return (
            failures[0].problem
            if isinstance(failures[0].problem, PlateauxError)
            else RunError(str(failures[0].problem))
        )
    lines = [f"{failure.job}: {failure.problem}" for failure in failures]
    return RunError(
        "Some jobs failed; the others went on. Run the same command again for what is missing:\n  " + "\n  ".join(lines)
    )


def _tidy(run: Run, executor: Executor) -> None:
    """Delete the resume states of a run that is finished, unless they are wanted, and what killed writers left."""
    if is_rank_zero():
        for number, status in enumerate(run.all_progress()):
            run.store.remove_partial(f"members/{number}")
            if run.recipe.run.keep_checkpoints == "none" and (status.checkpoints or status.partition_checkpoint):
                status = replace(status, checkpoints=(), partition_checkpoint=None)
                run.commit(number, status)
            run.clear(number, status)
    executor.barrier()
