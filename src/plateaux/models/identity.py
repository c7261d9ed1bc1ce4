"""What identifies a network that is not built into Plateaux: the source of its code, and its layers."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from textwrap import dedent
from typing import Any

from torch import nn

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def is_built_in(factory: Callable[..., Any]) -> bool:
    """Return whether a model is one of Plateaux."""
    bare = _unwrap(factory)
    owner = bare if hasattr(bare, "__qualname__") else type(bare)
    return str(owner.__module__).partition(".")[0] == "plateaux"


def source_hash(factory: Callable[..., Any], modules: Iterable[nn.Module]) -> str | None:
    """Return a hash of the code of a model: its function, and the classes of its layers that are not in a library.

    Comments and formatting do not count. None: the source is not available, as in an interactive session.
    """
    classes = {type(layer) for module in modules for layer in module.modules()}
    own = sorted((cls for cls in classes if _is_user_code(cls)), key=lambda cls: (cls.__module__, cls.__qualname__))
    bare = _unwrap(factory)
    subject = bare if inspect.isroutine(bare) or inspect.isclass(bare) else type(bare)
    texts = [_source(each) for each in dict.fromkeys([subject, *own])]
    if None in texts:
        return None
    arguments = repr((factory.args, sorted(factory.keywords.items()))) if isinstance(factory, partial) else ""
    parts = [_ADDRESS.sub("", arguments), *(text for text in texts if text is not None)]
    return blake2b("\x1f".join(parts).encode(), digest_size=8).hexdigest()


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


def _is_user_code(cls: type) -> bool:
    """Return whether a class is neither of torch or Plateaux nor installed; a new version of a library is no change."""
    if cls.__module__.partition(".")[0] in ("torch", "plateaux"):
        return False
    try:
        file = inspect.getsourcefile(cls) or ""
    except TypeError:
        return False
    return "site-packages" not in file and "dist-packages" not in file


def _source(item: Any) -> str | None:
    try:
        text = dedent(inspect.getsource(item))
    except (OSError, TypeError):
        return None
    try:
        return ast.unparse(ast.parse(text))  # without comments and formatting
    except SyntaxError:  # a lambda inside an expression
        return text
