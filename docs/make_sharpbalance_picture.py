"""Draw docs/images/sharpbalance.svg: SharpBalance with three members and twelve samples, from training to one step.

python docs/make_sharpbalance_picture.py            # write the picture
python docs/make_sharpbalance_picture.py --check    # exit code 1 if the picture is out of date

The scores are made up; the package's own rule assigns the samples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _generated import write_or_check
from _svg import BLUE, FONT, GREEN, INK, LINE, ORANGE, PALE, PANEL, PAPER, PURPLE, dark_style
from numpy.typing import NDArray

from plateaux.data.partition.rules import get_rule

PICTURE = Path(__file__).parent / "images" / "sharpbalance.svg"
TOP = 0.25
SCORES = np.array(
    [
        [0.2, 3.1, 0.1, 0.6, 2.4, 0.3, 0.9, 0.2, 1.2, 0.4, 2.8, 0.1],
        [0.3, 2.9, 0.2, 2.2, 0.8, 0.4, 0.1, 1.0, 0.3, 0.2, 3.0, 0.6],
        [0.9, 1.3, 0.2, 0.5, 0.4, 2.6, 0.3, 0.1, 0.2, 2.3, 2.7, 0.4],
    ],
    np.float32,
)
COLORS = (BLUE, GREEN, PURPLE)
CELL, FIRST, ROW = 23, 108, 58  # of the tables: side of a cell, top of the first row, distance between rows
MEMBERS, TABLE, SETS = 24, 258, 628  # left edges of the three columns
WIDTH, HEIGHT = 1000, 548


@dataclass(frozen=True)
class Shown:
    """The scores of the picture, in the form that a rule reads."""

    members: int = len(SCORES)
    samples: int = SCORES.shape[1]
    seed: int = 0

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        yield SCORES


def picture() -> str:
    """Return the picture as SVG."""
    sam_sets = np.concatenate(list(get_rule("paper", top_k=TOP)(Shown())), 1)
    sharp = SCORES.argsort(1).argsort(1) >= SCORES.shape[1] - int(TOP * SCORES.shape[1])
    parts = [*_members(), *_table(sharp), *_sam_sets(sam_sets), *_step(sam_sets[0])]
    head = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" font-family="{FONT}" font-size="13">'
    )
    ground = f'<rect x="0" y="0" width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{PAPER}"/>'
    return "\n".join([head, dark_style(), ground, *parts, "</svg>", ""])


def _members() -> Iterator[str]:
    yield _text(MEMBERS, 36, "1  train up to epoch T_d", bold=True)
    yield _text(MEMBERS, 56, "independently", PALE)
    for number, color in enumerate(COLORS):
        top = FIRST + number * ROW
        yield _box(MEMBERS, top - 9, 172, CELL + 18, color, PAPER, 6)
        yield _text(MEMBERS + 12, top + 8, f"member {number}", color, bold=True)
        yield _text(MEMBERS + 12, top + 25, "SAM on all samples", PALE, size=12)
        yield _arrow(MEMBERS + 180, top + CELL / 2, TABLE - 8)


def _table(sharp: NDArray[np.bool_]) -> Iterator[str]:
    yield _text(TABLE, 36, "2  score every sample", bold=True)
    yield _text(TABLE, 56, "members x samples, in the run folder", PALE)
    yield from _numbers(TABLE)
    for number, row in enumerate(SCORES):
        for sample, score in enumerate(row):
            x, y = TABLE + sample * CELL, FIRST + number * ROW
            yield _box(x + 1, y + 1, CELL - 2, CELL - 2, LINE, ORANGE, 2, opacity=float(score) / 3.2)
        for place in np.flatnonzero(sharp[number]).tolist():
            yield _box(TABLE + place * CELL + 1, FIRST + number * ROW + 1, CELL - 2, CELL - 2, INK, "none", 2, 3)
        yield _arrow(TABLE + 12 * CELL + 6, FIRST + number * ROW + CELL / 2, TABLE + 12 * CELL + 24)
        yield _arrow(SETS - 24, FIRST + number * ROW + CELL / 2, SETS - 6)
    middle = (TABLE + 12 * CELL + SETS) / 2
    yield _box(middle - 20, FIRST - 9, 40, 2 * ROW + CELL + 18, INK, PANEL, 6)
    yield _text(middle, FIRST + ROW + CELL / 2 + 5, "rule", bold=True, middle=True)
    y = FIRST + 3 * ROW + 2
    yield _box(TABLE + 1, y - 12, 14, 14, LINE, ORANGE, 2, opacity=0.05)
    yield _box(TABLE + 19, y - 12, 14, 14, LINE, ORANGE, 2, opacity=0.9)
    yield _text(TABLE + 42, y, "low and high score: squared gradient norm", PALE, size=12)
    yield _box(TABLE + 20, y + 9, 13, 13, INK, "none", 2, 3)
    yield _text(TABLE + 42, y + 20, "the member's highest quarter (top_k = 0.25)", PALE, size=12)


def _sam_sets(sam_sets: NDArray[np.bool_]) -> Iterator[str]:
    yield _text(SETS, 36, "3  SAM sets", bold=True)
    yield _text(SETS, 56, "one bit per sample, in the run folder", PALE)
    yield from _numbers(SETS)
    for number, row in enumerate(sam_sets):
        y = FIRST + number * ROW
        for sample, bit in enumerate(row):
            fill = COLORS[number] if bit else PAPER
            yield _box(SETS + sample * CELL + 1, y + 1, CELL - 2, CELL - 2, COLORS[number] if bit else LINE, fill, 2)
        yield _text(SETS + 12 * CELL + 10, y + 16, f"{row.sum()} of 12", COLORS[number], size=12)
    y = FIRST + 3 * ROW + 2
    yield _box(SETS + 1, y - 12, 14, 14, COLORS[0], COLORS[0], 2)
    yield _text(SETS + 24, y, "SAM: gradient at perturbed weights", PALE, size=12)
    yield _box(SETS + 1, y + 8, 14, 14, LINE, PAPER, 2)
    yield _text(SETS + 24, y + 20, "plain gradient", PALE, size=12)


def _step(sam_sets: NDArray[np.bool_]) -> Iterator[str]:
    color, batch = COLORS[0], (3, 7, 0, 10, 5, 8, 1, 11)
    plain = [sample for sample in batch if not sam_sets[sample]]
    steep = [sample for sample in batch if sam_sets[sample]]
    yield f'<line x1="24" y1="328" x2="{WIDTH - 24}" y2="328" stroke="{LINE}"/>'
    yield _text(MEMBERS, 360, "4  one step of member 0 after the partition", bold=True)
    yield _text(MEMBERS, 434, "a batch", PALE)
    for place, sample in enumerate(batch):
        yield _sample(MEMBERS + place * CELL, 444, sample, color if sam_sets[sample] else "")
    for target in (408, 492):
        yield _arrow(MEMBERS + 8 * CELL + 10, 444 + CELL / 2, TABLE + 20, target)
    for top, part in ((396, plain), (480, steep)):
        for place, sample in enumerate(part):
            yield _sample(TABLE + 32 + place * CELL, top, sample, color if sam_sets[sample] else "")
    yield _text(TABLE + 32, 386, "the plain part", PALE)
    yield _text(TABLE + 32, 470, "the SAM part", PALE)
    yield _arrow(TABLE + 36 + 5 * CELL, 408, 428)
    yield _arrow(TABLE + 36 + 5 * CELL, 492, 428)
    yield _text(440, 412, "gradients at w", color)
    yield _text(440, 488, "g at w, then gradients at", color)
    yield _text(440, 507, "w + rho g / |g|", color)
    for source in (408, 492):
        yield _arrow(656, source, 704, 444 + CELL / 2)
    yield _box(714, 424, 262, 62, color, PAPER, 6)
    yield _text(726, 449, "sum divided by the batch size:", color)
    yield _text(726, 471, "the direction of the optimizer step", color)


def _numbers(left: int) -> Iterator[str]:
    for sample in range(SCORES.shape[1]):
        yield _text(left + sample * CELL + CELL / 2, FIRST - 18, str(sample), PALE, size=11, middle=True)


def _sample(x: float, y: float, number: int, color: str) -> str:
    square = _box(x + 1, y + 1, CELL - 2, CELL - 2, color or LINE, color or PAPER, 2)
    return square + _text(x + CELL / 2, y + 16, str(number), PAPER if color else PALE, size=11, middle=True)


def _text(
    x: float, y: float, words: str, color: str = INK, *, size: int = 13, bold: bool = False, middle: bool = False
) -> str:
    more = (' font-weight="bold"' if bold else "") + (' text-anchor="middle"' if middle else "")
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}"{more}>{words}</text>'


def _box(
    x: float,
    y: float,
    width: float,
    height: float,
    line: str,
    fill: str,
    round_by: int,
    thick: float = 1.5,
    *,
    opacity: float = 1.0,
) -> str:
    faint = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_by}" fill="{fill}"{faint} '
        f'stroke="{line}" stroke-width="{thick:g}"/>'
    )


def _arrow(x: float, y: float, to_x: float, to_y: float | None = None) -> str:
    """Return an arrow; its head points to the right."""
    end = y if to_y is None else to_y
    return (
        f'<path d="M{x:g} {y:g} L{to_x - 6:g} {end:g}" stroke="{PALE}" stroke-width="1.5" fill="none"/>'
        f'<path d="M{to_x - 8:g} {end - 5:g} L{to_x:g} {end:g} L{to_x - 8:g} {end + 5:g} Z" fill="{PALE}"/>'
    )


if __name__ == "__main__":
    sys.exit(write_or_check({PICTURE: picture()}))
