"""What is missing, as a table: where members stand in, jobs out."""

from __future__ import annotations

import pytest

from plateaux.errors import RunError
from plateaux.plan import Job, Meeting, plan
from plateaux.recipe import Recipe
from plateaux.run import Progress

NEW = Progress()
DONE = Progress(epoch=5, finished=True)


def at(*places: tuple[int, int]) -> Progress:
    """A member with states kept at these places, the last one newest."""
    return Progress(*places[-1], states=tuple((epoch, step, f"{epoch}-{step}") for epoch, step in places))


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
PARKED = {"manner": "parked"}
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
TOGETHER = [
    ("nothing has begun", [NEW, NEW], [Job((0, 1), (0, 0), 5)]),
    ("all is done", [DONE, DONE], []),
    ("all at one place", [at((1, 0), (2, 0)), at((1, 0), (2, 0))], [Job((0, 1), (2, 0), 5)]),
    ("one is ahead", [at((2, 0), (3, 0)), at((1, 0), (2, 0))], [Job((0, 1), (2, 0), 5)]),
    ("nothing in common", [at((3, 0)), at((2, 0))], [Job((0, 1), (0, 0), 5)]),
    ("one has just begun", [at((0, 4)), NEW], [Job((0, 1), (0, 0), 5)]),
    (
        "killed while they finished",
        [Progress(5, 0, finished=True, states=((5, 0, "x"),)), at((4, 0), (5, 0))],
        [Job((0, 1), (5, 0), 5)],
    ),
]


@pytest.mark.parametrize(("case", "executor", "progress", "jobs"), APART, ids=[case[0] for case in APART])
def test_members_that_do_not_meet(
    case: str, executor: dict[str, object], progress: list[Progress], jobs: list[Job]
) -> None:
    assert plan(recipe(len(progress), **executor), progress) == jobs


@pytest.mark.parametrize(("case", "progress", "jobs"), TOGETHER, ids=[case[0] for case in TOGETHER])
def test_members_that_meet_go_on_from_the_last_place_all_have_kept(
    case: str, progress: list[Progress], jobs: list[Job]
) -> None:
    assert plan(recipe(len(progress)), progress, joint=True) == jobs


def test_nobody_joins_members_that_learnt_together() -> None:
    with pytest.raises(RunError, match="none can join"):
        plan(recipe(3), [DONE, DONE, NEW], joint=True)


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


AHEAD = Meeting(3)
MEETINGS = [
    ("before it", LOOP, [NEW, NEW], [AHEAD], [Job((0, 1), (0, 0), 3)]),
    (
        "one has arrived without scores",
        LOOP,
        [at((3, 0)), at((1, 2))],
        [AHEAD],
        [Job((0,), (3, 0), 3), Job((1,), (1, 2), 3)],
    ),
    ("one waits", POOL, [at((3, 0)), at((1, 2))], [Meeting(3, frozenset({0}))], [Job((1,), (1, 2), 3)]),
    ("all have scored", POOL, [at((3, 0))] * 2, [Meeting(3, frozenset({0, 1}))], [Job((0, 1), (3, 0), 3, "decide")]),
    ("decided", LOOP, [at((3, 0))] * 2, [Meeting(3, frozenset({0, 1}), 2)], [Job((0, 1), (3, 0), 5)]),
    (
        "after it",
        LOOP,
        [at((4, 1)), at((3, 0))],
        [Meeting(3, frozenset({0, 1}), 2)],
        [Job((0,), (4, 1), 5), Job((1,), (3, 0), 5)],
    ),
    ("the next one", LOOP, [at((3, 0))] * 2, [Meeting(3, frozenset({0, 1}), 2), Meeting(4)], [Job((0, 1), (3, 0), 4)]),
    ("scores that came along", LOOP, [NEW, NEW], [Meeting(3, frozenset({0}))], [Job((0, 1), (0, 0), 3)]),
    ("at the very start", LOOP, [NEW, NEW], [Meeting(0)], [Job((0, 1), (0, 0), 0)]),
    ("one begins anew", LOOP, [DONE, NEW], [Meeting(3, frozenset({0, 1}), 2)], [Job((1,), (0, 0), 3)]),
    (
        "one is behind",
        LOOP,
        [at((4, 0)), at((1, 0))],
        [Meeting(3, frozenset({0, 1}), 2)],
        [Job((0,), (4, 0), 5), Job((1,), (1, 0), 3)],
    ),
    ("all done", LOOP, [DONE, DONE], [Meeting(3, frozenset({0, 1}), 2)], []),
]


@pytest.mark.parametrize(
    ("executor", "progress", "meetings", "jobs"), [row[1:] for row in MEETINGS], ids=[row[0] for row in MEETINGS]
)
def test_nobody_goes_past_a_meeting_that_is_not_decided(
    executor: dict[str, object], progress: list[Progress], meetings: list[Meeting], jobs: list[Job]
) -> None:
    assert plan(recipe(len(progress), **executor), progress, meetings=meetings) == jobs


def test_members_that_learn_together_meet_together() -> None:
    progress = [at((3, 0)), at((3, 0))]
    jobs = plan(recipe(2), progress, joint=True, meetings=[Meeting(3, frozenset({0}))])
    assert jobs == [Job((0, 1), (3, 0), 3)]


def test_jobs_around_a_meeting_say_what_they_are() -> None:
    assert str(Job((1,), (3, 0), 3)) == "score by member 1 at epoch 3"
    assert str(Job((0, 1), (3, 0), 3, "decide")) == "decide for members 0, 1 at epoch 3"


def test_lost_notes_and_latecomers_are_refused() -> None:
    with pytest.raises(RunError, match="gone past the meeting after epoch 3"):
        plan(recipe(2), [at((4, 0)), at((3, 0))], meetings=[AHEAD])
    with pytest.raises(RunError, match="none can join or leave"):
        plan(recipe(3), [DONE, DONE, NEW], meetings=[Meeting(3, frozenset({0, 1}), 2)])
