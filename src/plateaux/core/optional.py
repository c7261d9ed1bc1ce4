"""Importing what others wrote: a missing library becomes a sentence, a broken torchvision is mended.

timm imports torchvision, and so do parts of transformers, torchmetrics and lightning where it is installed. Its usual
wheel is built for CUDA; beside a torch for CPU its import ends in "operator torchvision::nms does not exist", and all
of them with it. Declaring the two operators it asks for is enough: nothing here ever calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from torch.library import Library

from plateaux.core.errors import RecipeError

BROKEN = "operator torchvision::nms does not exist"
LAZY = {"transformers"}  # imports torchvision only when one of its models is first asked for

_declared: list[Library] = []  # a library's operators vanish with it, so it must live as long as the process


def optional_import(name: str, *, extra: str) -> ModuleType:
    """Import a library that is no part of the core, with torchvision mended where that is what stops it.

    >>> optional_import("json", extra="none").dumps([1])
    '[1]'
    """
    try:
        return _imported(name)
    except ModuleNotFoundError as error:
        raise RecipeError(_missing(name, extra, error)) from error


def _imported(name: str) -> ModuleType:
    try:
        return _with_probe(name)
    except Exception as error:
        if _declared or not _caused_by_torchvision(error):
            raise
    _forget("torchvision")
    root = name.partition(".")[0]
    if root not in sys.modules:  # a root that is there was imported whole, and others may hold it
        _forget(root)
    _declare()
    return _with_probe(name)


def _with_probe(name: str) -> ModuleType:
    module = import_module(name)
    if name.partition(".")[0] in LAZY and "torchvision" not in sys.modules and find_spec("torchvision") is not None:
        import_module("torchvision")
    return module


def _declare() -> None:
    library = Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _declared.append(library)


def _forget(root: str) -> None:
    for name in [n for n in sys.modules if n == root or n.startswith(root + ".")]:
        del sys.modules[name]


def _caused_by_torchvision(error: BaseException) -> bool:
    return any(isinstance(e, RuntimeError) and BROKEN in str(e) for e in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and all that led to it, each once: chains may be circular."""
    waiting, seen = [error], set[int]()
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            yield error
            waiting += [error.__cause__, error.__context__]


def _missing(name: str, extra: str, error: ModuleNotFoundError) -> str:
    what = f"{name} is not installed" if error.name in (name, None) else f"{name} needs {error.name}, which is missing"
    return f'{what}; run: pip install "plateaux[{extra}]"'
