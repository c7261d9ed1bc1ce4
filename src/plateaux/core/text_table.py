"""Tables for the terminal and for Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of words."""

    title: str
    header: list[str]
    rows: list[list[str]]
    caption: str = ""


def _split_columns(grid: Grid, width: int) -> list[Grid]:
    """Return the table in parts that are no wider than a terminal; each has the first column."""
    wide = [max(len(row[i]) for row in [grid.header, *grid.rows]) + 3 for i in range(len(grid.header))]
    parts: list[list[int]] = [[]]
    for i in range(1, len(wide)):
        if parts[-1] and wide[0] + sum(wide[j] for j in parts[-1]) + wide[i] > width:
            parts.append([])
        parts[-1].append(i)
    found = []
    for number, columns in enumerate(parts, start=1):
        rows = [[row[0], *(row[i] for i in columns)] for row in grid.rows if any(row[i] for i in columns)]
        header = ["", *(grid.header[i] for i in columns)]
        found.append(Grid(grid.title, header, rows, grid.caption if number == len(parts) else ""))
    return found


def to_rich(grid: Grid) -> Table:
    """Return the table a terminal shows."""
    table = Table(title=grid.title, title_justify="left", caption=grid.caption, caption_justify="left", pad_edge=False)
    for position, name in enumerate(grid.header):
        table.add_column(name, justify="right" if position else "left", no_wrap=True)
    for row in grid.rows:
        table.add_row(*row, style="bold" if row[0].startswith("ensemble") else None)
    return table


def _markdown(grid: Grid) -> str:
    lines = [
        f"**{grid.title}**",
        "",
        "| " + " | ".join(grid.header) + " |",
        "|---" + "|---:" * (len(grid.header) - 1) + "|",
    ]
    rows = ["| " + " | ".join(row) + " |" for row in grid.rows]
    return "\n".join([*lines, *rows, *(["", grid.caption] if grid.caption else [])]) + "\n"
