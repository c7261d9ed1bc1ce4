"""Metrics by name, by group, and with options."""

from __future__ import annotations

from collections.abc import Sequence

from plateaux.config.specs import every, one
from plateaux.core import registry
from plateaux.core.metric import Metric

QUESTIONS = ("good", "sure", "different")


def measures_named(words: Sequence[str], *, allow: tuple[str, ...] = ()) -> dict[str, Metric]:
    """Return measures by name; `all`, `good`, `sure` and `different` stand for several.

    >>> list(measures_named(["ece(bins=10)"]))
    ['ece(bins=10)']
    """
    found: dict[str, Metric] = {}
    for word in words:
        if word in (*QUESTIONS, "all"):
            found |= _asking(word)
        else:
            found[word] = one(word, registry.metric, Metric, allow)
    return found


def _asking(question: str) -> dict[str, Metric]:
    made = every(registry.metric)
    order = sorted(made, key=lambda name: QUESTIONS.index(made[name].group))
    return {name: made[name] for name in order if made[name].default and question in ("all", made[name].group)}
