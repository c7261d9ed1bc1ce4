"""Measures by name: single ones, with options in brackets, or all that ask the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from plateaux import registry
from plateaux.errors import RecipeError
from plateaux.exchange import Measure
from plateaux.options import check

QUESTIONS = ("good", "sure", "different")


def measures_named(words: Sequence[str], *, allow: tuple[str, ...] = ()) -> dict[str, Measure]:
    """Return measures by name; `all`, `good`, `sure` and `different` stand for several.

    >>> list(measures_named(["ece(bins=10)"]))
    ['ece(bins=10)']
    """
    found: dict[str, Measure] = {}
    for word in words:
        if word in (*QUESTIONS, "all"):
            found |= _asking(word)
        else:
            found[word] = _one(word, allow)
    return found


def _asking(question: str) -> dict[str, Measure]:
    made = {name: registry.measure.get(name)() for name in sorted(registry.measure.names(), key=_place)}
    order = sorted(made, key=lambda name: QUESTIONS.index(made[name].asks))
    return {name: made[name] for name in order if made[name].usual and question in ("all", made[name].asks)}


def _place(name: str) -> tuple[str, int]:
    """Return where a measure stands: those of one file belong together, in the order they were written."""
    factory = registry.measure.get(name)
    return factory.__module__, factory.__code__.co_firstlineno


def _one(word: str, allow: tuple[str, ...]) -> Measure:
    found = re.fullmatch(r"([^()]+)(?:\(([^()]*)\))?", word)
    if found is None:
        raise RecipeError(f"{word!r} is no measure; write a name, or options in brackets: ece(bins=10)")
    factory = registry.measure.get(found[1].strip(), allow=allow)
    options = dict(_option(word, part) for part in (found[2] or "").split(";") if part.strip())
    made = factory(**check(found[1], factory, options))
    if not isinstance(made, Measure):
        raise RecipeError(f"measure {found[1]!r} returned {type(made).__name__}; it must return plateaux.Measure")
    return made


def _option(word: str, part: str) -> tuple[str, Any]:
    name, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals:
        raise RecipeError(f"{word!r}: options are written name=value, several with semicolons: ece(bins=10)")
    return name, value


def split_names(text: str) -> list[str]:
    """Return the names in a text with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
