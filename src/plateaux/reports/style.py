"""One look for every figure of a report, and a figure's ways out: inside a page, or as a file for a paper.

In a page a figure is SVG with the page's own ink, so that it turns with light and dark; its text stays text. Colours
are Okabe and Ito's, safe for colour-blind eyes, and dashes and markers tell the same apart.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from plateaux.core.formatting import pluralize
from plateaux.core.optional import optional_import
from plateaux.core.plot_style import COLORS, DASHES, INK, PAPER, RC_PARAMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["svg", "png", "pdf"]
KINDS: tuple[Kind, ...] = ("svg", "png", "pdf")
WIDTH = 4.8  # inches: what a phone shows without making letters too small
SERIES = len(COLORS)  # that have a colour of their own; the others are drawn in grey
LINE = 0.17  # inches of a line of the legend
GREY, RULE = "#888888", "#dddddd"
MARKERS = "osD^vPX"
LABEL = 32  # characters of a line of a name beside a figure
LINES = 3  # of a name
OTHER = "other"  # a series without a colour of its own
BESIDE = 24  # characters of names that stand in two columns
PAGE_LOOK: Any = {
    **RC_PARAMS, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "text.parse_math": False,
    "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "axes.axisbelow": True, "legend.handlelength": 2.2,
    "axes.formatter.use_mathtext": False, "axes.unicode_minus": True, "lines.markersize": 4.5, "pdf.fonttype": 42,
}  # fmt: skip
# What a page draws in its own colours.
INKS = {
    INK: "currentColor", "#000000": "currentColor", RULE: "var(--rule)", PAPER: "var(--paper)",
    COLORS[0].lower(): "var(--blue)",  # too dark for a dark page
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """A figure under a name, its heading, and the sentence that says what it shows."""

    name: str
    title: str
    sentence: str
    figure: Figure

    def inline(self, mark: str) -> str:
        """Return the figure as SVG for the inside of a page, where `mark` tells it from all others."""
        return for_a_page(self.file("svg").decode(), mark)

    def file(self, kind: Kind) -> bytes:
        """Return the figure as a file; the same numbers give the same bytes."""
        made = BytesIO()
        facts = {"svg": {"Date": None}, "png": {"Software": None}, "pdf": {"CreationDate": None}}[kind]
        paper = "none" if kind == "svg" else PAPER
        with figure_style():
            self.figure.savefig(made, format=kind, metadata=facts, facecolor=paper)
        return made.getvalue()


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw in the one look; a letter that the font lacks is no reason to complain, for a page has other fonts."""
    matplotlib = optional_import("matplotlib", extra="report")
    with matplotlib.rc_context(PAGE_LOOK), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(
    height: float = 3.0,
    rows: int = 1,
    columns: int = 1,
    *,
    layout: Literal["constrained"] | None = "constrained",
    **options: Any,
) -> tuple[Figure, Any]:
    """Return a figure with its axes, one or an array of them."""
    optional_import("matplotlib", extra="report")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout=layout)
    return figure, figure.subplots(rows, columns, **options)


def finalize(name: str, title: str, sentence: str, figure: Figure) -> ReportFigure:
    """Lay everything out once and for all, which takes longer than drawing."""
    for axes in figure.axes:
        _told_whole(axes.xaxis)
        _told_whole(axes.yaxis)
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")
    return ReportFigure(name, title, sentence, figure)


def line_style(position: int) -> dict[str, Any]:
    """Return how the series at a position is drawn: beyond the colours there are, in grey."""
    if position >= SERIES:
        return {"color": GREY, "linestyle": "-", "linewidth": 0.8, "alpha": 0.5, "zorder": 1}
    dash = DASHES[position % len(DASHES)]
    return {"color": COLORS[position], "linestyle": dash, "marker": MARKERS[position], "zorder": 2}


def legend_label(position: int, names: Sequence[str]) -> str | None:
    """Return what a legend says of the series at a position: of those in grey, once how many they are."""
    if position < SERIES:
        return wrap_label(names[position])
    return pluralize(len(names) - SERIES, OTHER) if position == SERIES else None


def legend(figure: Figure, axes: Axes) -> None:
    """Put the names below the figure, which grows by as much: in two columns where they are short."""
    found = list(zip(*axes.get_legend_handles_labels(), strict=True))
    found.sort(key=lambda pair: pair[1].endswith((f" {OTHER}", f" {OTHER}s")))
    if found:
        columns = 2 if max(len(name) for _, name in found) <= BESIDE and len(found) > 1 else 1
        lines = sum(name.count("\n") for _, name in found) - (-len(found) // columns)
        figure.legend(*zip(*found, strict=True), loc="outside lower left", ncols=columns)
        figure.set_figheight(figure.get_figheight() + LINE * lines)


def wrap_label(name: str, most: int = LABEL, lines: int = LINES) -> str:
    """Return a name as a figure can show it: printable, in lines that are not too long, and not hidden from legends.

    >>> wrap_label("width=16, method=SAM", 11), wrap_label("a" * 60, 5, 2), wrap_label("_hidden")
    ('width=16,\\nmethod=SAM', 'aaaaa\\n…aaaa', ' _hidden')
    """
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
    pieces = wrap(text, most, break_on_hyphens=False)
    if len(pieces) > lines:  # what cannot be told in so many lines keeps its two ends
        room = most * lines
        pieces = wrap(f"{text[: room // 2]}…{text[-((room - 1) // 2) :]}", most, break_on_hyphens=False)[:lines]
    text = "\n".join(pieces)
    return f" {text}" if text.startswith("_") else text


def needs_log_scale(numbers: Sequence[float], factor: float = 20.0) -> bool:
    """Say whether numbers above zero differ so much that a logarithmic scale shows more."""
    return bool(numbers) and min(numbers) > 0 and max(numbers) > factor * min(numbers)


def logarithmic(axis: Any) -> None:
    """Make the scale of an axis logarithmic, with plain numbers at its ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda height, _: f"{height:g}"))
    axis.set_minor_locator(NullLocator())


def _told_whole(axis: Any) -> None:
    """Write small numbers whole at the ticks: a factor such as 1e-6 in the corner would lie upon the axis's name."""
    from matplotlib.ticker import FuncFormatter

    axis.get_tightbbox()
    if axis.get_offset_text().get_text():
        axis.set_major_formatter(FuncFormatter(lambda height, _: f"{height:g}"))


def for_a_page(svg: str, mark: str) -> str:
    """Return SVG that may stand inside a page: no head, names of its own, the page's ink, as wide as there is room."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg)[^>]*?(viewBox="[^"]*")[^>]*>', r'\1 \2 aria-hidden="true">', svg, count=1)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{mark}-\1"', svg)
    svg = re.sub(r"url\(#", f"url(#{mark}-", svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{mark}-', svg)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'(?:style|fill|stroke)="[^"]*"', lambda found: _inked(found[0]), svg)
    return re.sub(r' d="[^"]*"', lambda found: re.sub(r"(\.\d{2})\d+", r"\1", found[0]), svg)


def _inked(style: str) -> str:
    for colour, ink in INKS.items():
        style = style.replace(colour, ink)
    return style
