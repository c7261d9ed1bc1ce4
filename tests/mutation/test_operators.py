"""Mutants are plausible, compile, and depend only on the source; every named module and test exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.modules import TESTS
from tests.mutation.operators import sample

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""Ä docstring with 1 < 2."""
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from a import b

logger = logging.getLogger("x")


def scale(values: "list[0 + 1]", limit: int = 3) -> None:
    """Not 1 < 2."""
    logger.info("%d", 1 + 1)
    if not (values) < limit and limit:
        raise ValueError(f"{1 + 2} is " + "too small")
    values.sort()
    return values[1:] + ["ü" + "b", f"{2 * 3}"]
'''


def test_each_operator_changes_what_may_change_a_result_and_nothing_else() -> None:
    changes = {(each.operator, each.line, each.old, each.new) for each in sample("x.py", SOURCE.encode(), 99)}
    assert changes == {
        ("constant", 11, "3", "6"),
        ("boolean", 14, "not ", ""),
        ("boolean", 14, "and", "or"),
        ("comparison", 14, "<", "<="),
        ("removed statement", 16, "values.sort()", "pass"),
        ("returned value", 17, 'values[1:] + ["ü" + "b", f"{2 * 3}"]', "None"),
        ("arithmetic", 17, "+", "-"),
        ("slice", 17, "1", ""),
        ("constant", 17, "1", "2"),
    }


def test_equal_sources_have_equal_samples() -> None:
    first, second = (sample("x.py", SOURCE.encode(), 4) for _ in range(2))
    assert first == second
    assert len(first) == 4
    assert first != sample("y.py", SOURCE.encode(), 4)


@pytest.mark.parametrize("module", TESTS)
def test_the_mutants_of_a_module_compile_and_its_tests_exist(module: str) -> None:
    source = (ROOT / "src" / "plateaux" / module).read_bytes()
    mutants = sample(module, source, 6)
    assert mutants
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    for test in TESTS[module]:
        file, _, name = test.partition("::")
        assert name in (ROOT / "tests" / file).read_text(encoding="utf-8")
