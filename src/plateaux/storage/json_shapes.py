"""Shapes of stored JSON: files of a damaged or untrusted run are validated before their values are used.

The shape of a file is a dataclass or another type that pydantic validates. All errors name the file and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from plateaux.core.errors import StorageError

MAX_DEPTH = 64  # of nested lists and objects; deeper values would exhaust the stack of recursive code
ADVICE = "restore it or start a new run"

Shape = TypeVar("Shape")


def parse_json(content: bytes | str, file: object, advice: str = ADVICE) -> Any:
    """Return the value of JSON text."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise _too_deep(file, advice) from None
    except ValueError as problem:  # also text that is not UTF-8, and numbers of more than 4,300 digits
        raise StorageError(f"{file} is not valid JSON ({problem}); {advice}") from None
    if _is_deeper_than(value, MAX_DEPTH):
        raise _too_deep(file, advice)
    return value


def read_shape(
    shape: type[Shape], tree: Any, file: object, advice: str = ADVICE, *, required: Sequence[str] = ()
) -> Shape:
    """Return a JSON value as an instance of a shape. `required` are fields that must be stored despite a default."""
    for name in required:
        if isinstance(tree, dict) and name not in tree:
            raise StorageError(f"{file} lacks the field {name!r}; {advice}")
    try:
        return _adapter(shape).validate_python(tree)  # type: ignore[arg-type,no-any-return]
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        raise StorageError(f"{file} lacks the field {name!r}; {advice}")
    if first["type"] in ("dataclass_type", "dict_type", "model_type", "mapping_type"):
        raise StorageError(f"{file}: {name or 'the content'} is not a JSON object; {advice}")
    raise StorageError(f"{file}: {name or 'the content'} = {_abbreviated(first['input'])}: {first['msg']}; {advice}")


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def _is_deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [item for node in level if isinstance(node, dict | list) for item in _items(node)]
    return bool(level)


def _items(node: dict[str, Any] | list[Any]) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node


def _abbreviated(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _too_deep(file: object, advice: str) -> StorageError:
    return StorageError(f"{file} is nested more than {MAX_DEPTH} levels deep; {advice}")
