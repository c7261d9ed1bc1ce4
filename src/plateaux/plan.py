"""What is missing: a pure function from a recipe and where its members stand to the jobs still to be done.

Nobody waits inside a job, and restarting anything is planning again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plateaux.errors import RunError
from plateaux.recipe import Recipe
from plateaux.run import Progress

Position = tuple[int, int]  # completed epochs, completed steps of the next one


@dataclass(frozen=True, slots=True)
class Job:
    """A span of work for one member or group: small data that any process can carry out, harmless if done twice."""

    members: tuple[int, ...]
    start: Position
    stop: int  # epochs completed at its end
    kind: Literal["train"] = "train"

    def __str__(self) -> str:
        who = "member" if len(self.members) == 1 else "members"
        at = f"epoch {self.start[0]}" + (f", step {self.start[1]}" if self.start[1] else "")
        return f"{self.kind} {who} {', '.join(map(str, self.members))} from {at} to epoch {self.stop}"


def plan(recipe: Recipe, progress: Sequence[Progress], *, joint: bool = False) -> list[Job]:
    """Return the jobs that are missing, those that began first first.

    Members that see each other go on together from the last place all of them have kept. Others go on alone, or side by
    side where they stand at the same place and one process holds them.
    """
    missing = [number for number, each in enumerate(progress) if not each.finished]
    if not missing:
        return []
    stop = recipe.train.epochs
    if joint:
        if any(each.finished for each in progress) and any(not progress[n].states for n in missing):
            raise RunError(
                f"members of {recipe.method.name!r} learn together, so none can join those that have finished; "
                "choose another --out for the larger ensemble"
            )
        return [Job(tuple(range(len(progress))), _common(progress), stop)]
    alone = recipe.executor.name == "local" and (recipe.executor.manner == "parked" or recipe.executor.processes > 1)
    if alone:
        return [Job((number,), progress[number].position, stop) for number in missing]
    places = sorted({progress[number].position for number in missing}, reverse=True)
    return [Job(tuple(n for n in missing if progress[n].position == place), place, stop) for place in places]


def _common(progress: Sequence[Progress]) -> Position:
    kept = [{(epoch, step) for epoch, step, _ in each.states} | {(0, 0)} for each in progress]
    return max(set.intersection(*kept))
