"""Metrics by name, by group, and with options."""

from __future__ import annotations

from collections.abc import Sequence

from plateaux.config.specs import build_all, build_one
from plateaux.core import registry
from plateaux.core.metric import Metric

GROUPS = ("performance", "uncertainty", "diversity")


def get_metrics(words: Sequence[str], *, trust: tuple[str, ...] = ()) -> dict[str, Metric]:
    """Return measures by name; `all`, `performance`, `uncertainty` and `diversity` stand for several.

    >>> list(get_metrics(["ece(bins=10)"]))
    ['ece(bins=10)']
    """
    found: dict[str, Metric] = {}
    for word in words:
        if word in (*GROUPS, "all"):
            found |= _metrics_of_group(word)
        else:
            found[word] = build_one(word, registry.metric, Metric, trust)
    return found


def _metrics_of_group(question: str) -> dict[str, Metric]:
    made = build_all(registry.metric)
    order = sorted(made, key=lambda name: GROUPS.index(made[name].group))
    return {name: made[name] for name in order if made[name].default and question in ("all", made[name].group)}
