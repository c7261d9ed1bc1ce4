"""Validation of recipe sections. The signature of a plugin's factory is the schema of its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from inspect import Parameter, signature
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from plateaux.core import registry
from plateaux.core.errors import RecipeError, suggest

PROVIDED = frozenset({"loss", "shape", "classes", "params", "epochs", "hub_access"})
"""Arguments that the engine passes to a factory. They are never options of a recipe."""
UNANNOTATED = Annotated[Any, "no annotation"]
"""The type of an option that its factory does not annotate: any value, but a list has one value per member."""


OUT_OF_RANGE = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"})
"""Errors of pydantic about a number of the right type."""


class ConfigSection(BaseModel):
    """A section of a recipe: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PluginSection(BaseModel):
    """A section of a recipe that names a plugin. Other keys are options of the plugin."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ConfigKeyError(RecipeError):
    """A key or value of a section is invalid. Stores section and key, so that the line in the file can be found."""

    def __init__(self, section: str, name: str, message: str, *, nth: int = 0) -> None:
        super().__init__(message)
        self.section, self.name = section, name
        self.nth = nth  # index among several sections of that name


def check(
    section: str, factory: Callable[..., Any], options: Mapping[str, Any], *, also: Iterable[str] = ()
) -> dict[str, Any]:
    """Validate options against the signature of a factory. `also` lists the other keys of the section."""
    known = fields(factory)
    for name in options:
        if name not in known:
            raise ConfigKeyError(section, name, f"[{section}] has no key {name!r}; {suggest(name, [*known, *also])}")
    try:
        return _build_schema(factory, _is_dataset(factory))(**options).model_dump(include=set(options))
    except ValidationError as problem:
        first = problem.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        raise ConfigKeyError(section, name, f"[{section}] {name} = {options.get(name)!r}: {first['msg']}") from None


def member_value(name: str, value: Any, number: int, members: int) -> Any:
    """Return the value of member `number`: an element of a list with one value per member, or the common value."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) != members:
        raise RecipeError(
            f"{name} lists {len(value)} values, but the ensemble has {members} members: give one value, or one for each"
        )
    return value[number]


def member_options(
    factory: Callable[..., Any], options: Mapping[str, Any], number: int, members: int
) -> dict[str, Any]:
    """Return the options of one member. A list has one value per member, unless the option itself accepts it."""
    known = fields(factory)
    return {
        name: _own_value(name, value, number, members, *known[name]) if name in known else value
        for name, value in options.items()
    }


def _own_value(name: str, value: Any, number: int, members: int, annotation: Any, default: Any) -> Any:
    if not _is_per_member(value, annotation, default):
        return value
    try:
        return member_value(name, value, number, members)
    except RecipeError as error:
        if annotation != UNANNOTATED:
            raise
        raise RecipeError(
            f"{error}. If {name} itself is a list, annotate it in the signature, such as {name}: list[int]"
        ) from None


def _is_per_member(value: Any, annotation: Any, default: Any) -> bool:
    """Return whether a value is a list with one value per member: a list that the option itself does not accept.

    An option without an annotation accepts a list only if its default is one.
    """
    if not isinstance(value, list | tuple):
        return False
    if annotation == UNANNOTATED:
        return not isinstance(default, list | tuple)
    try:
        TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as problem:
        return not all(error["type"] in OUT_OF_RANGE for error in problem.errors())
    return False


def accepts(factory: Callable[..., Any], name: str) -> bool:
    """Return whether the factory has an argument of that name."""
    return name in _parameters(factory)


def fields(factory: Callable[..., Any]) -> Mapping[str, tuple[Any, Any]]:
    """Return the options of a factory with their types and defaults, in the form that pydantic expects."""
    return _read_fields(factory, _is_dataset(factory))


def _unwrap(factory: Callable[..., Any]) -> Callable[..., Any]:
    return factory.func if isinstance(factory, partial) else factory


def _is_dataset(factory: Callable[..., Any]) -> bool:
    return registry.dataset.is_registered(_unwrap(factory))


# These are cached, because every member asks for them, and building a schema takes a millisecond.
@lru_cache(maxsize=256)
def _parameters(factory: Callable[..., Any]) -> Mapping[str, Parameter]:
    return signature(factory).parameters


@lru_cache(maxsize=256)
def _build_schema(factory: Callable[..., Any], is_dataset: bool) -> type[BaseModel]:
    strict = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    return create_model("Options", __config__=strict, **_read_fields(factory, is_dataset))  # type: ignore[call-overload, no-any-return]


@lru_cache(maxsize=256)
def _read_fields(factory: Callable[..., Any], is_dataset: bool) -> Mapping[str, tuple[Any, Any]]:
    bare = _unwrap(factory)
    hints = get_type_hints(bare.__init__ if isinstance(bare, type) else bare, include_extras=True)  # type: ignore[misc]
    # A data set defines the number of classes. All other plugins receive it.
    hidden = frozenset({"hub_access"}) if is_dataset else PROVIDED
    options: dict[str, tuple[Any, Any]] = {}
    for name, parameter in _parameters(factory).items():
        if name in hidden or parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        default = ... if parameter.default is Parameter.empty else parameter.default
        options[name] = (hints.get(name, UNANNOTATED), default)
    return options
