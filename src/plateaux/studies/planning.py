"""The trials and runs of a study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plateaux.config.builders.training import build_method
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.recipe import Recipe, fingerprint
from plateaux.config.schema import fields
from plateaux.core import registry
from plateaux.core.types import derive_seed
from plateaux.studies.grid import condition_label
from plateaux.studies.study import Study
from plateaux.training.branching import shared_prefix


@dataclass(frozen=True, slots=True)
class Trial:
    """One condition in one repetition."""

    condition: Mapping[str, Any]
    repetition: int
    recipe: Recipe
    folder: str  # named by the hash of all that determines its members

    @property
    def run(self) -> str:
        """The name of its numbers: the run, and how many of its members they are about."""
        return f"{self.folder}-{self.recipe.members}"

    def __str__(self) -> str:
        return f"{condition_label(self.condition)} #{self.repetition}".strip()


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run folder, and the conditions that it serves: all whose members are among its own."""

    folder: str
    recipe: Recipe
    trials: tuple[Trial, ...]
    prefix: str | None = None  # the folder of the run to begin from
    is_parent: bool = False  # others begin from this one


def plan_trials(study: Study, components: Components = NO_COMPONENTS) -> list[Trial]:
    """Return the whole grid: one repetition of everything before the second."""
    found: list[Trial] = []
    whole = [(condition, _filled_in(recipe, components)) for condition, recipe in study.conditions()]
    for repetition in range(study.repetitions):
        for condition, recipe in whole:
            seeded = recipe.replaced(seed=derive_seed(study.seed, repetition))
            found.append(Trial(condition, repetition, seeded, run_folder(seeded, components)))
    return found


def plan_runs(plans: Sequence[Trial], components: Components = NO_COMPONENTS) -> list[RunSpec]:
    """Return the runs that serve these conditions, each once, those that others begin from before the others."""
    served: dict[str, list[Trial]] = {}
    for each in plans:
        served.setdefault(each.folder, []).append(each)
    largest = {folder: max((p.recipe for p in group), key=lambda r: r.members) for folder, group in served.items()}
    lenders = _parents(largest, components)
    found = [
        RunSpec(folder, largest[folder], tuple(group), lenders.get(folder), folder in lenders.values())
        for folder, group in served.items()
    ]
    return sorted(found, key=lambda task: (min(p.repetition for p in task.trials), task.prefix is not None))


def run_folder(recipe: Recipe, components: Components = NO_COMPONENTS) -> str:
    """Return the hash of all that determines a run's members; their number, where they see each other or meet."""
    method = build_method(recipe, 0, components)
    alone = not method.is_joint and method.partition is None
    return fingerprint({"recipe": recipe.identity(), "members": None if alone else recipe.members})


def _filled_in(recipe: Recipe, components: Components) -> Recipe:
    """Return a recipe with the defaults of its method written out, so that what is the same has one name."""
    factory = registry.method.get(recipe.method.name, allow=components.trust)
    usual = {name: default for name, (_, default) in fields(factory).items() if default is not ...}
    return recipe.replaced(method={**usual, **recipe.method.options})


def _parents(recipes: Mapping[str, Recipe], components: Components) -> dict[str, str]:
    """Return from which run each begins: of those that train the same until a meeting, the one that meets first."""
    groups: dict[str, list[str]] = {}
    for folder, recipe in recipes.items():
        if recipe.train.select == "last" and recipe.train.early_stopping_patience is None:
            groups.setdefault(fingerprint(shared_prefix(recipe, components)), []).append(folder)
    return {folder: lender for group in groups.values() for folder, lender in _begin(group, recipes, components)}


def _begin(group: Sequence[str], recipes: Mapping[str, Recipe], components: Components) -> Iterator[tuple[str, str]]:
    meets = {folder: build_method(recipes[folder], 0, components).partition for folder in group}
    first = {folder: each.after[0] for folder, each in meets.items() if each is not None and each.after[0] > 0}
    if first:
        lender = min(first, key=lambda folder: first[folder])
        yield from ((folder, lender) for folder in group if folder != lender)
