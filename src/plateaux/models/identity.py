"""What identifies a network that is not built into Plateaux, besides its code: its layers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def is_built_in(factory: Callable[..., Any]) -> bool:
    """Return whether a model is one of Plateaux."""
    bare = _unwrap(factory)
    owner = bare if hasattr(bare, "__qualname__") else type(bare)
    return str(owner.__module__).partition(".")[0] == "plateaux"


def describe_layers(modules: Sequence[nn.Module]) -> dict[str, str]:
    """Return the type and the configuration of every layer by name; networks after the first have a prefix."""
    layers: dict[str, str] = {}
    for position, module in enumerate(modules):
        prefix = f"network {position}: " if position else ""
        for name, layer in module.named_modules():
            if not next(layer.children(), None):
                text = f"{type(layer).__name__}({layer.extra_repr()})"
                layers[f"{prefix}{name or 'network'}"] = _ADDRESS.sub("", text)
    return layers


def _unwrap(factory: Callable[..., Any]) -> Any:
    while isinstance(factory, partial):
        factory = factory.func
    return inspect.unwrap(factory)
