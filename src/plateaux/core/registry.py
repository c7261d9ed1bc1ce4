"""Plug-ins by name: one file with one decorator is all it takes.

    @method
    def sam(*, rho: float = 0.05) -> Method:
        "Climb to the sharpest point within rho, descend from there."

A registry imports the files of its package (and the entry points of other packages) when it is first asked, so there is
no list to edit. The group of those entry points is public and does not follow the path of the package. What a registry
holds are factories: functions whose keyword-only options are the options of a recipe.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from inspect import getdoc
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar, overload

from plateaux.core.errors import UnknownNameError, UntrustedCodeError, suggest

Factory = TypeVar("Factory", bound=Callable[..., Any])


class Registry:
    """Factories of one kind, found by name."""

    def __init__(self, kind: str, package: str, *, group: str) -> None:
        self.kind = kind
        self.package = package
        self.group = group
        self.prefixes: dict[str, Callable[..., Any]] = {}
        self._found: dict[str, Callable[..., Any]] = {}
        self._begun = self._scanned = False
        self._scanning = RLock()

    @overload
    def __call__(self, given: Factory) -> Factory: ...
    @overload
    def __call__(self, given: str | None = None, *, prefix: str | None = None) -> Callable[[Factory], Factory]: ...
    def __call__(self, given: Any = None, *, prefix: str | None = None) -> Any:
        """Register a factory under its own name, under `given`, or for every name that starts with `prefix`."""
        if callable(given):
            return self._add(given.__name__, given)

        def decorate(factory: Factory) -> Factory:
            if prefix is not None:
                self.prefixes[prefix] = factory
                return self._mark(factory)
            return self._add(given or factory.__name__, factory)

        return decorate

    def get(self, name: str, *, allow: tuple[str, ...] = ()) -> Callable[..., Any]:
        """Return the factory called `name`; `package.module:function` reaches code outside."""
        self._scan()
        if name in self._found:
            return self._found[name]
        for prefix, factory in self.prefixes.items():
            if name.startswith(prefix) and len(name) > len(prefix):
                return _bind(factory, name.removeprefix(prefix))
        if ":" in name:
            return self._outside(name, allow)
        raise UnknownNameError(f"There is no {self.kind} called {name!r}; {suggest(name, self.names())}")

    def names(self) -> list[str]:
        """Return every name, sorted."""
        self._scan()
        return sorted([*self._found, *(f"{prefix}<name>" for prefix in self.prefixes)])

    def describe(self) -> dict[str, str]:
        """Return the first sentence of every plug-in's docstring by name."""
        self._scan()
        found = {**self._found, **{f"{prefix}<name>": factory for prefix, factory in self.prefixes.items()}}
        return {name: (getdoc(found[name]) or "").split("\n", 1)[0] for name in sorted(found)}

    def _add(self, name: str, factory: Factory) -> Factory:
        old = self._found.get(name, factory)
        if old.__module__ == factory.__module__:
            self._found[name] = factory
        else:  # a name must not change its meaning with what happens to be installed
            warnings.warn(
                f"There is a {self.kind} {name!r} in {old.__module__}; that of {factory.__module__} goes by "
                f"'{factory.__module__}:{factory.__name__}' only",
                stacklevel=3,
            )
        return self._mark(factory)

    def _mark(self, factory: Factory) -> Factory:
        factory.__plateaux__ = self.kind  # type: ignore[attr-defined]
        return factory

    def _scan(self) -> None:
        if self._scanned:
            return
        with self._scanning:  # another thread finds all of them or waits; a plug-in that asks while it loads does not
            if self._begun:
                return
            self._begun = True
            package = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self.package}.{module.name}")
            for point in entry_points(group=self.group):
                try:
                    point.load()
                except Exception as problem:  # somebody else's plug-in must not take everything down
                    warnings.warn(f"The plug-in {point.value!r} was left out: {problem!r}", stacklevel=2)
            self._scanned = True

    def _outside(self, name: str, allow: tuple[str, ...]) -> Callable[..., Any]:
        module, _, attribute = name.partition(":")
        spec = _find(module)
        if spec is None and module not in sys.modules and module.split(".")[0] not in sys.builtin_module_names:
            raise UnknownNameError(
                f"There is no module {module!r} on the Python path, so the {self.kind} {name!r} cannot be found. "
                "If it lies in a folder of yours, name that folder: PYTHONPATH=. plateaux ..."
            )
        # Importing runs code, so the mark is looked for in the source first: a recipe from a stranger is data.
        if module not in allow and not _marked_in_source(spec, attribute, self.kind):
            raise UntrustedCodeError(
                f"{name!r} is not marked @plateaux.{self.kind}, so a recipe may not call it. "
                f"If you trust it, mark the function or add: --trust {module}"
            )
        try:
            factory = getattr(importlib.import_module(module), attribute, None)
        except ImportError as problem:
            raise UnknownNameError(f"{module!r} cannot be imported: {problem}") from problem
        if not callable(factory):
            raise UnknownNameError(f"{module!r} has no function {attribute!r}")
        return factory  # type: ignore[no-any-return]


def _bind(factory: Callable[..., Any], rest: str) -> Callable[..., Any]:
    from functools import partial

    return partial(factory, rest)


def _find(module: str) -> ModuleSpec | None:
    """Return where a module would be imported from, without importing it or its parents."""
    path: list[str] | None = None
    spec = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, path) if part else None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _marked_in_source(spec: ModuleSpec | None, attribute: str, kind: str) -> bool:
    """Say whether the module's source decorates that function with `@plateaux.<kind>`, without importing anything."""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    try:
        body = ast.parse(Path(spec.origin).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    marks = _marks(body, kind)
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == attribute:
            return any(_called(decorator) in marks for decorator in node.decorator_list)
    return False


def _marks(body: Sequence[ast.stmt], kind: str) -> set[str]:
    """Return what a module may call the decorator by, as it imported it."""
    homes = ("plateaux", "plateaux.core.registry")
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            found |= {f"{name.asname or name.name}.{kind}" for name in node.names if name.name in homes}
        elif isinstance(node, ast.ImportFrom) and node.module in homes and not node.level:
            found |= {name.asname or name.name for name in node.names if name.name == kind}
    return found


def _called(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


method = Registry("method", "plateaux.methods", group="plateaux.methods")
metric = Registry("metric", "plateaux.evaluation.metrics", group="plateaux.metrics")
dataset = Registry("dataset", "plateaux.data.datasets", group="plateaux.data")
model = Registry("model", "plateaux.models.architectures", group="plateaux.models")
probe = Registry("probe", "plateaux.loss_landscape.probes", group="plateaux.probes")
executor = Registry("executor", "plateaux.distributed.executors", group="plateaux.executors")
