"""A study: a grid of recipes and the question it answers, as frozen data from a TOML file.

    question = "Does flatness cost diversity?"
    repetitions = 2
    base = "cifar10_small"                          # a recipe's name or file, or a whole recipe as [base]

    [grid]
    "model.width" = [8, 16]                         # a factor: values of one key of the recipe

    [grid.method]                                   # a factor of named conditions, each a table of changes
    SAM = {method = {name = "sam"}, each = {"method.rho" = [0.0, 0.05, 0.1]}}
    SharpBalance = {method = {name = "sharpbalance", rho = 0.1}}

Repetitions are paired: in each of them every condition has the same seed, so the same initialisations and order of
samples. What determines the same members is one run, and is trained once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import tomlkit
from pydantic import Field, ValidationError

from plateaux.config.builders.model import NOTHING_GIVEN, Given, method_of
from plateaux.config.recipe import Recipe, fingerprint
from plateaux.config.schema import Section, fields
from plateaux.core import registry
from plateaux.core.errors import RecipeError, nearest
from plateaux.core.types import key
from plateaux.training.branching import span_of

Changes = Mapping[tuple[str, ...], Any]
Choice = tuple[dict[str, Any], Changes]
"""One level of a factor: what it is called, and what it changes."""


class MeasurePart(Section):
    """What is measured of every run, and on which samples; @N takes the first N."""

    on: tuple[str, ...] = ("test",)
    measures: tuple[str, ...] = ("accuracy", "nll", "ece")
    corruptions: tuple[str, ...] = ()  # such as corrupted@1000
    under_corruption: tuple[str, ...] = ("accuracy",)
    ood: tuple[str, ...] = ()  # such as near=cifar100
    sizes: bool = False  # curves over ensembles of 1, 2, ... members too
    cache: str | None = None  # a folder to keep generated corrupted images in


class LandscapePart(Section):
    """Which probes are asked of every member."""

    probes: tuple[str, ...] = ()
    on: str = "train"
    samples: int | None = Field(None, ge=1)
    batchnorm: Literal["eval", "train"] = "eval"


class Study(Section):
    """A grid of recipes, what is measured of each, and the question all of it answers."""

    name: str = "study"
    question: str = ""
    seed: int = 0
    repetitions: int = Field(1, ge=1)
    keep_weights: bool = True  # or drop them once everything is measured
    base: dict[str, Any]
    grid: dict[str, Any] = Field(default_factory=dict)
    baseline: dict[str, Any] = Field(
        default_factory=dict
    )  # the condition that others are compared with, such as {rho = 0.0}
    measure: MeasurePart = MeasurePart()
    landscape: LandscapePart = LandscapePart()
    figures: dict[str, Any] = Field(default_factory=dict)  # what the report draws

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read a TOML file; the recipe it names is looked for beside it, then among those that come along."""
        file = Path(path)
        try:
            tree = tomlkit.parse(file.read_text(encoding="utf-8")).unwrap()
        except OSError as problem:
            raise RecipeError(f"Cannot read the study {str(path)!r}: {problem.strerror}") from None
        except tomlkit.exceptions.TOMLKitError as problem:
            raise RecipeError(f"{path}: {problem}") from None
        return cls.from_dict({"name": file.stem, **tree}, beside=file.parent)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], *, beside: Path = Path()) -> Study:
        """Validate nested plain data, the base recipe put in whole."""
        try:
            study = cls.model_validate({**tree, **_base(tree.get("base"), beside)})
        except ValidationError as problem:
            raise _explained(problem) from None
        study.conditions()  # a wrong change is told before anything is trained
        return study

    def conditions(self) -> list[tuple[dict[str, Any], Recipe]]:
        """Return every condition with its recipe, in the order of the grid; the seed is still that of the base."""
        found: list[tuple[dict[str, Any], Recipe]] = []
        for choices in product(*factors(self.grid)):
            condition, changes = _together(choices)
            try:
                found.append((condition, Recipe.from_dict(changed(self.base, changes))))
            except RecipeError as problem:
                raise RecipeError(f"{called(condition) or 'base'}: {problem}") from None
        return found

    def asked(self) -> str:
        """Return a hash of all that is to be measured: a run is done when it has answered this."""
        return fingerprint({"measure": self.measure.model_dump(), "landscape": self.landscape.model_dump()})


@dataclass(frozen=True, slots=True)
class Planned:
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
        return f"{called(self.condition)} #{self.repetition}".strip()


@dataclass(frozen=True, slots=True)
class Task:
    """One run folder, and the conditions that it serves: all whose members are among its own."""

    folder: str
    recipe: Recipe
    planned: tuple[Planned, ...]
    span: str | None = None  # the folder of the run to begin from
    lends: bool = False  # others begin from this one


def planned(study: Study, given: Given = NOTHING_GIVEN) -> list[Planned]:
    """Return the whole grid: one repetition of everything before the second."""
    found: list[Planned] = []
    whole = [(condition, _filled_in(recipe, given)) for condition, recipe in study.conditions()]
    for repetition in range(study.repetitions):
        for condition, recipe in whole:
            seeded = recipe.changed(seed=key(study.seed, repetition))
            found.append(Planned(condition, repetition, seeded, folder_of(seeded, given)))
    return found


def tasks(plans: Sequence[Planned], given: Given = NOTHING_GIVEN) -> list[Task]:
    """Return the runs that serve these conditions, each once, those that others begin from before the others."""
    served: dict[str, list[Planned]] = {}
    for each in plans:
        served.setdefault(each.folder, []).append(each)
    largest = {folder: max((p.recipe for p in group), key=lambda r: r.members) for folder, group in served.items()}
    lenders = _lenders(largest, given)
    found = [
        Task(folder, largest[folder], tuple(group), lenders.get(folder), folder in lenders.values())
        for folder, group in served.items()
    ]
    return sorted(found, key=lambda task: (min(p.repetition for p in task.planned), task.span is not None))


def folder_of(recipe: Recipe, given: Given = NOTHING_GIVEN) -> str:
    """Return the hash of all that determines a run's members; their number, where they see each other or meet."""
    method = method_of(recipe, 0, given)
    alone = not method.together and method.rendezvous is None
    return fingerprint({"recipe": recipe.determining(), "members": None if alone else recipe.members})


def factors(grid: Mapping[str, Any]) -> list[list[Choice]]:
    """Return the levels of every factor."""
    found: list[tuple[str, Any]] = []
    for name, value in grid.items():
        if isinstance(value, Mapping) and not all(isinstance(each, Mapping) for each in value.values()):
            found += [(f"{name}.{rest}", each) for rest, each in value.items()]  # model.width without quotes
        else:
            found.append((name, value))
    return [_named(name, value) if isinstance(value, Mapping) else _values(name, value) for name, value in found]


def changed(base: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Return a recipe's tree with some values changed; a section that gets another name loses its further options."""
    tree = deepcopy(dict(base))
    if ("seed",) in changes:
        raise RecipeError(
            "a study sets the seed of every repetition itself; use `seed` and `repetitions` beside [grid]"
        )
    for path, value in sorted(changes.items(), key=lambda change: change[0][-1] != "name"):
        *sections, last = path
        part = tree
        for section in sections:
            part = part.setdefault(section, {})
            if not isinstance(part, dict):
                raise RecipeError(
                    f"{'.'.join(path)}: {section} = {part!r} is no section of keys, so it has no {last!r}; give "
                    f"{section} as a whole, or name conditions: [grid.mine.one]"
                )
        if last == "name" and part.get("name") != value and len(sections) == 1:
            for option in set(part) - _own_keys(sections[0]):
                del part[option]
        part[last] = value
    return tree


def called(condition: Mapping[str, Any]) -> str:
    """Return a condition in words: `method=SAM, rho=0.05`."""
    return ", ".join(f"{name}={value}" for name, value in condition.items())


def _base(given: Any, beside: Path) -> dict[str, Any]:
    """Return the base recipe whole: by name or file, with changes, or as it stands."""
    if isinstance(given, str):
        given = {"recipe": given}
    if not isinstance(given, Mapping) or "recipe" not in given:
        return {} if given is None else {"base": given}
    file = beside / str(given["recipe"])
    recipe = Recipe.load(file if file.is_file() else str(given["recipe"]))
    return {"base": changed(recipe.to_dict(), _flat({name: v for name, v in given.items() if name != "recipe"}))}


def _values(name: str, values: Any) -> list[Choice]:
    if not isinstance(values, list | tuple) or not values:
        raise RecipeError(
            f"[grid] {name} = {values!r}: give a list of values of that key, such as [8, 16], or a table of conditions"
        )
    return [({_short(name): value}, {tuple(name.split(".")): value}) for value in values]


def _named(name: str, conditions: Mapping[str, Any]) -> list[Choice]:
    """Return named conditions; `each` in one lists values of further keys, which only that one is crossed with."""
    found: list[Choice] = []
    for title, table in conditions.items():
        changes = _flat({key: value for key, value in table.items() if key != "each"})
        for inner in product(*factors(table.get("each", {}))):
            found.append(_together([({name: title}, changes), *inner]))
    return found


def _together(choices: Sequence[Choice]) -> Choice:
    """Return one choice of all factors as one condition and its changes."""
    names = [name for told, _ in choices for name in told]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecipeError(
            f"[grid] has two factors called {min(twice)!r}; give one of them as a table of named conditions"
        )
    condition = {name: value for told, _ in choices for name, value in told.items()}
    return condition, {path: value for _, changes in choices for path, value in changes.items()}


def _flat(table: Mapping[str, Any], at: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, value in table.items():
        path = (*at, *name.split("."))
        found |= _flat(value, path) if isinstance(value, Mapping) else {path: value}
    return found


def _short(name: str) -> str:
    """Return what a key of a recipe is called in a condition: its last word, or its section where that is `name`."""
    *sections, last = name.split(".")
    return sections[-1] if last == "name" and sections else last


def _own_keys(section: str) -> set[str]:
    part = Recipe.model_fields[section].annotation if section in Recipe.model_fields else None
    return set(getattr(part, "model_fields", {}))


def _filled_in(recipe: Recipe, given: Given) -> Recipe:
    """Return a recipe with the defaults of its method written out, so that what is the same has one name."""
    factory = registry.method.get(recipe.method.name, allow=given.allow)
    usual = {name: default for name, (_, default) in fields(factory).items() if default is not ...}
    return recipe.changed(method={**usual, **recipe.method.options})


def _lenders(recipes: Mapping[str, Recipe], given: Given) -> dict[str, str]:
    """Return from which run each begins: of those that train the same until a meeting, the one that meets first."""
    groups: dict[str, list[str]] = {}
    for folder, recipe in recipes.items():
        if recipe.train.keep == "last" and recipe.train.patience is None:
            groups.setdefault(fingerprint(span_of(recipe, given)), []).append(folder)
    return {folder: lender for group in groups.values() for folder, lender in _begin(group, recipes, given)}


def _begin(group: Sequence[str], recipes: Mapping[str, Recipe], given: Given) -> Iterator[tuple[str, str]]:
    meets = {folder: method_of(recipes[folder], 0, given).rendezvous for folder in group}
    first = {folder: each.after[0] for folder, each in meets.items() if each is not None and each.after[0] > 0}
    if first:
        lender = min(first, key=lambda folder: first[folder])
        yield from ((folder, lender) for folder in group if folder != lender)


def _explained(problem: ValidationError) -> RecipeError:
    first = problem.errors()[0]
    place = [str(part) for part in first["loc"]]
    where = ".".join(place)
    if first["type"] == "extra_forbidden":
        parts: dict[str, type[Section]] = {"measure": MeasurePart, "landscape": LandscapePart}
        known = parts.get(place[0], Study).model_fields
        return RecipeError(f"The study has no key {where!r}; {nearest(place[-1], known)}")
    if first["type"] == "missing":
        return RecipeError(f"The study lacks {where!r}: a recipe by name or file, or a whole one as [base]")
    return RecipeError(f"The study's {where} = {first['input']!r}: {first['msg']}")
