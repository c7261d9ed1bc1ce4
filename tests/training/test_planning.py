"""Planning as a table: from the progress of members to the missing jobs."""

from __future__ import annotations

import pytest

from plateaux.config.recipe import Recipe
from plateaux.core.errors import RunError
from plateaux.storage.run import MemberProgress
from plateaux.training.jobs import Job, PartitionStatus
from plateaux.training.planning import plan, remaining_part

NEW = MemberProgress()
DONE = MemberProgress(epoch=5, finished=True)


def at(*positions: tuple[int, int]) -> MemberProgress:
    """Return the progress of a member with checkpoints at these positions, the newest last."""
    checkpoints = tuple((epoch, step, f"{epoch}-{step}") for epoch, step in positions)
    return MemberProgress(*positions[-1], checkpoints=checkpoints)


def recipe(members: int, **executor: object) -> Recipe:
    return Recipe.from_dict(
        {
            "members": members,
            "data": {"name": "x"},
            "model": {"name": "x"},
            "train": {"epochs": 5},
            "executor": executor,
        }
    )


LOOP: dict[str, object] = {}
OFFLOAD = {"mode": "offload"}
POOL = {"processes": 2}
MESH = {"name": "mesh", "processes": 2}
INDEPENDENT = [
    ("nothing has started", LOOP, [NEW, NEW, NEW], [Job((0, 1, 2), (0, 0), 5)]),
    ("all have finished", LOOP, [DONE, DONE], []),
    ("one has finished", LOOP, [DONE, NEW, NEW], [Job((1, 2), (0, 0), 5)]),
    ("all at one position, independent", LOOP, [at((2, 3)), at((2, 3))], [Job((0, 1), (2, 3), 5)]),
    (
        "at different positions after a kill",
        LOOP,
        [at((2, 3)), at((2, 0)), at((2, 3))],
        [Job((0, 2), (2, 3), 5), Job((1,), (2, 0), 5)],
    ),
    (
        "most progress first",
        LOOP,
        [NEW, at((4, 0)), at((1, 9))],
        [Job((1,), (4, 0), 5), Job((2,), (1, 9), 5), Job((0,), (0, 0), 5)],
    ),
    ("trained but not finished", LOOP, [at((5, 0)), DONE], [Job((0,), (5, 0), 5)]),
    ("offloaded members are separate jobs", OFFLOAD, [NEW, DONE, NEW], [Job((0,), (0, 0), 5), Job((2,), (0, 0), 5)]),
    ("a pool runs separate jobs", POOL, [at((1, 2)), NEW], [Job((0,), (1, 2), 5), Job((1,), (0, 0), 5)]),
    ("a mesh runs one job", MESH, [NEW, NEW], [Job((0, 1), (0, 0), 5)]),
]
JOINT = [
    ("nothing has started", [NEW, NEW], [Job((0, 1), (0, 0), 5)]),
    ("all have finished", [DONE, DONE], []),
    ("all at one position", [at((1, 0), (2, 0)), at((1, 0), (2, 0))], [Job((0, 1), (2, 0), 5)]),
    ("one is ahead", [at((2, 0), (3, 0)), at((1, 0), (2, 0))], [Job((0, 1), (2, 0), 5)]),
    ("nothing in common", [at((3, 0)), at((2, 0))], [Job((0, 1), (0, 0), 5)]),
    ("one has just started", [at((0, 4)), NEW], [Job((0, 1), (0, 0), 5)]),
    (
        "killed while finishing",
        [MemberProgress(5, 0, finished=True, checkpoints=((5, 0, "x"),)), at((4, 0), (5, 0))],
        [Job((0, 1), (5, 0), 5)],
    ),
]


@pytest.mark.parametrize(("case", "executor", "progress", "jobs"), INDEPENDENT, ids=[case[0] for case in INDEPENDENT])
def test_jobs_of_independent_members(
    case: str, executor: dict[str, object], progress: list[MemberProgress], jobs: list[Job]
) -> None:
    assert plan(recipe(len(progress), **executor), progress) == jobs


@pytest.mark.parametrize(("case", "progress", "jobs"), JOINT, ids=[case[0] for case in JOINT])
def test_joint_members_continue_from_the_last_common_checkpoint(
    case: str, progress: list[MemberProgress], jobs: list[Job]
) -> None:
    assert plan(recipe(len(progress)), progress, is_joint=True) == jobs


def test_members_cannot_be_added_to_finished_joint_members() -> None:
    with pytest.raises(RunError, match="no member can be added"):
        plan(recipe(3), [DONE, DONE, NEW], is_joint=True)


def test_planning_is_pure() -> None:
    progress = [at((1, 2)), NEW]
    before = list(progress)
    assert plan(recipe(2), progress) == plan(recipe(2), progress)
    assert progress == before


def test_every_unfinished_member_is_in_exactly_one_job() -> None:
    progress = [NEW, DONE, at((1, 0)), at((1, 3)), at((1, 0)), NEW]
    jobs = plan(recipe(6), progress)
    assert sorted(member for job in jobs for member in job.members) == [0, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (Job((0,), (0, 0), 5), "train member 0 from epoch 0 to epoch 5"),
        (Job((0, 2), (3, 17), 5), "train members 0, 2 from epoch 3, step 17 to epoch 5"),
    ],
)
def test_the_text_of_a_job(job: Job, text: str) -> None:
    assert str(job) == text


UPCOMING = PartitionStatus(3)
PARTITIONS = [
    ("before it", LOOP, [NEW, NEW], [UPCOMING], [Job((0, 1), (0, 0), 3)]),
    (
        "one is at the partition without scores",
        LOOP,
        [at((3, 0)), at((1, 2))],
        [UPCOMING],
        [Job((0,), (3, 0), 3), Job((1,), (1, 2), 3)],
    ),
    ("one waits", POOL, [at((3, 0)), at((1, 2))], [PartitionStatus(3, frozenset({0}))], [Job((1,), (1, 2), 3)]),
    (
        "all have scored",
        POOL,
        [at((3, 0))] * 2,
        [PartitionStatus(3, frozenset({0, 1}))],
        [Job((0, 1), (3, 0), 3, "assign")],
    ),
    ("assigned", LOOP, [at((3, 0))] * 2, [PartitionStatus(3, frozenset({0, 1}), 2)], [Job((0, 1), (3, 0), 5)]),
    (
        "after it",
        LOOP,
        [at((4, 1)), at((3, 0))],
        [PartitionStatus(3, frozenset({0, 1}), 2)],
        [Job((0,), (4, 1), 5), Job((1,), (3, 0), 5)],
    ),
    (
        "the next one",
        LOOP,
        [at((3, 0))] * 2,
        [PartitionStatus(3, frozenset({0, 1}), 2), PartitionStatus(4)],
        [Job((0, 1), (3, 0), 4)],
    ),
    ("scores copied from a parent", LOOP, [NEW, NEW], [PartitionStatus(3, frozenset({0}))], [Job((0, 1), (0, 0), 3)]),
    ("at the very start", LOOP, [NEW, NEW], [PartitionStatus(0)], [Job((0, 1), (0, 0), 0)]),
    ("one starts again", LOOP, [DONE, NEW], [PartitionStatus(3, frozenset({0, 1}), 2)], [Job((1,), (0, 0), 3)]),
    (
        "one is behind",
        LOOP,
        [at((4, 0)), at((1, 0))],
        [PartitionStatus(3, frozenset({0, 1}), 2)],
        [Job((0,), (4, 0), 5), Job((1,), (1, 0), 3)],
    ),
    ("all done", LOOP, [DONE, DONE], [PartitionStatus(3, frozenset({0, 1}), 2)], []),
]


@pytest.mark.parametrize(
    ("executor", "progress", "partitions", "jobs"), [row[1:] for row in PARTITIONS], ids=[row[0] for row in PARTITIONS]
)
def test_no_member_trains_past_a_partition_that_is_not_computed(
    executor: dict[str, object], progress: list[MemberProgress], partitions: list[PartitionStatus], jobs: list[Job]
) -> None:
    assert plan(recipe(len(progress), **executor), progress, partitions=partitions) == jobs


def test_joint_members_reach_a_partition_together() -> None:
    progress = [at((3, 0)), at((3, 0))]
    jobs = plan(recipe(2), progress, is_joint=True, partitions=[PartitionStatus(3, frozenset({0}))])
    assert jobs == [Job((0, 1), (3, 0), 3)]


def test_the_text_of_jobs_at_a_partition() -> None:
    assert str(Job((1,), (3, 0), 3)) == "score samples for member 1 at epoch 3"
    assert str(Job((0, 1), (3, 0), 3, "assign")) == "assign samples for members 0, 1 at epoch 3"


def test_missing_sam_sets_and_added_members_are_rejected() -> None:
    with pytest.raises(RunError, match="trained past the data partition after epoch 3"):
        plan(recipe(2), [at((4, 0)), at((3, 0))], partitions=[UPCOMING])
    with pytest.raises(RunError, match="cannot be added or removed"):
        plan(recipe(3), [DONE, DONE, NEW], partitions=[PartitionStatus(3, frozenset({0, 1}), 2)])


# --- Failed members, jobs that run twice, shards

ON_RAY = {"name": "ray"}


def test_on_a_cluster_every_independent_member_is_a_job() -> None:
    assert plan(recipe(2, **ON_RAY), [NEW, NEW]) == [Job((0,), (0, 0), 5), Job((1,), (0, 0), 5)]
    assert plan(recipe(2, **ON_RAY), [NEW, NEW], is_joint=True) == [Job((0, 1), (0, 0), 5)]


def test_a_partition_waits_for_a_failed_member_unless_min_members_is_set() -> None:
    progress, scored = [at((3, 0)), at((3, 0)), NEW], [PartitionStatus(3, frozenset({0, 1}))]
    assert plan(recipe(3), progress, partitions=scored) == [Job((2,), (0, 0), 3)]
    assert plan(recipe(3), progress, partitions=scored, without={2}) == []
    few = recipe(3).replaced(run={"min_members": 2})
    assert plan(few, progress, partitions=scored, without={2}) == [Job((0, 1), (3, 0), 3, "assign")]
    assert plan(few.replaced(run={"min_members": 3}), progress, partitions=scored, without={2}) == []
    assert plan(few, progress, partitions=[PartitionStatus(3, frozenset({0}))], without={2}) == [Job((1,), (3, 0), 3)]


def test_a_member_excluded_by_a_partition_is_never_planned_again() -> None:
    scored = [PartitionStatus(3, frozenset({0, 1}), 3, frozenset({2}))]
    assert plan(recipe(3), [at((3, 0)), at((4, 0)), NEW], partitions=scored) == [
        Job((1,), (4, 0), 5),
        Job((0,), (3, 0), 5),
    ]
    assert plan(recipe(3), [DONE, DONE, NEW], partitions=scored) == []


@pytest.mark.parametrize(
    ("job", "progress", "is_joint", "remaining"),
    [
        (Job((0,), (0, 0), 5), [NEW], False, Job((0,), (0, 0), 5)),
        (Job((0,), (0, 0), 5, attempt=2), [at((2, 3))], False, Job((0,), (2, 3), 5, attempt=2)),
        (Job((0,), (0, 0), 5), [DONE], False, None),
        (Job((0,), (0, 0), 3), [at((4, 0))], False, None),
        (Job((0,), (0, 0), 3), [at((3, 0))], False, Job((0,), (3, 0), 3)),
        (Job((0, 1), (0, 0), 5), [at((2, 0)), at((2, 0))], False, Job((0, 1), (2, 0), 5)),
        (Job((0, 1), (2, 0), 5), [at((2, 0)), at((3, 0))], False, Job((0, 1), (2, 0), 5)),
        (Job((0, 1), (2, 0), 5), [DONE, at((3, 0))], False, Job((1,), (3, 0), 5)),
        (Job((0, 1), (0, 0), 5), [at((1, 0), (2, 0)), at((1, 0))], True, Job((0, 1), (1, 0), 5)),
        (Job((0, 1), (0, 0), 5), [DONE, DONE], True, None),
        (Job((0, 1), (3, 0), 3, "assign"), [at((3, 0)), at((3, 0))], False, Job((0, 1), (3, 0), 3, "assign")),
    ],
)
def test_a_job_that_runs_again_does_only_the_remaining_part(
    job: Job, progress: list[MemberProgress], is_joint: bool, remaining: Job | None
) -> None:
    assert remaining_part(job, dict(enumerate(progress)), is_joint=is_joint) == remaining


@pytest.mark.parametrize(
    ("progress", "jobs"),
    [
        ([NEW, NEW], [Job((0,), (0, 0), 5)]),
        ([at((3, 1)), NEW], [Job((0,), (3, 1), 5)]),
        ([DONE, NEW, NEW], [Job((1,), (0, 0), 5)]),
        ([DONE, DONE], []),
    ],
)
@pytest.mark.parametrize("executor", [LOOP, POOL, MESH])
def test_sequential_members_start_when_earlier_ones_have_finished(
    progress: list[MemberProgress], jobs: list[Job], executor: dict[str, object]
) -> None:
    assert plan(recipe(len(progress), **executor), progress, is_sequential=True) == jobs


def test_no_sequential_member_follows_a_failed_one() -> None:
    assert plan(recipe(3), [DONE, NEW, NEW], is_sequential=True, without={1}) == []
