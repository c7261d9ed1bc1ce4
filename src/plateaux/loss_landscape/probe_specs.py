"""Probes by name, with options in brackets."""

from __future__ import annotations

from collections.abc import Sequence

from plateaux.config.specs import every, one
from plateaux.core import registry
from plateaux.loss_landscape.loss_surface import Probe


def probes_named(words: Sequence[str], *, allow: tuple[str, ...] = ()) -> dict[str, Probe]:
    """Return probes by name; `all` stands for the usual ones."""
    found: dict[str, Probe] = {}
    for word in words:
        if word == "all":
            found |= {name: made for name, made in every(registry.probe).items() if made.usual}
        else:
            found[word] = one(word, registry.probe, Probe, allow)
    return found
