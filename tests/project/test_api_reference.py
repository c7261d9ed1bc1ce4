"""The API reference: examples of docstrings are code, and every parameter of a public name has a description."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import plateaux

griffe = pytest.importorskip("griffe")
ROOT = Path(__file__).resolve().parents[2]


def extension(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLES, PARAMETERS = extension("griffe_examples"), extension("griffe_parameters")


@pytest.fixture(scope="module")
def package() -> Any:
    extensions = griffe.load_extensions(EXAMPLES.Examples(), PARAMETERS.ParameterTables())
    return griffe.load(
        "plateaux",
        search_paths=[str(ROOT / "src")],
        extensions=extensions,
        docstring_parser="google",
        resolve_aliases=True,
    )


def functions_and_classes(owner: Any) -> list[Any]:
    """Return everything in a package that has a table of parameters, but no imported names."""
    found = []
    for member in owner.members.values():
        if not member.is_alias and not member.name.startswith("_"):
            found += [member] if member.is_function or member.is_class else []
            found += functions_and_classes(member)
    return found


def tables(member: Any) -> list[Any]:
    """Return the rows of the table of parameters."""
    if member.docstring is None:
        return []
    kind = griffe.DocstringSectionKind.parameters
    return [row for section in member.docstring.parsed if section.kind is kind for row in section.value]


def test_the_examples_of_a_docstring_are_code() -> None:
    text = "One line.\n\n>>> sum([1, 2])\n3\n>>> 2 * 2\n4\n\nMore text."
    expected = "One line.\n\n\n```pycon\n>>> sum([1, 2])\n3\n>>> 2 * 2\n4\n```\n\nMore text."
    assert EXAMPLES.fence_examples(text) == expected
    assert EXAMPLES.fence_examples("No example.") == "No example."


def test_no_example_of_the_package_is_left_as_text(package: Any) -> None:
    texts = [each.docstring.value for each in functions_and_classes(package) if each.docstring is not None]
    assert sum(">>> " in text for text in texts) > 20
    assert all(text.count("\n```pycon\n>>> ") >= (">>> " in text) for text in texts)


def test_every_parameter_of_a_public_name_has_a_description(package: Any) -> None:
    missing = []
    for name in plateaux.__all__:
        member = package[name].final_target if package[name].is_alias else package[name]
        shown = [member] if member.is_function or member.is_class else []  # and no constants
        for each in [*shown, *(functions_and_classes(member) if member.is_class else [])]:
            described = {row.name for row in tables(each) if row.description}
            parameters = PARAMETERS.parameters_of(each) if each.docstring is not None else []
            missing += [f"{each.path}: {one.name}" for one in parameters if one.name not in described]
    assert missing == []


def test_every_description_belongs_to_a_parameter(package: Any) -> None:
    used = set()
    for each in functions_and_classes(package):
        owner = f"{each.parent.name}.{each.name}" if each.is_function and each.parent.is_class else each.name
        used |= {name for row in tables(each) for name in (f"{owner}.{row.name}", row.name)}
    assert [name for name in PARAMETERS.MEANINGS if name not in used] == []
