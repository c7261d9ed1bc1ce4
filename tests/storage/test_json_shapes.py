"""Stored JSON is validated before use: errors name the file, the field, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from plateaux.core.errors import StorageError
from plateaux.core.ranges import Finite, StoredInt
from plateaux.storage.json_shapes import parse_json, read_shape


@dataclass(frozen=True)
class Part:
    value: Finite | None
    name: str = ""


@dataclass(frozen=True)
class Whole:
    samples: StoredInt
    parts: tuple[Part, ...] = ()
    by_id: dict[int, Part] = field(default_factory=dict)


@pytest.mark.parametrize("text", ['{"a":' * 100_000, "[" * 100 + "]" * 100, "9" * 5000, "\x00", '{"a": nope}'])
def test_json_that_cannot_be_parsed_is_reported_with_its_file(text: str) -> None:
    with pytest.raises(StorageError, match=r"folder/file\.json .*restore it"):
        parse_json(text, "folder/file.json")


def test_a_shape_is_built_from_plain_values() -> None:
    tree = {"samples": 3, "parts": [{"value": 1, "extra": 0}], "by_id": {"7": {"value": None, "name": "a"}}}
    assert read_shape(Whole, tree, "f") == Whole(3, (Part(1.0),), {7: Part(None, "a")})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "f lacks the field 'samples'; fix it"),
        ([], "f: the content is not a JSON object; fix it"),
        ({"samples": 1, "parts": [3]}, "f: parts.0 is not a JSON object; fix it"),
        ({"samples": 1, "parts": [{}]}, "f lacks the field 'parts.0.value'; fix it"),
        ({"samples": -1}, "f: samples = -1: Input should be greater than or equal to 0; fix it"),
        ({"samples": "3"}, "f: samples = '3': Input should be a valid integer; fix it"),
        ({"samples": True}, "f: samples = True: Input should be a valid integer; fix it"),
        ({"samples": 10**400}, "f: samples = 1000"),
        ({"samples": 1, "parts": [{"value": float("nan")}]}, "f: parts.0.value = nan: "),
        ({"samples": 1, "parts": [{"value": 0, "name": 0}]}, "f: parts.0.name = 0: Input should be a valid string"),
        ({"samples": 1, "by_id": {"x": {"value": 0}}}, "f: by_id.x"),
    ],
)
def test_values_of_another_shape_are_reported_with_file_and_field(tree: Any, message: str) -> None:
    with pytest.raises(StorageError) as problem:
        read_shape(Whole, tree, "f", "fix it")
    assert str(problem.value).startswith(message)


def test_a_required_field_must_be_stored_despite_its_default() -> None:
    with pytest.raises(StorageError, match="f lacks the field 'parts'"):
        read_shape(Whole, {"samples": 1}, "f", required=["parts"])
