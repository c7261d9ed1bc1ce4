"""Trials of a study and the runs that serve them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.config.experiment import Experiment
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
    folder: str  # hash of everything that determines its members

    @property
    def run(self) -> str:
        """The name of its results: the run folder and the number of members."""
        return f"{self.folder}-{self.recipe.members}"

    def __str__(self) -> str:
        return f"{condition_label(self.condition)} #{self.repetition}".strip()


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run folder and the trials that it serves: all trials whose members are among its own."""

    folder: str
    recipe: Recipe
    trials: tuple[Trial, ...]
    prefix: str | None = None  # the folder of the run to branch from
    is_parent: bool = False  # other runs branch from this one


def plan_trials(study: Study, components: Components = NO_COMPONENTS) -> list[Trial]:
    """Return all trials of the grid, the first repetition of every condition before the second."""
    trials: list[Trial] = []
    conditions = [(condition, _with_defaults(recipe, components)) for condition, recipe in study.conditions()]
    for repetition in range(study.repetitions):
        for condition, recipe in conditions:
            seed = study.seeds[repetition] if study.seeds else derive_seed(study.seed, repetition)
            seeded = recipe.replaced(seed=seed)
            trials.append(Trial(condition, repetition, seeded, run_folder(seeded, components)))
    return trials


def plan_runs(trials: Sequence[Trial], components: Components = NO_COMPONENTS) -> list[RunSpec]:
    """Return the runs that serve the trials; runs that others branch from come first."""
    served: dict[str, list[Trial]] = {}
    for trial in trials:
        served.setdefault(trial.folder, []).append(trial)
    largest = {
        folder: max((trial.recipe for trial in group), key=lambda recipe: recipe.members)
        for folder, group in served.items()
    }
    parents = _parents(largest, components)
    runs = [
        RunSpec(folder, largest[folder], tuple(group), parents.get(folder), folder in parents.values())
        for folder, group in served.items()
    ]
    return sorted(runs, key=lambda run: (min(trial.repetition for trial in run.trials), run.prefix is not None))


def run_folder(recipe: Recipe, components: Components = NO_COMPONENTS) -> str:
    """Return the hash of everything that determines the members of a run.

    It includes the number of members if the method is joint or has a data partition.
    """
    method = Experiment(recipe, components).method()
    is_independent = not method.is_joint and method.partition is None
    return fingerprint({"recipe": recipe.identity(), "members": None if is_independent else recipe.members})


def _with_defaults(recipe: Recipe, components: Components) -> Recipe:
    """Return a recipe with the defaults of its method filled in, so that equal recipes have equal hashes."""
    factory = registry.method.get(recipe.method.name, allow=components.trust)
    defaults = {name: default for name, (_, default) in fields(factory).items() if default is not ...}
    return recipe.replaced(method={**defaults, **recipe.method.options})


def _parents(recipes: Mapping[str, Recipe], components: Components) -> dict[str, str]:
    """Return the parent of each run: of runs with the same prefix, the one with the earliest data partition."""
    groups: dict[str, list[str]] = {}
    for folder, recipe in recipes.items():
        if recipe.train.select == "last" and recipe.train.early_stopping_patience is None:
            groups.setdefault(fingerprint(shared_prefix(Experiment(recipe, components))), []).append(folder)
    return {
        folder: parent for group in groups.values() for folder, parent in _parents_in_group(group, recipes, components)
    }


def _parents_in_group(
    group: Sequence[str], recipes: Mapping[str, Recipe], components: Components
) -> Iterator[tuple[str, str]]:
    partitions = {folder: Experiment(recipes[folder], components).method().partition for folder in group}
    first = {folder: each.after[0] for folder, each in partitions.items() if each is not None and each.after[0] > 0}
    if first:
        parent = min(first, key=lambda folder: first[folder])
        yield from ((folder, parent) for folder in group if folder != parent)
