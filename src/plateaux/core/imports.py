"""Imports of optional libraries, with an install command, and of public names at their first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from traceback import format_exception
from types import ModuleType
from typing import Any

from plateaux.core.errors import RecipeError

# timm, Lightning, and models of transformers import torchvision. This is what they raise, or the cause of it.
UNFIT = "RuntimeError: operator torchvision::nms does not exist"


def optional_import(name: str, *, extra: str) -> ModuleType:
    """Import an optional library; raise a RecipeError with an install command if it is missing or cannot be imported.

    >>> optional_import("json", extra="none").dumps([1])
    '[1]'
    """
    try:
        module = import_module(name)
        if name.partition(".")[0] == "transformers" and find_spec("torchvision"):
            import_module("torchvision")  # otherwise its first model does, and that error does not name torchvision
        return module
    except Exception as error:
        if UNFIT in "".join(format_exception(error)):
            raise RecipeError(_unfit(name)) from error
        if isinstance(error, ModuleNotFoundError):
            raise RecipeError(_missing(name, extra, error)) from error
        raise


def pandas_frame(records: Sequence[Mapping[str, Any]]) -> Any:
    """Return records as a pandas DataFrame, if pandas is installed."""
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError:
        raise RecipeError("to_frame needs pandas, which is not installed; run: pip install pandas") from None
    return pandas.DataFrame(records)


def _unfit(name: str) -> str:
    torch = version("torch")
    return (
        f"{name} needs torchvision, but the installed build (torchvision {version('torchvision')}) does not fit torch "
        f"{torch}. Install the one from the index that torch comes from; run: pip uninstall torchvision, and then: "
        f'pip install "torch=={torch}" torchvision --index-url URL_OF_THAT_INDEX'
    )


def _missing(name: str, extra: str, error: ModuleNotFoundError) -> str:
    what = f"{name} is not installed" if error.name in (name, None) else f"{name} needs {error.name}, which is missing"
    return f'{what}; run: pip install "plateaux[{extra}]"'


def attach_stub(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__`, and `__dir__` of a package, whose stub has lines `from MODULE import X as X`."""
    lines = Path(file).with_suffix(".pyi").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line.startswith("from ")]
    modules = {name: module for _, module, _, name, *_ in words}
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        """Return a public name or a module of the package, which is imported now."""
        if name in modules:
            namespace[name] = value = getattr(import_module(modules[name]), name)
            return value
        if not name.startswith("_"):
            try:
                return import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return sorted(modules), get, lambda: sorted({*namespace, *modules})
