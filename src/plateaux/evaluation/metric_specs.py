"""Metrics by name, by group, and with options."""

from __future__ import annotations

from collections.abc import Sequence

from plateaux.config.specs import build_all, build_one
from plateaux.core import registry
from plateaux.core.metric import Metric

GROUPS = ("performance", "uncertainty", "diversity")


def get_metrics(specs: Sequence[str], *, trust: tuple[str, ...] = ()) -> dict[str, Metric]:
    """Return metrics by name; `all`, `performance`, `uncertainty` and `diversity` select groups.

    A group contains its default metrics only.

    >>> list(get_metrics(["ece(bins=10)"]))
    ['ece(bins=10)']
    """
    metrics: dict[str, Metric] = {}
    for spec in specs:
        if spec in (*GROUPS, "all"):
            metrics |= _default_metrics(spec)
        else:
            metrics[spec] = build_one(spec, registry.metric, Metric, trust)
    return metrics


def _default_metrics(group: str) -> dict[str, Metric]:
    """Return the default metrics of one group, or of all groups in the order of `GROUPS`."""
    metrics = build_all(registry.metric)
    order = sorted(metrics, key=lambda name: GROUPS.index(metrics[name].group))
    return {name: metrics[name] for name in order if metrics[name].default and group in ("all", metrics[name].group)}
