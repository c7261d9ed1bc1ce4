"""The formats of a report, and how many runs it shows individually; without torch, for the command line."""

from __future__ import annotations

from typing import Literal

Format = Literal["html", "md", "json", "csv"]
FORMATS: tuple[Format, ...] = ("html", "md", "json", "csv")
MAX_RUNS = 3  # runs with a section of details
