"""Measures and probes by name: single ones, with options in brackets, or several by one word."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from plateaux.config.schema import check
from plateaux.core import registry
from plateaux.core.errors import RecipeError

EXAMPLES = {"metric": "ece(bins=10)", "probe": "worst_l2(radius=0.5; steps=50)"}

Plugin = TypeVar("Plugin")


def build_all(kind: registry.Registry) -> dict[str, Any]:
    """Return all of a kind as they are without options: those of one file together, in the order they were written."""

    def place(name: str) -> tuple[str, int]:
        factory = kind.get(name)
        return factory.__module__, factory.__code__.co_firstlineno

    return {name: kind.get(name)() for name in sorted(kind.names(), key=place)}


def build_one(word: str, kind: registry.Registry, what: type[Plugin], trust: tuple[str, ...]) -> Plugin:
    example = EXAMPLES[kind.kind]
    found = re.fullmatch(r"([^()]+)(?:\(([^()]*)\))?", word)
    if found is None:
        raise RecipeError(f"{word!r} is no {kind.kind}; write a name, or options in brackets: {example}")
    factory = kind.get(found[1].strip(), allow=trust)
    options = dict(_option(word, part, example) for part in (found[2] or "").split(";") if part.strip())
    made = factory(**check(found[1], factory, options))
    if not isinstance(made, what):
        raise RecipeError(
            f"{kind.kind} {found[1]!r} returned {type(made).__name__}; it must return plateaux.{what.__name__}"
        )
    return made


def _option(word: str, part: str, example: str) -> tuple[str, Any]:
    name, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals:
        raise RecipeError(f"{word!r}: options are written name=value, several with semicolons: {example}")
    return name, value


def split_names(text: str) -> list[str]:
    """Return the names in a text with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
