"""The grid of a study: factors, their levels, and the recipe changes of each condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import product
from math import prod
from typing import Any

from plateaux.config.recipe import Recipe, flatten, short_key
from plateaux.core.errors import RecipeError

Changes = Mapping[tuple[str, ...], Any]
"""New values by recipe key."""

MAX_TRIALS = 10_000  # conditions times repetitions

Choice = tuple[dict[str, Any], Changes]
"""One level of a factor: its part of the condition, and its recipe changes."""


def grid_factors(grid: Mapping[str, Any]) -> list[list[Choice]]:
    """Return the levels of all factors."""
    factors: list[tuple[str, Any]] = []
    for name, value in grid.items():
        if isinstance(value, Mapping) and not all(isinstance(each, Mapping) for each in value.values()):
            factors += [(f"{name}.{key}", values) for key, values in value.items()]  # model.width without quotes
        else:
            factors.append((name, value))
    choices = [
        _named_choices(name, value) if isinstance(value, Mapping) else _value_choices(name, value)
        for name, value in factors
    ]
    check_size(prod(len(levels) for levels in choices), "conditions")
    return choices


def check_size(count: int, noun: str) -> None:
    """Raise an error for a study that could not even be planned."""
    if count > MAX_TRIALS:
        raise RecipeError(f"The study has {count:,} {noun}; at most {MAX_TRIALS:,} are allowed. Divide it into several")


def apply_changes(base: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Return a recipe tree with changed values; a section with a new `name` loses its other options."""
    tree = deepcopy(dict(base))
    if ("seed",) in changes:
        raise RecipeError(
            "[grid] must not set the seed: a study sets the seed of every repetition. Use the study keys `seed` and "
            "`repetitions`."
        )
    for path, value in sorted(changes.items(), key=lambda change: change[0][-1] != "name"):
        *sections, last = path
        part = tree
        for section in sections:
            part = part.setdefault(section, {})
            if not isinstance(part, dict):
                raise RecipeError(
                    f"{'.'.join(path)}: {section} = {part!r} is not a section, so it has no key {last!r}. Set "
                    f"{section} itself, or use named conditions: [grid.mine.one]."
                )
        if last == "name" and part.get("name") != value and len(sections) == 1:
            for option in set(part) - _own_keys(sections[0]):
                del part[option]
        part[last] = value
    return tree


def condition_label(condition: Mapping[str, Any]) -> str:
    """Return the label of a condition, such as `method=SAM, rho=0.05`."""
    return ", ".join(f"{name}={value}" for name, value in condition.items())


def _value_choices(name: str, values: Any) -> list[Choice]:
    if not isinstance(values, list | tuple) or not values:
        raise RecipeError(
            f"[grid] {name} = {values!r}: give a list of values, such as [8, 16], or a table of named conditions."
        )
    return [({short_key(name): value}, {tuple(name.split(".")): value}) for value in values]


def _named_choices(name: str, conditions: Mapping[str, Any]) -> list[Choice]:
    """Return named conditions; `each` lists values of further keys to cross with one condition only."""
    choices: list[Choice] = []
    for title, table in conditions.items():
        changes = flat_changes({key: value for key, value in table.items() if key != "each"})
        for inner in product(*grid_factors(table.get("each", {}))):
            choices.append(combine([({name: title}, changes), *inner]))
    return choices


def combine(choices: Sequence[Choice]) -> Choice:
    """Return the combined condition and changes of one level per factor."""
    names = [name for part, _ in choices for name in part]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise RecipeError(
            f"[grid] has two factors with the short name {min(duplicates)!r}. Give one of them as a table of named "
            "conditions."
        )
    condition = {name: value for part, _ in choices for name, value in part.items()}
    return condition, {path: value for _, changes in choices for path, value in changes.items()}


def flat_changes(table: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the values of a nested table by path."""
    return {tuple(key.split(".")): value for key, value in flatten(table).items()}


def _own_keys(section: str) -> set[str]:
    part = Recipe.model_fields[section].annotation if section in Recipe.model_fields else None
    return set(getattr(part, "model_fields", {}))
