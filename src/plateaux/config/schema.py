"""Options of plug-ins: a factory's signature is the schema of its section in a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from plateaux.core.errors import RecipeError, suggest

PROVIDED = frozenset({"loss", "shape", "classes", "params", "epochs"})
"""What the engine itself hands to a factory; never an option of a recipe."""


def check(
    section: str, factory: Callable[..., Any], given: Mapping[str, Any], *, also: Iterable[str] = ()
) -> dict[str, Any]:
    """Return `given` validated against the factory's options, or say what is wrong; `also` are other keys allowed."""
    known = fields(factory)
    for name in given:
        if name not in known:
            raise ConfigKeyError(section, name, f"[{section}] has no key {name!r}; {suggest(name, [*known, *also])}")
    strict = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    schema = create_model("Options", __config__=strict, **known)  # type: ignore[call-overload]
    try:
        return schema(**given).model_dump(include=set(given))
    except ValidationError as problem:
        first = problem.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        raise ConfigKeyError(section, name, f"[{section}] {name} = {given.get(name)!r}: {first['msg']}") from None


def options_for_member(
    factory: Callable[..., Any], given: Mapping[str, Any], number: int, members: int
) -> dict[str, Any]:
    """Return the options of one member: a list stands for one value per member where the option itself is no list."""
    known = fields(factory)
    return {name: _own(name, value, known.get(name), number, members) for name, value in given.items()}


def value_for_member(name: str, value: Any, number: int, members: int) -> Any:
    """Return member `number`'s entry of a per-member list."""
    if len(value) != members:
        raise RecipeError(
            f"{name} lists {len(value)} values, but the ensemble has {members} members: give one value, or one for each"
        )
    return value[number]


def accepts(factory: Callable[..., Any], name: str) -> bool:
    """Say whether the factory takes an argument of that name."""
    return name in signature(factory).parameters


def fields(factory: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keyword options of a factory with their types and defaults, as pydantic wants them."""
    bare = factory.func if isinstance(factory, partial) else factory
    hints = get_type_hints(bare.__init__ if isinstance(bare, type) else bare)  # type: ignore[misc]
    # A data set tells how many classes there are; everything else is told.
    hidden = frozenset() if getattr(bare, "__plateaux__", "") == "dataset" else PROVIDED
    found: dict[str, tuple[Any, Any]] = {}
    for name, parameter in signature(factory).parameters.items():
        if name in hidden or parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        default = ... if parameter.default is Parameter.empty else parameter.default
        found[name] = (hints.get(name, Any), default)
    return found


class ConfigKeyError(RecipeError):
    """A key or value of a section is wrong; knows which, so that a file's line can be named."""

    def __init__(self, section: str, name: str, message: str, *, nth: int = 0) -> None:
        super().__init__(message)
        self.section, self.name = section, name
        self.nth = nth  # which of several sections of that name


def _own(name: str, value: Any, known: tuple[Any, Any] | None, number: int, members: int) -> Any:
    if not isinstance(value, list | tuple) or known is None:
        return value
    try:
        TypeAdapter(known[0], config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError:
        return value_for_member(name, value, number, members)
    return value


class ConfigSection(BaseModel):
    """A part of a recipe: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PluginSection(BaseModel):
    """A part of a recipe that names a plug-in: further keys are the plug-in's options."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
