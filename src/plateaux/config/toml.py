"""TOML text as plain values, in time proportional to its length."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from plateaux.core.errors import RecipeError

MAX_KEY_PARTS = 100
# `tomllib` takes quadratic time for a key of many parts.
_LONG_KEY = re.compile(
    rf"""^[ \t\[]*(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MAX_KEY_PARTS}}}""", re.MULTILINE | re.ASCII
)


def read_text(path: str | Path, kind: str) -> str:
    """Return the text of a file. `kind` is what the file should be, such as "recipe"."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise RecipeError(
            f"The {kind} {str(path)!r} is not UTF-8 text (byte 0x{problem.object[problem.start]:02x} at offset "
            f"{problem.start}); save it as UTF-8"
        ) from None
    except OSError as problem:
        raise RecipeError(f"Cannot read the {kind} {str(path)!r}: {problem.strerror}") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the content of a TOML file; `where` names it in errors.

    >>> parse_toml("[optimizer]\\nlr = 0.1", "recipe.toml")
    {'optimizer': {'lr': 0.1}}
    """
    if match := _LONG_KEY.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise RecipeError(f"{where}, line {line}: a key has more than {MAX_KEY_PARTS} parts; write section.key = value")
    try:
        return tomllib.loads(text)
    except ValueError as problem:  # not TOML, or an integer of thousands of digits
        raise RecipeError(f"{where} is not valid TOML: {problem}") from None
    except RecursionError:
        raise RecipeError(f"{where} is nested too deeply; a recipe has sections, keys, and lists") from None
