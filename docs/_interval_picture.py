"""A picture of means with their intervals, one row per method, as SVG for the pages of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from _svg import BLUE, FONT, INK, LINE, PALE, PAPER, dark_style

from plateaux.core.stats.intervals import Interval

LABELS, RIGHT, TOP, ROW, WIDTH = 300, 740, 58, 26, 860  # the axis lies between LABELS and RIGHT


@dataclass(frozen=True, slots=True)
class Row:
    """One method: its number with an interval, and a note at the right end."""

    label: str
    found: Interval
    note: str = ""


def interval_picture(rows: Sequence[Row], *, axis: str, note: str = "", description: str = "") -> str:
    """Return the rows as a picture, from the largest value down."""
    ordered = sorted(rows, key=lambda row: -row.found.value)
    low = math.floor(min(_low(row.found) for row in ordered))
    high = math.ceil(max(_high(row.found) for row in ordered))
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if (high - low) / step <= 8)
    low, high = step * math.floor(low / step), step * math.ceil(high / step)
    height = TOP + ROW * len(ordered) + 46

    def x(value: float) -> float:
        return LABELS + (RIGHT - LABELS) * (value - low) / (high - low)

    parts = [*_ticks(range(low, high + 1, step), x, height), *_heads(axis, note, height)]
    for number, row in enumerate(ordered):
        parts += _row(row, TOP + ROW * number + ROW / 2, x(_low(row.found)), x(row.found.value), x(_high(row.found)))
    head = (
        f'<svg viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{description}" font-family="{FONT}" font-size="13">'
    )
    paper = f'<rect x="0" y="0" width="{WIDTH}" height="{height}" rx="10" fill="{PAPER}"/>'
    return "\n".join([head, dark_style(), paper, *parts, "</svg>", ""])


def _low(found: Interval) -> float:
    return found.value if math.isnan(found.low) else found.low


def _high(found: Interval) -> float:
    return found.value if math.isnan(found.high) else found.high


def _heads(axis: str, note: str, height: float) -> Iterator[str]:
    yield f'<text x="{(LABELS + RIGHT) / 2}" y="{height - 10}" text-anchor="middle" fill="{PALE}">{axis}</text>'
    yield f'<text x="{WIDTH - 16}" y="30" text-anchor="end" fill="{PALE}">{note}</text>'


def _ticks(values: Sequence[int], x: Callable[[float], float], height: float) -> Iterator[str]:
    for value in values:
        at = f"{x(value):.1f}"
        yield f'<line x1="{at}" y1="{TOP - 10}" x2="{at}" y2="{height - 46}" stroke="{LINE}"/>'
        yield f'<text x="{at}" y="{height - 30}" text-anchor="middle" fill="{PALE}" font-size="12">{value}</text>'


def _row(row: Row, y: float, low: float, middle: float, high: float) -> Iterator[str]:
    yield f'<text x="{LABELS - 18}" y="{y + 4:.1f}" text-anchor="end" fill="{INK}">{row.label}</text>'
    yield f'<line x1="{low:.1f}" y1="{y:.1f}" x2="{high:.1f}" y2="{y:.1f}" stroke="{BLUE}" stroke-width="3"/>'
    yield f'<circle cx="{middle:.1f}" cy="{y:.1f}" r="5" fill="{BLUE}"/>'
    yield f'<text x="{WIDTH - 16}" y="{y + 4:.1f}" text-anchor="end" fill="{PALE}">{row.note}</text>'
