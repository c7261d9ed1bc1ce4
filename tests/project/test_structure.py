"""Package structure: only packages at the root, and one meaning per name."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import plateaux

ROOT = Path(plateaux.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
PACKAGES = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()}


def definitions(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield str(path.relative_to(ROOT)), node


def test_the_root_of_the_package_contains_packages_and_public_modules() -> None:
    files = {path.name for path in ROOT.iterdir() if path.is_file()}
    assert files == {
        "__init__.py",
        "__init__.pyi",
        "__main__.py",
        "py.typed",
        "commands.py",
        "errors.py",
        "stats.py",
        "testing.py",
    }


def test_no_package_has_the_name_of_a_public_function() -> None:
    functions = {name for name in plateaux.__all__ if inspect.isfunction(getattr(plateaux, name))}
    assert functions & PACKAGES == set()


def test_no_class_name_occurs_twice() -> None:
    names = Counter(node.name for _, node in definitions(ast.ClassDef))  # type: ignore[attr-defined]
    assert [name for name, times in names.items() if times > 1] == []


def test_function_names_do_not_end_in_of_or_named() -> None:
    names = [(path, node.name) for path, node in definitions(ast.FunctionDef)]  # type: ignore[attr-defined]
    assert [each for each in names if each[1].endswith(("_of", "_named"))] == []


def test_no_class_is_longer_than_250_lines() -> None:
    lengths = {
        node.name: node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]
        for _, node in definitions(ast.ClassDef)
    }
    assert {name: length for name, length in lengths.items() if length > 250} == {}


def test_no_function_has_more_than_12_parameters() -> None:
    """The commands of the command line are exempt: each parameter is an option."""
    counts = {}
    for path, node in definitions(ast.FunctionDef):
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]  # type: ignore[attr-defined]
        counts[str(path), node.name] = len([name for name in names if name not in ("self", "cls")])  # type: ignore[attr-defined]
    assert {name: count for name, count in counts.items() if count > 12 and "cli/" not in name[0]} == {}
