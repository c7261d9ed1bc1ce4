"""Measured numbers as tables: for people, for Markdown, for programs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from plateaux.evaluate import Measurement
from plateaux.types import Value

PERCENT = ("accuracy", "ece")
CAPTION = "± one standard error: over samples, and over members for their mean"


def heading(measurements: Sequence[Measurement]) -> str:
    """Return one line that says what was measured on what."""
    first = measurements[0]
    return f"{first.data['name']}, {first.on} samples ({first.data['samples']:,})"


def grid(measurements: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows: one row a member and ensemble, one column a measure."""
    header = ["", *(f"{m.measure}{' %' if m.measure in PERCENT else ''}" for m in measurements)]
    names = list(dict.fromkeys(name for m in measurements for name in m.rows))

    def cell(m: Measurement, name: str) -> str:
        return show(m.measure, m.rows[name]) if name in m.rows else ""

    return header, [[name, *(cell(m, name) for m in measurements)] for name in names]


def show(measure: str, value: Value) -> str:
    """Return a number with its standard error."""
    times, digits = (100.0, 2) if measure in PERCENT else (1.0, 4)
    text = f"{value.number * times:.{digits}f}"
    return text if value.error is None else f"{text} ± {value.error * times:.{digits}f}"


def to_rich(measurements: Sequence[Measurement]) -> Table:
    """Return the table a terminal shows."""
    header, rows = grid(measurements)
    table = Table(
        title=heading(measurements), title_justify="left", caption=CAPTION, caption_justify="left", pad_edge=False
    )
    for position, name in enumerate(header):
        table.add_column(name, justify="right" if position else "left", no_wrap=position > 0)
    for row in rows:
        table.add_row(*row, style="bold" if row[0].startswith("ensemble") else None)
    return table


def to_markdown(measurements: Sequence[Measurement]) -> str:
    """Return the table as Markdown."""
    header, rows = grid(measurements)
    lines = [
        f"**{heading(measurements)}**",
        "",
        "| " + " | ".join(header) + " |",
        "|---" + "|---:" * (len(header) - 1) + "|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def size(count: float) -> str:
    """Return bytes in a unit a person reads."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
