"""Plan the jobs that are missing: a pure function of a recipe and the progress of its members.

A job never blocks on another job. To restart a run, plan it again. A data partition divides the training: one job per
member trains up to it and stores the sharpness of the samples, one job partitions the samples, and one job per member
continues.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from plateaux.config.recipe import Recipe
from plateaux.core.errors import RunError
from plateaux.storage.run import MemberProgress, Run, RunLike
from plateaux.training.jobs import Job, PartitionStatus, Position
from plateaux.training.partition import partition_statuses


def plan(
    recipe: Recipe,
    progress: Sequence[MemberProgress],
    *,
    is_joint: bool = False,
    is_sequential: bool = False,
    partitions: Sequence[PartitionStatus] = (),
    without: Collection[int] = (),
) -> list[Job]:
    """Return the jobs that are missing, members with the most progress first.

    Joint members continue together from the last checkpoint that all of them have. Other members continue
    independently, or as a group if they are at the same position and one process holds them. No member trains past a
    data partition that has not been computed. Sequential members start when all members before them have finished, so
    the plan contains one of them. Members in `without` have failed; a partition is computed without them if the recipe
    allows it with `run.min_members`.
    """
    excluded = {*without, *(number for partition in partitions for number in partition.without)}
    missing = [number for number, status in enumerate(progress) if not status.finished and number not in excluded]
    if all(status.finished for status in progress):
        return []
    if is_sequential:
        first = next(number for number, status in enumerate(progress) if not status.finished)
        missing = [first] if first in missing else []
    upcoming = _next_partition(recipe, progress, partitions)
    if upcoming is not None:
        missing = [n for n in missing if progress[n].position < (upcoming.epoch, 0) or n not in upcoming.scored]
        if not missing:
            scored = tuple(sorted(upcoming.scored - excluded))
            required = recipe.run.min_members if excluded else len(progress)
            is_possible = required is not None and len(scored) >= required
            return [Job(scored, (upcoming.epoch, 0), upcoming.epoch, "assign")] if is_possible else []
    if not missing:
        return []
    if is_joint:
        if any(status.finished for status in progress) and any(not progress[n].checkpoints for n in missing):
            raise RunError(
                f"Members of {recipe.method.name!r} are trained jointly, so no member can be added after others have "
                "finished. Train the larger ensemble with another --out"
            )
        position = _last_common_position(progress)
        return [Job(tuple(range(len(progress))), position, _stop_epoch(recipe, position, partitions))]
    if _runs_members_separately(recipe):
        groups: list[tuple[tuple[int, ...], Position]] = [((n,), progress[n].position) for n in missing]
    else:
        positions = sorted({progress[number].position for number in missing}, reverse=True)
        groups = [(tuple(n for n in missing if progress[n].position == position), position) for position in positions]
    return [Job(members, position, _stop_epoch(recipe, position, partitions)) for members, position in groups]


def remaining_part(job: Job, progress: Mapping[int, MemberProgress], *, is_joint: bool = False) -> Job | None:
    """Return the part of a job that is left at the current progress, or None; thus a job may run twice."""
    if job.kind == "assign" or not job.members:
        return job
    if is_joint:
        position = _last_common_position([progress[number] for number in job.members])
        return None if all(progress[n].finished for n in job.members) else replace(job, start=position)
    members = tuple(number for number in job.members if not progress[number].finished)
    positions = {progress[number].position for number in members}
    if len(positions) != 1:  # the members are no longer at one position, or all have finished: plan again
        return job if members else None
    (position,) = positions
    return replace(job, members=members, start=position) if position <= (job.stop, 0) else None


def pending_jobs(
    run: RunLike,
    *,
    without: Collection[int] = (),
) -> list[Job]:
    """Return the jobs that a run still needs, without training anything.

    Args:
        run: A run, its folder, or its URL.
        without: Ids of members that have failed.
    """
    opened = run if isinstance(run, Run) else Run.open(run)
    method = opened.experiment.method()
    return plan(
        opened.recipe,
        opened.all_progress(),
        is_joint=method.is_joint,
        is_sequential=method.member_order != "parallel",
        partitions=partition_statuses(opened, method.partition),
        without=without,
    )


def _runs_members_separately(recipe: Recipe) -> bool:
    """Return whether each independent member is a job of its own, which any process can run."""
    executor = recipe.executor
    is_pool = executor.name == "local" and (executor.mode == "offload" or executor.processes > 1)
    return executor.name == "ray" or is_pool


def _stop_epoch(recipe: Recipe, position: Position, partitions: Sequence[PartitionStatus]) -> int:
    """Return the epoch at which a job from this position ends: at the next data partition, or at the end."""
    stops = (
        partition.epoch
        for partition in partitions
        if position < (partition.epoch, 0) or (position == (partition.epoch, 0) and partition.assigned is None)
    )
    return next(stops, recipe.train.epochs)


def _next_partition(
    recipe: Recipe, progress: Sequence[MemberProgress], partitions: Sequence[PartitionStatus]
) -> PartitionStatus | None:
    """Return the first data partition that has not been computed."""
    for partition in partitions:
        if partition.assigned is None:
            passed = [
                n for n, status in enumerate(progress) if status.finished or status.position > (partition.epoch, 0)
            ]
            if passed:
                raise RunError(
                    f"Member {passed[0]} has trained past the data partition after epoch {partition.epoch}, but its "
                    "result is missing from the folder `sam_sets`. Restore the folder, or train with another --out"
                )
            return partition
        if partition.assigned != len(progress):
            raise RunError(
                f"The samples were partitioned for {partition.assigned} members of {recipe.method.name!r} after epoch "
                f"{partition.epoch}, but the recipe now has {len(progress)}. Members cannot be added or removed "
                "after a data partition. Choose another --out"
            )
    return None


def _last_common_position(progress: Sequence[MemberProgress]) -> Position:
    positions = [{(epoch, step) for epoch, step, _ in status.checkpoints} | {(0, 0)} for status in progress]
    return max(set.intersection(*positions))
