"""Public names of a package that are imported at their first use, as the stub of the package lists them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


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
