"""What is missing: a pure function from a recipe and where its members stand to the jobs still to be done.

Nobody waits inside a job, and restarting anything is planning again. A meeting ends jobs and starts others: every
member trains to it and leaves its scores, one job decides, and every member goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from plateaux.config.builders.training import build_method
from plateaux.config.components import Components, Model
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RunError
from plateaux.core.method import LossFn
from plateaux.data.sources import DataSplits, Source
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
    """Return the jobs that are missing, those that began first first.

    Members that see each other go on together from the last place all of them have kept. Others go on alone, or side by
    side where they stand at the same place and one process holds them. Nobody goes past a meeting that is not decided.
    Members in turn begin when all before them have finished: the plan is then about one of them.
    Members in `without` are given up for now; a meeting goes ahead without them where the recipe's min_members lets it.
    """
    absent = {*without, *(number for meeting in partitions for number in meeting.without)}
    missing = [number for number, each in enumerate(progress) if not each.finished and number not in absent]
    if all(each.finished for each in progress):
        return []
    if is_sequential:
        first = next(number for number, each in enumerate(progress) if not each.finished)
        missing = [first] if first in missing else []
    ahead = _next(recipe, progress, partitions)
    if ahead is not None:
        missing = [n for n in missing if progress[n].position < (ahead.epoch, 0) or n not in ahead.scored]
        if not missing:
            there = tuple(sorted(ahead.scored - absent))
            enough = recipe.run.min_members if absent else len(progress)
            able = enough is not None and len(there) >= enough
            return [Job(there, (ahead.epoch, 0), ahead.epoch, "assign")] if able else []
    if not missing:
        return []
    if is_joint:
        if any(each.finished for each in progress) and any(not progress[n].checkpoints for n in missing):
            raise RunError(
                f"members of {recipe.method.name!r} learn together, so none can join those that have finished; "
                "choose another --out for the larger ensemble"
            )
        place = _common(progress)
        return [Job(tuple(range(len(progress))), place, _stop(recipe, place, partitions))]
    if _alone(recipe):
        groups: list[tuple[tuple[int, ...], Position]] = [((n,), progress[n].position) for n in missing]
    else:
        places = sorted({progress[number].position for number in missing}, reverse=True)
        groups = [(tuple(n for n in missing if progress[n].position == place), place) for place in places]
    return [Job(members, place, _stop(recipe, place, partitions)) for members, place in groups]


def remaining_part(job: Job, progress: Mapping[int, MemberProgress], *, is_joint: bool = False) -> Job | None:
    """Return what is left of a job, where its members stand now; None: nothing. So it may be carried out twice."""
    if job.kind == "assign" or not job.members:
        return job
    if is_joint:
        place = _common([progress[number] for number in job.members])
        return None if all(progress[n].finished for n in job.members) else replace(job, start=place)
    members = tuple(number for number in job.members if not progress[number].finished)
    places = {progress[number].position for number in members}
    if len(places) != 1:  # those that stood side by side do not any more: another plan is needed, or nobody is left
        return job if members else None
    (place,) = places
    return replace(job, members=members, start=place) if place <= (job.stop, 0) else None


def _alone(recipe: Recipe) -> bool:
    """Say whether independent members are jobs of their own, which may be carried out anywhere."""
    here = recipe.executor.name == "local"
    return recipe.executor.name == "ray" or (
        here and (recipe.executor.mode == "offload" or recipe.executor.processes > 1)
    )


def _stop(recipe: Recipe, place: Position, meetings: Sequence[PartitionStatus]) -> int:
    """Return where a job from this place ends: at every meeting, for there members get new notes."""
    ends = (m.epoch for m in meetings if place < (m.epoch, 0) or (place == (m.epoch, 0) and m.assigned is None))
    return next(ends, recipe.train.epochs)


def _next(
    recipe: Recipe, progress: Sequence[MemberProgress], meetings: Sequence[PartitionStatus]
) -> PartitionStatus | None:
    """Return the first meeting that is still to come."""
    for meeting in meetings:
        if meeting.assigned is None:
            passed = [n for n, each in enumerate(progress) if each.finished or each.position > (meeting.epoch, 0)]
            if passed:
                raise RunError(
                    f"Member {passed[0]} has gone past the meeting after epoch {meeting.epoch}, but what was decided "
                    "there is gone from the folder `notes`; put it back, or start again in another --out"
                )
            return meeting
        if meeting.assigned != len(progress):
            raise RunError(
                f"{meeting.assigned} members of {recipe.method.name!r} have met after epoch {meeting.epoch}; the "
                "recipe "
                f"now has {len(progress)}, and none can join or leave after a meeting. Choose another --out"
            )
    return None


def _common(progress: Sequence[MemberProgress]) -> Position:
    kept = [{(epoch, step) for epoch, step, _ in each.checkpoints} | {(0, 0)} for each in progress]
    return max(set.intersection(*kept))


def pending_jobs(
    run: RunLike,
    *,
    data: DataSplits | None = None,
    model: Model | None = None,
    loss: LossFn | None = None,
    unlabeled: Source | None = None,
    trust: Sequence[str] = (),
    without: Collection[int] = (),
) -> list[Job]:
    """Return the jobs that a run still needs, without training anything.

    Args:
        run: A run, its folder, or its URL.
        data, model, loss, unlabeled: The objects that the run is trained with, if they are passed in Python.
        trust: Modules whose functions the recipe may call.
        without: Ids of members that failed and are left out for now.
    """
    opened = run if isinstance(run, Run) else Run.open(run)
    method = build_method(opened.recipe, 0, Components(data, model, loss, unlabeled, tuple(trust)))
    partitions = partition_statuses(opened, method.partition)
    order = {"is_joint": method.is_joint, "is_sequential": method.member_order != "parallel"}
    return plan(opened.recipe, opened.all_progress(), **order, partitions=partitions, without=without)
