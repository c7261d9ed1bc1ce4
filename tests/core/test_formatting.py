"""Numbers as text, and values as strict JSON."""

from __future__ import annotations

import json
import math

import pytest

from plateaux.core.formatting import format_duration, format_number, format_range, format_significant, json_safe


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "-inf"), (0.0, "0"), (1234.5, "1,234")]
)
def test_numbers_that_are_not_finite_are_named(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0.0, 3, "0"), (12.345, 3, "12.3"), (99999.0, 2, "99999"), (1e5, 2, "1.0e+05"), (9e-5, 2, "9.0e-05")],
)
def test_very_small_and_very_large_numbers_have_an_exponent(value: float, digits: int, text: str) -> None:
    assert format_significant(value, digits) == text


def test_a_range_ignores_nan() -> None:
    assert format_range([math.nan, 1.0, 2.0], digits=2) == "1.0 to 2.0"
    assert format_range([math.nan]) == "NaN"


def test_json_has_null_instead_of_nan_and_infinity() -> None:
    tree = {"a": [math.nan, (1.0, -math.inf)], "b": {"c": "text", "d": None, "e": True}}
    assert json.loads(json.dumps(json_safe(tree), allow_nan=False)) == {
        "a": [None, [1.0, None]], "b": {"c": "text", "d": None, "e": True},
    }  # fmt: skip


def test_durations_use_two_units() -> None:
    assert [format_duration(seconds) for seconds in (59.6, 61, 3600)] == ["1 min 00 s", "1 min 01 s", "1 h 00 min"]
