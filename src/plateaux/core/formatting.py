"""Numbers, durations, and sizes as readable text, values as strict JSON, lists of names, and escaped Markdown."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def format_number(value: float, percent: bool = False) -> str:
    """Return a number in about three digits, or a fraction in percent.

    >>> format_number(0.01234), format_number(12345.6), format_number(0.9633, percent=True), format_number(float("nan"))
    ('0.0123', '12,346', '96.3 %', 'NaN')
    """
    if not math.isfinite(value):
        return _format_nonfinite(value)
    if percent:
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_significant(value: float, digits: int = 3) -> str:
    """Return a number with a given number of significant digits; very small and very large numbers get an exponent.

    >>> format_significant(0.0123456, 3), format_significant(1234.5, 2), format_significant(1.5e-7, 2)
    ('0.0123', '1234', '1.5e-07')
    """
    if not math.isfinite(value):
        return _format_nonfinite(value)
    if value and not 1e-4 <= abs(value) < 1e5:
        return f"{value:.{digits - 1}e}"
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(places, 0)}f}"


def format_with_error(value: float, error: float | None = None, percent: bool = False) -> str:
    """Return a number with its error, to two significant digits of the error.

    >>> format_with_error(0.96333, 0.00771, percent=True), format_with_error(12.5)
    ('96.33 ± 0.77', '12.5')
    >>> format_with_error(0.2, 0.0123), format_with_error(-0.0004, 0.12)
    ('0.200 ± 0.012', '0.00 ± 0.12')
    """
    if not math.isfinite(value):
        return _format_nonfinite(value)
    scale = 100.0 if percent else 1.0
    mean, error = scale * value, scale * (error or 0.0)
    if not error or not math.isfinite(error):
        return f"{mean:.2f}" if percent else format_number(mean)
    if abs(mean) >= 1e6 or max(abs(mean), error) < 1e-4:
        return f"{mean:.3g} ± {error:.2g}"
    places = min(max(0, 1 - math.floor(math.log10(error))), 6)
    return f"{round(mean, places) + 0.0:,.{places}f} ± {error:,.{places}f}"  # + 0.0 turns -0.0 into 0.0


def format_range(values: Sequence[float], percent: bool = False, digits: int | None = None) -> str:
    """Return the smallest and the largest of the finite values, with a given number of significant digits or about 3.

    >>> format_range([0.1, 0.25, float("nan")]), format_range([0.5, 0.5], percent=True), format_range([2.0], digits=3)
    ('0.1 to 0.25', '50.0 %', '2.00')
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return _format_nonfinite(math.nan)
    low, high = (
        format_number(value, percent) if digits is None else format_significant(value, digits)
        for value in (min(finite), max(finite))
    )
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def format_percentage_points(difference: float) -> str:
    """Return a difference of two fractions in percentage points, with its sign.

    >>> format_percentage_points(0.0123), format_percentage_points(-0.005)
    ('+1.2 points', '-0.5 points')
    """
    return f"{100 * difference:+.1f} points"


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> pluralize(1, "member"), pluralize(3, "member")
    ('1 member', '3 members')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Return a duration in hours, minutes, and seconds.

    >>> format_duration(7.4), format_duration(75), format_duration(4000)
    ('7 s', '1 min 15 s', '1 h 06 min')
    """
    if not math.isfinite(seconds):
        return _format_nonfinite(seconds) + " s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def format_size(count: float) -> str:
    """Return a number of bytes in kB, MB, GB, or TB.

    >>> format_size(512), format_size(1.5e6)
    ('512 B', '1.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def json_safe(value: Any) -> Any:
    """Return nested values with NaN and infinity as None, since strict JSON has neither.

    >>> json_safe({"loss": [0.5, float("nan")], "epoch": 3})
    {'loss': [0.5, None], 'epoch': 3}
    """
    if isinstance(value, Mapping):
        return {name: json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def split_names(text: str) -> list[str]:
    """Return the names in a comma-separated text.

    >>> split_names("accuracy, nll,")
    ['accuracy', 'nll']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def printable(text: str) -> str:
    """Return text in which characters that control a terminal, or reverse the direction of text, are visible.

    Line breaks and tabs are kept.

    >>> printable("loss\\x1b[2J"), printable("a\\u202eb")
    ('loss␛[2J', 'a�b')
    """
    return text if text.isprintable() else text.translate(_VISIBLE)


def hide_folders(text: str, *folders: str | Path) -> str:
    """Return a text without the folders of this machine: a path below a known folder becomes relative to it.

    Known are these folders, the current folder, the home folder, the Python path, and the folder of Python itself.
    """
    places = {*map(str, folders), os.getcwd(), os.path.expanduser("~")}
    known = {os.path.abspath(folder).rstrip("/") for folder in (*places, *sys.path, sys.prefix, sys.base_prefix)} - {""}
    for folder in sorted(known, key=len, reverse=True):  # the longest first, which may be inside others
        text = text.replace(f"{folder}/", "")
    for folder in sorted(places, key=len, reverse=True):
        text = text.replace(folder, os.path.basename(folder)) if os.path.isabs(folder) else text
    return text


def escape_markdown(text: str) -> str:
    """Return text on one line in which Markdown finds no cells, tags, links, or code.

    >>> escape_markdown("a|b <i>")
    'a\\\\|b &lt;i>'
    """
    return printable(" ".join(text.split())).translate(_MARKDOWN)


def escape_latex(text: str) -> str:
    r"""Return text on one line in which LaTeX finds no commands; the signs of tables become commands.

    >>> print(escape_latex("acc_1, % ± \\x"))
    acc\_1, \% $\pm$ \textbackslash{}x
    """
    return printable(" ".join(text.split())).translate(_LATEX)


def escape_csv(value: Any) -> Any:
    """Return a cell of a CSV file; text that a spreadsheet would execute as a formula gets a leading apostrophe.

    >>> escape_csv("=1+1"), escape_csv("-0.5"), escape_csv(-0.5), escape_csv("cat")
    ("'=1+1", '-0.5', -0.5, 'cat')
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_REPLACED = (*range(0x80, 0xA0), 0x2028, 0x2029, *_BIDI, *range(0xD800, 0xE000))
_VISIBLE = {
    **dict.fromkeys(_REPLACED, "\ufffd"),
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
}
_MARKDOWN = str.maketrans({"&": "&amp;", "<": "&lt;", **{mark: f"\\{mark}" for mark in "\\|[]`"}})
_LATEX = str.maketrans({
    **{mark: f"\\{mark}" for mark in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$",
    "·": r"$\cdot$", "β": r"$\beta$", "[": "{[}", "]": "{]}",  # [ would be the option of a line break
})  # fmt: skip
_FORMULA = ("=", "+", "-", "@")


def _format_nonfinite(value: float) -> str:
    return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
