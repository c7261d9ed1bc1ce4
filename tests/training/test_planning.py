"""What is missing, as a table: where members stand in, jobs out."""

from __future__ import annotations

import pytest

from plateaux.config.recipe import Recipe
from plateaux.core.errors import RunError
from plateaux.evaluation.ray_evaluator import eval_shards
from plateaux.storage.run import MemberProgress
from plateaux.training.jobs import Job, PartitionStatus
from plateaux.training.planning import plan, remaining_part

NEW = MemberProgress()
DONE = MemberProgress(epoch=5, finished=True)


def at(*places: tuple[int, int]) -> MemberProgress:
    """A member with states kept at these places, the last one newest."""
    return MemberProgress(*places[-1], checkpoints=tuple((epoch, step, f"{epoch}-{step}") for epoch, step in places))


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
PARKED = {"mode": "offload"}
POOL = {"processes": 2}
MESH = {"name": "mesh", "processes": 2}
APART = [
    ("nothing has begun", LOOP, [NEW, NEW, NEW], [Job((0, 1, 2), (0, 0), 5)]),
    ("all is done", LOOP, [DONE, DONE], []),
    ("one is done", LOOP, [DONE, NEW, NEW], [Job((1, 2), (0, 0), 5)]),
    ("side by side again", LOOP, [at((2, 3)), at((2, 3))], [Job((0, 1), (2, 3), 5)]),
    ("cut apart by a kill", LOOP, [at((2, 3)), at((2, 0)), at((2, 3))], [Job((0, 2), (2, 3), 5), Job((1,), (2, 0), 5)]),
    (
        "furthest first",
        LOOP,
        [NEW, at((4, 0)), at((1, 9))],
        [Job((1,), (4, 0), 5), Job((2,), (1, 9), 5), Job((0,), (0, 0), 5)],
    ),
    ("trained but not finished", LOOP, [at((5, 0)), DONE], [Job((0,), (5, 0), 5)]),
    ("parked ones go alone", PARKED, [NEW, DONE, NEW], [Job((0,), (0, 0), 5), Job((2,), (0, 0), 5)]),
    ("a pool takes one each", POOL, [at((1, 2)), NEW], [Job((0,), (1, 2), 5), Job((1,), (0, 0), 5)]),
    ("a mesh goes together", MESH, [NEW, NEW], [Job((0, 1), (0, 0), 5)]),
]
ALL_MEMBERS = [
    ("nothing has begun", [NEW, NEW], [Job((0, 1), (0, 0), 5)]),
    ("all is done", [DONE, DONE], []),
    ("all at one place", [at((1, 0), (2, 0)), at((1, 0), (2, 0))], [Job((0, 1), (2, 0), 5)]),
    ("one is ahead", [at((2, 0), (3, 0)), at((1, 0), (2, 0))], [Job((0, 1), (2, 0), 5)]),
    ("nothing in common", [at((3, 0)), at((2, 0))], [Job((0, 1), (0, 0), 5)]),
    ("one has just begun", [at((0, 4)), NEW], [Job((0, 1), (0, 0), 5)]),
    (
        "killed while they finished",
        [MemberProgress(5, 0, finished=True, checkpoints=((5, 0, "x"),)), at((4, 0), (5, 0))],
        [Job((0, 1), (5, 0), 5)],
    ),
]


@pytest.mark.parametrize(("case", "executor", "progress", "jobs"), APART, ids=[case[0] for case in APART])
def test_members_that_do_not_meet(
    case: str, executor: dict[str, object], progress: list[MemberProgress], jobs: list[Job]
) -> None:
    assert plan(recipe(len(progress), **executor), progress) == jobs


@pytest.mark.parametrize(("case", "progress", "jobs"), ALL_MEMBERS, ids=[case[0] for case in ALL_MEMBERS])
def test_members_that_meet_go_on_from_the_last_place_all_have_kept(
    case: str, progress: list[MemberProgress], jobs: list[Job]
) -> None:
    assert plan(recipe(len(progress)), progress, is_joint=True) == jobs


def test_nobody_joins_members_that_learnt_together() -> None:
    with pytest.raises(RunError, match="none can join"):
        plan(recipe(3), [DONE, DONE, NEW], is_joint=True)


def test_planning_twice_gives_the_same_and_changes_nothing() -> None:
    progress = [at((1, 2)), NEW]
    before = list(progress)
    assert plan(recipe(2), progress) == plan(recipe(2), progress)
    assert progress == before


def test_every_member_that_is_not_finished_is_in_exactly_one_job() -> None:
    progress = [NEW, DONE, at((1, 0)), at((1, 3)), at((1, 0)), NEW]
    jobs = plan(recipe(6), progress)
    assert sorted(member for job in jobs for member in job.members) == [0, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job((0,), (0, 0), 5), "train member 0 from epoch 0 to epoch 5"),
        (Job((0, 2), (3, 17), 5), "train members 0, 2 from epoch 3, step 17 to epoch 5"),
    ],
)
def test_a_job_says_what_it_is(job: Job, words: str) -> None:
    assert str(job) == words


AHEAD = PartitionStatus(3)
MEETINGS = [
    ("before it", LOOP, [NEW, NEW], [AHEAD], [Job((0, 1), (0, 0), 3)]),
    (
        "one has arrived without scores",
        LOOP,
        [at((3, 0)), at((1, 2))],
        [AHEAD],
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
    ("decided", LOOP, [at((3, 0))] * 2, [PartitionStatus(3, frozenset({0, 1}), 2)], [Job((0, 1), (3, 0), 5)]),
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
    ("scores that came along", LOOP, [NEW, NEW], [PartitionStatus(3, frozenset({0}))], [Job((0, 1), (0, 0), 3)]),
    ("at the very start", LOOP, [NEW, NEW], [PartitionStatus(0)], [Job((0, 1), (0, 0), 0)]),
    ("one begins anew", LOOP, [DONE, NEW], [PartitionStatus(3, frozenset({0, 1}), 2)], [Job((1,), (0, 0), 3)]),
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
    ("executor", "progress", "meetings", "jobs"), [row[1:] for row in MEETINGS], ids=[row[0] for row in MEETINGS]
)
def test_nobody_goes_past_a_meeting_that_is_not_decided(
    executor: dict[str, object], progress: list[MemberProgress], meetings: list[PartitionStatus], jobs: list[Job]
) -> None:
    assert plan(recipe(len(progress), **executor), progress, partitions=meetings) == jobs


def test_members_that_learn_together_meet_together() -> None:
    progress = [at((3, 0)), at((3, 0))]
    jobs = plan(recipe(2), progress, is_joint=True, partitions=[PartitionStatus(3, frozenset({0}))])
    assert jobs == [Job((0, 1), (3, 0), 3)]


def test_jobs_around_a_meeting_say_what_they_are() -> None:
    assert str(Job((1,), (3, 0), 3)) == "score by member 1 at epoch 3"
    assert str(Job((0, 1), (3, 0), 3, "assign")) == "assign samples for members 0, 1 at epoch 3"


def test_lost_notes_and_latecomers_are_refused() -> None:
    with pytest.raises(RunError, match="gone past the meeting after epoch 3"):
        plan(recipe(2), [at((4, 0)), at((3, 0))], partitions=[AHEAD])
    with pytest.raises(RunError, match="none can join or leave"):
        plan(recipe(3), [DONE, DONE, NEW], partitions=[PartitionStatus(3, frozenset({0, 1}), 2)])


# --- Members that are given up, jobs done twice, shards

ON_RAY = {"name": "ray"}


def test_on_a_cluster_every_member_is_a_job() -> None:
    assert plan(recipe(2, **ON_RAY), [NEW, NEW]) == [Job((0,), (0, 0), 5), Job((1,), (0, 0), 5)]
    assert plan(recipe(2, **ON_RAY), [NEW, NEW], is_joint=True) == [Job((0, 1), (0, 0), 5)]


def test_a_meeting_waits_for_a_member_that_is_given_up_unless_the_recipe_says_otherwise() -> None:
    progress, met = [at((3, 0)), at((3, 0)), NEW], [PartitionStatus(3, frozenset({0, 1}))]
    assert plan(recipe(3), progress, partitions=met) == [Job((2,), (0, 0), 3)]
    assert plan(recipe(3), progress, partitions=met, without={2}) == []
    few = recipe(3).replaced(run={"min_members": 2})
    assert plan(few, progress, partitions=met, without={2}) == [Job((0, 1), (3, 0), 3, "assign")]
    assert plan(few.replaced(run={"min_members": 3}), progress, partitions=met, without={2}) == []
    assert plan(few, progress, partitions=[PartitionStatus(3, frozenset({0}))], without={2}) == [Job((1,), (3, 0), 3)]


def test_a_member_that_a_meeting_went_ahead_without_is_never_missing_again() -> None:
    met = [PartitionStatus(3, frozenset({0, 1}), 3, frozenset({2}))]
    assert plan(recipe(3), [at((3, 0)), at((4, 0)), NEW], partitions=met) == [
        Job((1,), (4, 0), 5),
        Job((0,), (3, 0), 5),
    ]
    assert plan(recipe(3), [DONE, DONE, NEW], partitions=met) == []


@pytest.mark.parametrize(
    ("job", "progress", "joint", "left"),
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
def test_a_job_that_is_done_again_does_only_what_is_left_of_it(
    job: Job, progress: list[MemberProgress], joint: bool, left: Job | None
) -> None:
    assert remaining_part(job, dict(enumerate(progress)), is_joint=joint) == left


def test_shards_cover_members_and_samples_once() -> None:
    found = list(eval_shards([0, 2, 3], 10, block=2, size=4))
    assert [[(s.members, s.start, s.stop) for s in each] for each in found] == [
        [((0, 2), a, b), ((3,), a, b)] for a, b in [(0, 4), (4, 8), (8, 10)]
    ]
    assert str(found[0][0]) == "ask members 0, 2 about samples 0 to 4"
    assert str(found[0][1]) == "ask member 3 about samples 0 to 4"


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
def test_members_in_turn_begin_when_those_before_have_finished(
    progress: list[MemberProgress], jobs: list[Job], executor: dict[str, object]
) -> None:
    assert plan(recipe(len(progress), **executor), progress, is_sequential=True) == jobs


def test_nobody_follows_a_member_that_is_given_up() -> None:
    assert plan(recipe(3), [DONE, NEW, NEW], is_sequential=True, without={1}) == []
