"""Metrics by name, by group, and with options."""

from __future__ import annotations

from collections.abc import Sequence

from plateaux.config.specs import every, one
from plateaux.core import registry
from plateaux.core.metric import Measure

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
            found[word] = one(word, registry.measure, Measure, allow)
    return found


def _asking(question: str) -> dict[str, Measure]:
    made = every(registry.measure)
    order = sorted(made, key=lambda name: QUESTIONS.index(made[name].asks))
    return {name: made[name] for name in order if made[name].usual and question in ("all", made[name].asks)}
