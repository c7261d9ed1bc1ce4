"""Metrics and probes by name, with options in parentheses: `ece(bins=10)`."""

from __future__ import annotations

import re
from inspect import unwrap
from typing import Any, TypeVar

from plateaux.config.code import source_hash
from plateaux.config.schema import check
from plateaux.core import registry
from plateaux.core.errors import PlateauxError, RecipeError

EXAMPLES = {"metric": "ece(bins=10)", "probe": "worst_l2(radius=0.5; steps=50)"}

Plugin = TypeVar("Plugin")


def build_all(kind: registry.Registry) -> dict[str, Any]:
    """Build all plugins of a kind with default options, grouped by module, in the order of their definition."""

    def place(name: str) -> tuple[str, int]:
        factory = kind.get(name)
        return factory.__module__, unwrap(factory).__code__.co_firstlineno

    return {name: kind.get(name)() for name in sorted(kind.names(), key=place)}


def build_one(spec: str, kind: registry.Registry, cls: type[Plugin], trust: tuple[str, ...]) -> Plugin:
    """Build the plugin that a spec such as `ece(bins=10)` describes."""
    example = EXAMPLES[kind.kind]
    match = re.fullmatch(r"([^()]+)(?:\(([^()]*)\))?", spec)
    if match is None:
        raise RecipeError(f"{spec!r} is not a {kind.kind}; write a name, with options in parentheses: {example}")
    factory = kind.get(match[1].strip(), allow=trust)
    options = dict(_parse_option(spec, part, example) for part in (match[2] or "").split(";") if part.strip())
    plugin = factory(**check(match[1], factory, options))
    if not isinstance(plugin, cls):
        raise RecipeError(
            f"{kind.kind} {match[1]!r} returned {type(plugin).__name__}; it must return plateaux.{cls.__name__}"
        )
    return plugin


def user_code(spec: str, trust: tuple[str, ...]) -> str:
    """Return the hash of the user's code behind a metric or a probe; empty: it is of a library, or is not trusted."""
    name = spec.partition("(")[0].removesuffix(" by size").removesuffix(" under corruption").strip()
    for kind in (registry.metric, registry.probe):
        try:
            return source_hash(kind.get(name, allow=trust)) or ""
        except PlateauxError:  # of the other kind, a derived metric, or code that is not trusted
            continue
    return ""


def _parse_option(spec: str, text: str, example: str) -> tuple[str, Any]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise RecipeError(f"{spec!r}: write options as name=value, separated by semicolons: {example}")
    return name, value
