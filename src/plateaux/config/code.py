"""A hash of the code outside of Plateaux that weights and results depend on: model, method, loss, data set, metric.

The hash covers a function or class and everything of the user that it refers to: functions, classes, and plain values
of its module and of imported modules. Comments, formatting, and the source of libraries do not count.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dis import get_instructions
from functools import partial
from hashlib import blake2b
from textwrap import dedent
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.config.schema import member_value
from plateaux.core import registry
from plateaux.core.errors import UnknownNameError

if TYPE_CHECKING:
    from torch import nn

# Functions that `exec` defines belong to `builtins`, but they are code of the user.
LIBRARIES = ("torch", "plateaux", *(sys.stdlib_module_names - {"builtins"}))
LAYER = "layer "  # begins the section of a class of layers
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def code_hashes(recipe: Recipe, components: Components, networks: Iterable[nn.Module] = ()) -> dict[str, str]:
    """Return a hash by section of the recipe, and by class of the layers of some networks.

    A model or a loss of a library that was passed in Python has its name instead. What the recipe names in a library,
    or what has no source, is left out.
    """
    found: dict[str, list[Any]] = {"model": [], "method": [], "loss": [], "data": [], "metric": []}
    names = {member_value("model.name", recipe.model.name, n, recipe.members) for n in range(recipe.members)}
    for name in names:
        found["model"] += [components.model] if components.model else _get("model", name, components)
    found["method"] += _get("method", recipe.method.name, components)
    found["loss"] += [components.loss] if components.loss else []
    found["data"] += [] if components.data is not None else _get("dataset", recipe.data.name, components)
    if recipe.train.select != "last":  # a metric selects the weights
        found["metric"] += _get("metric", recipe.train.select.removeprefix("best:").partition("(")[0], components)
    for cls in {type(layer) for network in networks for layer in network.modules()}:
        found[f"{LAYER}{cls.__module__}.{cls.__qualname__}"] = [cls]
    hashes = {section: source_hash(*subjects) for section, subjects in found.items() if subjects}
    for section, passed in (("model", components.model), ("loss", components.loss)):
        if passed is not None:
            hashes[section] = hashes.get(section) or _library_name(passed)
    return {section: value for section, value in hashes.items() if value}


def changed_code(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the sections whose code differs, and new classes of layers; a source that is missing is not compared."""
    has_layers = any(name.startswith(LAYER) for name in old)
    return [
        name for name in new if (name in old or (has_layers and name.startswith(LAYER))) and old.get(name) != new[name]
    ]


def _get(kind: str, name: str, components: Components) -> list[Callable[..., Any]]:
    """Return the plug-in, or nothing if it is of a library, or if the name is a label of an object passed in Python."""
    try:
        plugin = getattr(registry, kind).get(name, allow=components.trust)
    except UnknownNameError:
        return []
    return [] if _library_name(plugin) else [plugin]


def source_hash(*subjects: Any) -> str | None:
    """Return a hash of the user's code that the subjects consist of; None: there is none, or its source is missing."""
    texts: dict[str, str] = {}
    waiting, seen = list(subjects), set[int]()
    while waiting:
        subject = waiting.pop()
        if isinstance(subject, partial):
            arguments = _ADDRESS.sub("", repr((subject.args, sorted(subject.keywords.items()))))
            texts[f"arguments {len(texts)}"] = _library_name(subject.func) + arguments
            waiting.append(subject.func)
            continue
        subject = _definition(subject)
        if id(subject) in seen or not _is_user_code(subject):
            continue
        seen.add(id(subject))
        text = _source(subject)
        if text is None:
            return None
        texts[_qualified_name(subject)] = text
        for name, value in _references(subject):
            if isinstance(value, bool | int | float | str | tuple | None):
                texts[f"{_qualified_name(subject)}: {name}"] = repr(value)
            elif inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, partial):
                waiting.append(value)
    content = "\x1f".join(f"{name}\x1e{texts[name]}" for name in sorted(texts))
    return blake2b(content.encode(), digest_size=8).hexdigest() if texts else None


def _definition(subject: Any) -> Any:
    """Return the function or class that an object comes from."""
    while isinstance(subject, partial):
        subject = subject.func
    subject = inspect.unwrap(subject) if callable(subject) else subject
    return subject if inspect.isroutine(subject) or inspect.isclass(subject) else type(subject)


def _library_name(subject: Any) -> str:
    """Return the name of what comes from a library; code of the user has none."""
    subject = _definition(subject)
    return "" if _is_user_code(subject) else _qualified_name(subject)


def _qualified_name(subject: Any) -> str:
    return f"{getattr(subject, '__module__', None)}.{subject.__qualname__}"


def _references(subject: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of the module that a function, or a method or base of a class, names."""
    if inspect.isclass(subject):
        yield from ((base.__name__, base) for base in subject.__bases__)
        functions = [inspect.unwrap(getattr(each, "fget", None) or getattr(each, "__func__", each))
                     for each in vars(subject).values()]  # fmt: skip
    else:
        functions = [subject]
    for function in functions:
        if isinstance(function, FunctionType):
            scope = ChainMap(dict(inspect.getclosurevars(function).nonlocals), function.__globals__)
            names = sorted(_names(function.__code__))
            for name in filter(scope.__contains__, names):
                value = scope[name]
                yield name, value
                if inspect.ismodule(value) and value.__name__.partition(".")[0] not in LIBRARIES:  # `nets.block()`
                    yield from ((f"{name}.{each}", vars(value)[each]) for each in names if each in vars(value))


def _names(code: CodeType) -> set[str]:
    """Return the names that a function reads; one that it assigns with `global`, such as a counter, is no constant."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    counters = {each.argval for each in get_instructions(code) if each.opname == "STORE_GLOBAL"}
    return (set(code.co_names) | set(code.co_freevars)).union(*inner) - counters


def _is_user_code(subject: Any) -> bool:
    module = getattr(subject, "__module__", None) or ""
    if module.partition(".")[0] in LIBRARIES:
        return False
    try:
        file = inspect.getsourcefile(subject) or ""
    except OSError:
        return True  # of an interactive session
    except TypeError:
        return False
    return "site-packages" not in file and "dist-packages" not in file


def _source(subject: Any) -> str | None:
    try:
        text = dedent(inspect.getsource(subject))
        return ast.unparse(ast.parse(text))  # without comments and formatting
    except (OSError, TypeError):
        return None
    except SyntaxError:  # a lambda inside an expression
        return text
