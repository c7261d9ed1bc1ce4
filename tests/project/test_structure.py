"""Package structure: only packages at the root, and one meaning per name."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import plateaux

ROOT = Path(plateaux.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
PACKAGES = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports() -> Mapping[str, set[str]]:
    """Return the modules that each module imports anywhere: at the top, in functions, and under TYPE_CHECKING."""
    files = {".".join(("plateaux", *path.relative_to(ROOT).with_suffix("").parts)): path for path in SOURCES}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(parse(path)):
            names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} has a relative import"
                full = [f"{node.module}.{each}" for each in names]
                names = [each if each in files else str(node.module) for each in full]
            found[name] |= files.keys() & set(names) - {name}
    return found


def definitions(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(parse(path)):
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


def test_no_modules_import_each_other_in_a_circle_not_even_for_types() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as circle:
        raise AssertionError(" imports ".join(reversed(circle.args[1]))) from None


def test_no_folder_has_more_than_20_modules() -> None:
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in SOURCES)
    assert {folder: count for folder, count in counts.items() if count > 20} == {}


def test_no_package_has_more_than_5000_lines_without_its_sub_packages() -> None:
    lines: Counter[str] = Counter()
    for path in SOURCES:
        lines[str(path.parent.relative_to(ROOT))] += len(path.read_text(encoding="utf-8").splitlines())
    assert {folder: count for folder, count in lines.items() if count > 5000} == {}


def test_no_file_has_more_than_400_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > 400} == {}
