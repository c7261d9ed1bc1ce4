"""Numbers as a person writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plateaux.core.types import Estimate


def format_number(value: float, percent: bool = False) -> str:
    """Return a number in about three digits, shares in percent.

    >>> format_number(0.01234), format_number(12345.6), format_number(0.9633, percent=True), format_number(float("nan"))
    ('0.0123', '12,346', '96.3 %', 'no number')
    """
    if not math.isfinite(value):
        return "no number"
    if percent:
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_with_stderr(value: Estimate, percent: bool = False) -> str:
    """Return a number with its standard error, to as many places as the error is worth.

    >>> format_with_stderr(Estimate(0.96333, 0.00771), percent=True), format_with_stderr(Estimate(12.5))
    ('96.33 ± 0.77', '12.5')
    >>> format_with_stderr(Estimate(0.2, 0.0123))
    '0.200 ± 0.012'
    >>> format_with_stderr(Estimate(-0.0004, 0.12))
    '0.00 ± 0.12'
    """
    if not math.isfinite(value.value):
        return "no number"
    times = 100.0 if percent else 1.0
    middle, error = times * value.value, times * (value.stderr or 0.0)
    if not error or not math.isfinite(error):
        return f"{middle:.2f}" if percent else format_number(middle)
    if abs(middle) >= 1e6 or max(abs(middle), error) < 1e-4:
        return f"{middle:.3g} ± {error:.2g}"
    places = min(max(0, 1 - math.floor(math.log10(error))), 6)
    return f"{round(middle, places) + 0.0:,.{places}f} ± {error:,.{places}f}"  # and no zero below zero


def format_range(values: Sequence[float], percent: bool = False) -> str:
    """Return from where to where numbers go.

    >>> format_range([0.1, 0.25, float("nan")]), format_range([0.5, 0.5], percent=True)
    ('0.1 to 0.25', '50.0 %')
    """
    fine = [value for value in values if math.isfinite(value)]
    if not fine:
        return "no number"
    low, high = format_number(min(fine), percent), format_number(max(fine), percent)
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def format_percentage_points(difference: float) -> str:
    """Return a difference of shares in points of percent, with its sign.

    >>> format_percentage_points(0.0123), format_percentage_points(-0.005)
    ('+1.2 points', '-0.5 points')
    """
    return f"{100 * difference:+.1f} points"


def pluralize(count: int, one: str) -> str:
    """Return a number of things.

    >>> pluralize(1, "member"), pluralize(3, "member")
    ('1 member', '3 members')
    """
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Return a time span in the units a person uses."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _digits(number: float, count: int) -> str:
    """Return a number by so many digits, without an exponent where a person would write none."""
    if number and not 1e-4 <= abs(number) < 1e5:  # what is no number too
        return f"{number:.{count - 1}e}"
    places = count - 1 - math.floor(math.log10(abs(number))) if number else 0
    return f"{number:.{max(places, 0)}f}"


def format_size(count: float) -> str:
    """Return bytes in a unit a person reads."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
