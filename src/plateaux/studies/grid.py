"""The grid of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import product
from typing import Any

from plateaux.config.recipe import Recipe, flatten, short_key
from plateaux.core.errors import RecipeError

Changes = Mapping[tuple[str, ...], Any]


Choice = tuple[dict[str, Any], Changes]
"""One level of a factor: what it is called, and what it changes."""


def grid_factors(grid: Mapping[str, Any]) -> list[list[Choice]]:
    """Return the levels of every factor."""
    found: list[tuple[str, Any]] = []
    for name, value in grid.items():
        if isinstance(value, Mapping) and not all(isinstance(each, Mapping) for each in value.values()):
            found += [(f"{name}.{rest}", each) for rest, each in value.items()]  # model.width without quotes
        else:
            found.append((name, value))
    return [
        _named_choices(name, value) if isinstance(value, Mapping) else _values(name, value) for name, value in found
    ]


def apply_changes(base: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
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


def condition_label(condition: Mapping[str, Any]) -> str:
    """Return a condition in words: `method=SAM, rho=0.05`."""
    return ", ".join(f"{name}={value}" for name, value in condition.items())


def _values(name: str, values: Any) -> list[Choice]:
    if not isinstance(values, list | tuple) or not values:
        raise RecipeError(
            f"[grid] {name} = {values!r}: give a list of values of that key, such as [8, 16], or a table of conditions"
        )
    return [({short_key(name): value}, {tuple(name.split(".")): value}) for value in values]


def _named_choices(name: str, conditions: Mapping[str, Any]) -> list[Choice]:
    """Return named conditions; `each` in one lists values of further keys, which only that one is crossed with."""
    found: list[Choice] = []
    for title, table in conditions.items():
        changes = flat_changes({key: value for key, value in table.items() if key != "each"})
        for inner in product(*grid_factors(table.get("each", {}))):
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


def flat_changes(table: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the values of a nested table by path."""
    return {tuple(key.split(".")): value for key, value in flatten(table).items()}


def _own_keys(section: str) -> set[str]:
    part = Recipe.model_fields[section].annotation if section in Recipe.model_fields else None
    return set(getattr(part, "model_fields", {}))
