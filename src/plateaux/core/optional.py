"""Imports of optional libraries, with an install command if one is missing, and a workaround for torchvision.

timm imports torchvision, and so do parts of transformers, torchmetrics, and lightning. The default wheel of torchvision
is built for CUDA. With a CPU build of torch, its import fails with "operator torchvision::nms does not exist", and the
imports of all these libraries fail with it. The workaround
declares the two missing operators, which are never called here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from plateaux.core.errors import RecipeError

if TYPE_CHECKING:
    from torch.library import Library

NMS_ERROR = "operator torchvision::nms does not exist"
LAZY = {"transformers"}  # imports torchvision only at the first use of one of its models

_declared: list[Library] = []  # operators disappear with their library, so it is kept until the process ends


def optional_import(name: str, *, extra: str) -> ModuleType:
    """Import an optional library; raise a RecipeError with the install command of the extra if it is missing.

    >>> optional_import("json", extra="none").dumps([1])
    '[1]'
    """
    try:
        return _import(name)
    except ModuleNotFoundError as error:
        raise RecipeError(_missing(name, extra, error)) from error


def pandas_frame(records: Sequence[Mapping[str, Any]]) -> Any:
    """Return records as a pandas DataFrame, if pandas is installed."""
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError:
        raise RecipeError("to_frame needs pandas, which is not installed; run: pip install pandas") from None
    return pandas.DataFrame(records)


def _import(name: str) -> ModuleType:
    try:
        return _import_with_torchvision(name)
    except Exception as error:
        if _declared or not _caused_by_torchvision(error):
            raise
    _forget("torchvision")
    root = name.partition(".")[0]
    if root not in sys.modules:  # otherwise it was imported completely, and other modules may refer to it
        _forget(root)
    _declare_operators()
    return _import_with_torchvision(name)


def _import_with_torchvision(name: str) -> ModuleType:
    module = import_module(name)
    if name.partition(".")[0] in LAZY and "torchvision" not in sys.modules and find_spec("torchvision") is not None:
        import_module("torchvision")
    return module


def _declare_operators() -> None:
    from torch.library import Library

    library = Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _declared.append(library)


def _forget(root: str) -> None:
    for name in [n for n in sys.modules if n == root or n.startswith(root + ".")]:
        del sys.modules[name]


def _caused_by_torchvision(error: BaseException) -> bool:
    return any(isinstance(e, RuntimeError) and NMS_ERROR in str(e) for e in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its causes, and its contexts, each once: chains may be circular."""
    waiting, visited = [error], set[int]()
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in visited:
            visited.add(id(error))
            yield error
            waiting += [error.__cause__, error.__context__]


def _missing(name: str, extra: str, error: ModuleNotFoundError) -> str:
    what = f"{name} is not installed" if error.name in (name, None) else f"{name} needs {error.name}, which is missing"
    return f'{what}; run: pip install "plateaux[{extra}]"'
