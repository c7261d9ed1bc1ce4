"""Plug-ins by name: a plug-in is one file with one decorated function.

    @method
    def sam(loss: LossFn, *, rho: float = 0.05) -> Method:
        "Sharpness-aware minimization."

One function can be several plug-ins that fix some of its options: `@model("resnet8", depth=8)`.

At its first use, a registry imports the files of its package and the entry points of other packages, so there is no
list to edit. The group of the entry points is public and independent of the path of the package. Plug-ins are
factories: functions whose keyword-only options are the options in a recipe.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, update_wrapper
from importlib.machinery import ModuleSpec, PathFinder
from inspect import getdoc, signature
from pathlib import Path
from threading import RLock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from plateaux.core.errors import UnknownNameError, UntrustedCodeError, suggest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints
from collections.abc import Mapping
from dataclasses import dataclass

Factory = TypeVar("Factory", bound=Callable[..., Any])
HUB_PREFIX = "hf:"  # of names of models and data sets of Hugging Face


class Registry:
    """The factories of one kind of plug-in, by name."""

    def __init__(self, kind: str, package: str, *, group: str, modules: Sequence[str] = ()) -> None:
        self.kind = kind
        self.package = package
        self.modules = modules  # other modules of Plateaux with plug-ins: adapters of other libraries
        self.group = group
        self.prefixes: dict[str, Callable[..., Any]] = {}
        self._factories: dict[str, Callable[..., Any]] = {}
        self._registered: set[Callable[..., Any]] = set()  # also factories of prefixes, and those with a taken name
        self._started = self._scanned = False
        self._lock = RLock()

    @overload
    def __call__(self, name: Factory) -> Factory: ...
    @overload
    def __call__(
        self, name: str | None = None, *, prefix: str | None = None, **fixed: Any
    ) -> Callable[[Factory], Factory]: ...
    def __call__(self, name: Any = None, *, prefix: str | None = None, **fixed: Any) -> Any:
        """Register a factory under its own name, under `name`, or for all names that start with `prefix`.

        `fixed` are values of options that cannot be set under this name.
        """
        if callable(name):
            return self._add(name.__name__, name)

        def decorate(factory: Factory) -> Factory:
            if prefix is not None:
                self.prefixes[prefix] = factory
                self._registered.add(factory)
                return factory
            self._add(name or factory.__name__, _fix(factory, fixed) if fixed else factory)
            self._registered.add(factory)
            return factory

        return decorate

    def get(self, name: str, *, allow: tuple[str, ...] = ()) -> Callable[..., Any]:
        """Return the factory called `name`; `package.module:function` names code outside of Plateaux.

        Such code must be decorated, or its module must be in `allow`.
        """
        self._scan()
        if name in self._factories:
            return self._factories[name]
        for prefix, factory in self.prefixes.items():
            if name.startswith(prefix) and len(name) > len(prefix):
                return _bind(factory, name.removeprefix(prefix))
        if ":" in name:
            return self._import_external(name, allow)
        raise UnknownNameError(f"There is no {self.kind} called {name!r}; {suggest(name, self.names())}")

    def is_registered(self, factory: Callable[..., Any]) -> bool:
        """Return whether a function was decorated with this registry."""
        return factory in self._registered

    def names(self) -> list[str]:
        """Return all names, sorted."""
        self._scan()
        return sorted([*self._factories, *(f"{prefix}<name>" for prefix in self.prefixes)])

    def describe(self) -> dict[str, str]:
        """Return the first line of the docstring of every plug-in, by name.

        Plug-ins of Plateaux are read from their source, because importing them takes seconds. Those of other packages
        are imported.
        """
        described: dict[str, str] = {}
        if not self._scanned and not self._entry_points():
            described = _describe_sources((self.package, *self.modules), self.kind)
        if not described:  # other packages, or a package without sources
            self._scan()
        factories = {**self._factories, **{f"{prefix}<name>": factory for prefix, factory in self.prefixes.items()}}
        described |= {name: _first_line(getdoc(factory)) for name, factory in factories.items()}
        return dict(sorted(described.items()))

    def _add(self, name: str, factory: Factory) -> Factory:
        first = self._factories.get(name, factory)
        if first.__module__ == factory.__module__:
            self._factories[name] = factory
        else:  # the meaning of a name must not depend on which packages are installed
            warnings.warn(
                f"The {self.kind} {name!r} is registered by {first.__module__} already; use that of "
                f"{factory.__module__} as '{factory.__module__}:{factory.__name__}'",
                stacklevel=3,
            )
        self._registered.add(factory)
        return factory

    def _entry_points(self) -> EntryPoints:
        from importlib.metadata import entry_points

        return entry_points(group=self.group)

    def _scan(self) -> None:
        if self._scanned:
            return
        with self._lock:  # other threads wait for the scan; a plug-in that calls this while it is imported does not
            if self._started:
                return
            self._started = True
            package = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self.package}.{module.name}")
            for name in self.modules:
                importlib.import_module(name)
            for point in self._entry_points():
                try:
                    point.load()
                except Exception as error:  # one broken plug-in must not disable all others
                    warnings.warn(f"The plug-in {point.value!r} is ignored because of {error!r}", stacklevel=2)
            self._scanned = True

    def _import_external(self, name: str, allow: tuple[str, ...]) -> Callable[..., Any]:
        module, _, attribute = name.partition(":")
        spec = _find_spec(module)
        if spec is None and module not in sys.modules and module.split(".")[0] not in sys.builtin_module_names:
            raise UnknownNameError(
                f"There is no module {module!r} on the Python path, so the {self.kind} {name!r} cannot be imported. "
                "If the module is in the current folder, run: PYTHONPATH=. plateaux ..."
            )
        # An import executes code, so the source is searched for the decorator first: untrusted recipes are data.
        if module not in allow and not _is_decorated_in_source(spec, attribute, self.kind):
            raise UntrustedCodeError(
                f"{name!r} is not decorated with @plateaux.{self.kind}, so a recipe cannot call it. "
                f"If you trust the code, decorate the function or add: --trust {module}"
            )
        try:
            factory = getattr(importlib.import_module(module), attribute, None)
        except ImportError as error:
            raise UnknownNameError(f"{module!r} cannot be imported: {error}") from error
        if not callable(factory):
            raise UnknownNameError(f"{module!r} has no function {attribute!r}")
        return factory  # type: ignore[no-any-return]


@lru_cache(maxsize=256)  # the same object for the same name, so that its schema is built once
def _bind(factory: Callable[..., Any], rest: str) -> Callable[..., Any]:
    return partial(factory, rest)


def _fix(factory: Callable[..., Any], fixed: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a factory without the options that have a fixed value, which its description states."""
    own, preset = signature(factory), update_wrapper(partial(factory, **fixed), factory)
    options = [option for name, option in own.parameters.items() if name not in fixed]
    vars(preset).update(__signature__=own.replace(parameters=options), __doc__=_first_line(getdoc(factory), fixed))
    return preset


def is_on_path(module: str) -> bool:
    """Return whether a module can be found, without importing it or its parents."""
    return module in sys.modules or _find_spec(module) is not None


def _find_spec(module: str) -> ModuleSpec | None:
    """Return the spec of a module without importing it or its parents."""
    path: list[str] | None = None
    spec = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, path) if part else None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _is_decorated_in_source(spec: ModuleSpec | None, attribute: str, kind: str) -> bool:
    """Return whether the source of a module decorates a function with `@plateaux.<kind>`, without importing it."""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    try:
        body = ast.parse(Path(spec.origin).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    decorators = _decorator_names(body, kind)
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == attribute:
            return any(_name(decorator) in decorators for decorator in node.decorator_list)
    return False


def _describe_sources(names: Sequence[str], kind: str) -> dict[str, str]:
    """Return name and first line of every decorated function of packages and modules, without importing them."""
    specs = [spec for spec in map(_find_spec, names) if spec is not None]
    files = {file for spec in specs for folder in spec.submodule_search_locations or [] for file in _files(folder)}
    files |= {Path(spec.origin) for spec in specs if spec.origin and not spec.submodule_search_locations}
    described: dict[str, str] = {}
    for file in sorted(files):
        body = ast.parse(file.read_bytes()).body
        decorators = _decorator_names(body, kind)
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found = [decorator for decorator in node.decorator_list if _name(decorator) in decorators]
                described |= dict(_read_decorator(node, each) for each in found)
    return described


def _files(folder: str) -> list[Path]:
    return list(Path(folder).glob("*.py"))


def _read_decorator(node: ast.FunctionDef | ast.ClassDef, decorator: ast.expr) -> tuple[str, str]:
    """Return the name and the description that `@kind`, `@kind("name", depth=8)`, or `@kind(prefix="prefix")` gives."""
    fixed, name = dict[str, Any](), node.name
    if isinstance(decorator, ast.Call):
        fixed = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in decorator.keywords}
        name = ast.literal_eval(decorator.args[0]) if decorator.args else name
    prefix = fixed.pop("prefix", None)
    return f"{prefix}<name>" if prefix else name, _first_line(ast.get_docstring(node), fixed)


def _first_line(docstring: str | None, fixed: Mapping[str, Any] = MappingProxyType({})) -> str:
    line = (docstring or "").split("\n", 1)[0]
    options = ", ".join(f"{name} = {json.dumps(value)}" for name, value in fixed.items())
    return f"{line.removesuffix('.')} ({options})." if options else line


def _decorator_names(body: Sequence[ast.stmt], kind: str) -> set[str]:
    """Return the names that the decorator has in a module, according to its imports."""
    sources = ("plateaux", "plateaux.core.registry")
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            names |= {f"{name.asname or name.name}.{kind}" for name in node.names if name.name in sources}
        elif isinstance(node, ast.ImportFrom) and node.module in sources and not node.level:
            names |= {name.asname or name.name for name in node.names if name.name == kind}
    return names


def _name(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


method = Registry("method", "plateaux.methods", group="plateaux.methods")
metric = Registry("metric", "plateaux.evaluation.metrics", group="plateaux.metrics")
dataset = Registry(
    "dataset", "plateaux.data.datasets", group="plateaux.data", modules=("plateaux.integrations.huggingface_data",)
)
model = Registry(
    "model",
    "plateaux.models.architectures",
    group="plateaux.models",
    modules=("plateaux.integrations.huggingface_models", "plateaux.integrations.text_models"),
)
probe = Registry("probe", "plateaux.loss_landscape.probes", group="plateaux.probes")
executor = Registry("executor", "plateaux.distributed.executors", group="plateaux.executors")


@dataclass(frozen=True, slots=True)
class HubAccess:
    """What the builder of a Hugging Face model or data set is told besides its options.

    A recipe cannot set any of this: downloads are allowed on the command line or in Python only.
    """

    download: bool = False
    model: str | None = None  # for data sets: `PATH_OR_ID` of the recipe's Hugging Face model
    config: Mapping[str, Any] | None = None  # for models of a run: its config.json; the weights come from the run
    has_weights: bool = False  # for models of a run: it has all weights, so pretrained ones are not needed


NO_HUB_ACCESS = HubAccess()
