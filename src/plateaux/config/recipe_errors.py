"""Errors about a recipe: the key, and the line of the file or the `--set` that it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from plateaux.config.schema import OUT_OF_RANGE, ConfigKeyError, ConfigSection, PluginSection
from plateaux.core.errors import RecipeError, suggest


def locate_error(problem: ConfigKeyError, text: str, where: str, changes: Sequence[str] = ()) -> RecipeError:
    """Return the error with the `--set` that the value comes from, or else with the file and line number."""
    path = [part for part in (problem.section, *problem.name.split(".")) if part]
    for change in reversed(changes):  # the last one counts
        changed = split_change(change)[0]
        if all(a == b for a, b in zip(path, changed, strict=False)):  # one is a section of the other, or they are equal
            return RecipeError(f"--set {change!r}: {problem}")
    line = _find_line(text, problem.section, problem.name, problem.nth)
    return RecipeError(f"{where}{f', line {line}' if line else ''}: {problem}")


def split_change(change: str) -> tuple[list[str], str]:
    """Return the parts of the key and the value of a change such as `optimizer.lr=0.1`."""
    path, sign, value = change.partition("=")
    if not sign or not path.strip():
        raise RecipeError(f"--set {change!r}: write it as section.key=value, such as --set optimizer.lr=0.05")
    return path.strip().split("."), value.strip()


def explain_error(cls: type[ConfigSection], problem: ValidationError) -> ConfigKeyError:
    """Return the first error of a recipe, with its section and key."""
    first = _first_error(problem)
    # A model validator adds its own name to the location.
    location = [part for part in first["loc"] if isinstance(part, str) and "[" not in part]
    nth = next((part for part in first["loc"][1:2] if isinstance(part, int)), 0)
    section, name = (location[0], location[1]) if len(location) > 1 else ("", location[0] if location else "")
    if section == "search":  # the only section with subsections
        name = ".".join(location[1:])
    head = f"[{section}] " if section else ""
    known = _keys(cls.model_fields[section].annotation if section else cls)
    key, full_key = name, f"{head}{name}"
    if len(location) > 2 and name in known and (inside := _keys(known[name].annotation)):  # a key inside a table
        head, key, full_key, known = f"{full_key} ", location[2], f"{full_key}.{location[2]}", inside
    if first["type"] == "extra_forbidden":
        text = f"{head}has no key {key!r}; {suggest(key, known)}".replace("has", "The recipe has", not section)
    elif first["type"] == "missing":
        reason = ": every recipe needs data and a model" if key in ("data", "model") else ""
        text = f"{head or 'The recipe '}lacks {key!r}{reason}"
    else:
        text = f"{full_key} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"
    return ConfigKeyError(section, name, text, nth=nth)


def _first_error(problem: ValidationError) -> ErrorDetails:
    """Return the first error; for a list of numbers, that of its first wrong element: a list is not a single number."""
    first, *others = problem.errors()
    if isinstance(first["input"], list | tuple):
        place = first["loc"][:-1]
        inside = [other for other in others if other["loc"][: len(place)] == place and other["type"] in OUT_OF_RANGE]
        return next(iter(inside), first)
    return first


def _keys(annotation: Any) -> dict[str, Any]:
    """Return the fields of the section in an annotation, alone or in a union."""
    types = (annotation, *get_args(annotation))
    parts = [part for part in types if isinstance(part, type) and part is not NoneType]
    return dict(parts[0].model_fields) if parts and issubclass(parts[0], ConfigSection | PluginSection) else {}


def _find_line(text: str, section: str, name: str, nth: int = 0) -> int | None:
    current, fallback, count = "", None, 0
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("["):
            current = bare.strip("[] ").split("#")[0].strip("[] ")
            count += current == section
            if (current == section and count == nth + 1) or (not section and current == name):
                fallback = number
        elif current == section and count in (0, nth + 1) and bare.split("=")[0].strip().strip("\"'") == name:
            return number
    return fallback
