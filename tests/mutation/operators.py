"""Operators that put plausible bugs into a module: each mutant changes one place of its syntax tree.

Left out are places that cannot change a result: docstrings, messages of errors, texts, type hints, and log lines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

COMPARED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
COMPUTED = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"),
}  # fmt: skip
LOGGED = ("logger", "logging", "warnings", "progress", "typer")  # calls that only tell something
TEXTS = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)  # nothing in them is mutated


class Mutant(NamedTuple):
    """One bug: the bytes from `start` to `end` of a file become `new`."""

    file: str
    operator: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.operator}: {' '.join(self.old.split())}  ->  {self.new or '(deleted)'}"


def sample(file: str, source: bytes, count: int) -> list[Mutant]:
    """Return at most `count` mutants of a file, in its order; the choice depends only on its name and content."""
    found = sorted(set(_Module(file, source).mutants()), key=lambda mutant: (mutant.start, mutant.end, mutant.new))
    return sorted(Random(f"{file} {len(source)}").sample(found, min(count, len(found))), key=lambda each: each.start)


class _Module:
    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def mutants(self) -> Iterator[Mutant]:
        for node in _executed(ast.parse(self.source)):
            for operator, start, end, new in self._changes(node):
                old = self.source[start:end].decode()
                if old != new:
                    line = self.source[:start].count(b"\n") + 1
                    yield Mutant(self.file, operator, line, start, end, old, new)

    def _changes(self, node: ast.AST) -> Iterator[tuple[str, int, int, str]]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield from self._between("comparison", left, right, *COMPARED[type(op)])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED and not _is_text(left, right):
                yield from self._between("arithmetic", left, right, *COMPUTED[type(op)])
            case ast.BoolOp(op=op, values=[left, right, *_]):
                words = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                yield from self._between("boolean", left, right, *words)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "boolean", self._start(node), self._start(operand), ""
            case ast.Constant(value=bool(value)):
                yield "constant", self._start(node), self._end(node), str(not value)
            case ast.Constant(value=int() | float() as value):
                yield "constant", self._start(node), self._end(node), repr(value + 1 if value in (0, 1) else value * 2)
            case ast.Slice(lower=lower, upper=upper):
                for bound in (lower, upper):
                    if bound is not None:
                        yield "slice", self._start(bound), self._end(bound), ""
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield "removed statement", self._start(node), self._end(node), "pass"
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield "returned value", self._start(value), self._end(value), "None"

    def _between(
        self, operator: str, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> Iterator[tuple[str, int, int, str]]:
        start = self.source.find(old.encode(), self._end(left), self._start(right))
        if start >= 0:
            yield operator, start, start + len(old.encode()), new

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree whose change could change a result."""
    if isinstance(node, TEXTS) or _is_log_line(node) or _is_for_types(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_params"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _executed(child)


def _is_log_line(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return False
    names = [each.id for each in ast.walk(call.func) if isinstance(each, ast.Name)]
    return bool(names) and names[0] in LOGGED


def _is_for_types(node: ast.AST) -> bool:
    """Return whether a statement is only read by a type checker."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_text(*operands: ast.expr) -> bool:
    return any(isinstance(each, ast.JoinedStr) or _is_string(each) for each in operands)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
