"""Formats of a report, and the style of its figures: inline SVG for an HTML page, or SVG, PNG, and PDF files.

Inline SVG uses the CSS colors of the page, so it follows light and dark mode; files have a white background. Text stays
text. Colors are those of Okabe and Ito, safe for color-blind readers; dashes and markers distinguish the same series.
This module imports no torch, for the command line.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from plateaux.core.errors import RecipeError, suggest
from plateaux.core.formatting import pluralize, printable
from plateaux.core.imports import optional_import
from plateaux.loss_landscape.plot_style import COLORS, DASHES, INK, PAPER, RC_PARAMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Format = Literal["html", "md", "tex", "json", "csv"]
FORMATS: tuple[Format, ...] = ("html", "md", "tex", "json", "csv")
MAX_RUNS = 3  # runs with a section of details
Kind = Literal["svg", "png", "pdf"]
KINDS: tuple[Kind, ...] = ("svg", "png", "pdf")
FONT_SIZE: float = RC_PARAMS["font.size"]
WIDTH_IN = 4.8  # text stays readable on a phone
MAX_COLORED = len(COLORS)  # series with their own color; further series are gray
LEGEND_LINE_IN = 0.17
NO_LABELS: Mapping[str, str] = {}
GRAY, RULE = "#888888", "#dddddd"
MARKERS = "osD^vPX"
LABEL_CHARS = 32  # per line of a label
LABEL_LINES = 3
OTHER = "other"  # legend label of gray series
TWO_COLUMN_CHARS = 24  # longest label in a legend of two columns
PAGE_STYLE: Any = {
    **RC_PARAMS, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "text.parse_math": False,
    "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "axes.axisbelow": True, "legend.handlelength": 2.2,
    "axes.formatter.use_mathtext": False, "axes.unicode_minus": True, "lines.markersize": 4.5, "pdf.fonttype": 42,
}  # fmt: skip
# Colors that inline SVG takes from the CSS of the page.
CSS_COLORS = {
    INK: "currentColor", "#000000": "currentColor", RULE: "var(--rule)", PAPER: "var(--paper)",
    COLORS[0].lower(): "var(--blue)",  # too dark for a dark background
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """A figure with its name, title, and a caption that states what it shows."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def alt_text(self) -> str:
        """The text alternative for readers who cannot see the figure."""
        return f"{self.title}. {self.caption}"

    def inline_svg(self, prefix: str) -> str:
        """Return transparent SVG to embed in a page; `prefix` keeps its ids unique within the page."""
        return embed_svg(self._render("svg", "none", {"Date": None}).decode(), prefix)

    def file(self, kind: Kind) -> bytes:
        """Return the figure as a file with a white background; equal numbers give equal bytes."""
        metadata: dict[Kind, dict[str, str | None]] = {
            "svg": {"Date": None, "Title": self.title, "Description": self.caption},
            "png": {"Software": None},
            "pdf": {"CreationDate": None},
        }
        return self._render(kind, PAPER, metadata[kind])

    def _render(self, kind: Kind, background: str, metadata: dict[str, str | None]) -> bytes:
        buffer = BytesIO()
        with figure_style():
            self.figure.savefig(buffer, format=kind, metadata=metadata, facecolor=background)
        content = buffer.getvalue()
        return printable(content.decode()).encode() if kind == "svg" else content  # XML has no control characters


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply the style of reports; ignore glyphs that the font of matplotlib lacks, since a page has other fonts."""
    matplotlib = optional_import("matplotlib", extra="report")
    with matplotlib.rc_context(PAGE_STYLE), warnings.catch_warnings():
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
    """Return a figure and its axes, a single one or an array."""
    optional_import("matplotlib", extra="report")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height), layout=layout)
    return figure, figure.subplots(rows, columns, **options)


def finalize(name: str, title: str, caption: str, figure: Figure) -> ReportFigure:
    """Compute the layout once, since it takes longer than drawing, and return the finished figure."""
    for axes in figure.axes:
        _avoid_offset(axes.xaxis)
        _avoid_offset(axes.yaxis)
    _freeze_layout(figure)
    return ReportFigure(name, printable(title), printable(caption), figure)


def restyle(
    figures: Sequence[Figure],
    *,
    width: float | None = None,
    height: float | None = None,
    font: str | None = None,
    font_size: float = FONT_SIZE,
    labels: Mapping[str, str] = NO_LABELS,
) -> None:
    """Change finished figures; every label must be a text of at least one of them."""
    from matplotlib.font_manager import FontProperties, findfont, get_font_names
    from matplotlib.text import Text

    for name, value in (("width", width), ("height", height), ("font_size", font_size)):
        if value is not None and not 0 < value <= 100:
            raise RecipeError(f"figure option {name} = {value}: give a number above 0 and at most 100")
    texts = {_one_line(text.get_text()) for figure in figures for text in figure.findobj(Text)} - {""}
    if figures and (unknown := sorted(set(labels) - texts)):
        raise RecipeError(f"No figure has the text {unknown[0]!r}; {suggest(unknown[0], sorted(texts))}")
    try:
        findfont(FontProperties(family=font), fallback_to_default=False)
    except ValueError:
        raise RecipeError(f"matplotlib finds no font {font!r}; {suggest(font or '', get_font_names())}") from None
    for figure in figures:
        old_width, old_height = figure.get_size_inches()
        figure.set_size_inches(width or old_width, height or old_height * (width or old_width) / old_width)
        with figure_style():
            _replace_text(figure, font, font_size, lambda text: labels.get(_one_line(text), text))
            if figure.get_layout_engine() is not None:
                figure.set_layout_engine("constrained")
                _freeze_layout(figure)


def _replace_text(figure: Figure, font: str | None, font_size: float, rename: Callable[[str], str]) -> None:
    from matplotlib.text import Text
    from matplotlib.ticker import FixedLocator

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_locator(), FixedLocator):  # names of conditions
            axis.set_ticks(axis.get_ticklocs(), [rename(label.get_text()) for label in axis.get_ticklabels()])
    for text in figure.findobj(Text):
        text.set(text=rename(text.get_text()), fontsize=float(text.get_fontsize()) * font_size / FONT_SIZE)
        text.set_fontfamily(font or text.get_fontfamily())
    ticks: dict[str, Any] = {"labelsize": font_size, **({"labelfontfamily": font} if font else {})}
    for axes in figure.axes:  # also for ticks that are drawn later
        axes.tick_params(**ticks)


def _freeze_layout(figure: Figure) -> None:
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def line_style(position: int) -> dict[str, Any]:
    """Return the line style of the series at a position; series beyond the palette are gray."""
    if position >= MAX_COLORED:
        return {"color": GRAY, "linestyle": "-", "linewidth": 0.8, "alpha": 0.5, "zorder": 1}
    dash = DASHES[position % len(DASHES)]
    return {"color": COLORS[position], "linestyle": dash, "marker": MARKERS[position], "zorder": 2}


def legend_label(position: int, names: Sequence[str]) -> str | None:
    """Return the legend label of the series at a position; all gray series share one label with their count."""
    if position < MAX_COLORED:
        return wrap_label(names[position])
    return pluralize(len(names) - MAX_COLORED, OTHER) if position == MAX_COLORED else None


def legend(figure: Figure, axes: Axes) -> None:
    """Add a legend below the figure and increase its height; short labels go in two columns."""
    entries = list(zip(*axes.get_legend_handles_labels(), strict=True))
    entries.sort(key=lambda entry: entry[1].endswith((f" {OTHER}", f" {OTHER}s")))
    if entries:
        columns = 2 if max(len(name) for _, name in entries) <= TWO_COLUMN_CHARS and len(entries) > 1 else 1
        lines = sum(name.count("\n") for _, name in entries) - (-len(entries) // columns)
        figure.legend(*zip(*entries, strict=True), loc="outside lower left", ncols=columns)
        figure.set_figheight(figure.get_figheight() + LEGEND_LINE_IN * lines)


def wrap_label(name: str, width: int = LABEL_CHARS, lines: int = LABEL_LINES) -> str:
    """Return a name as a label: printable, wrapped, and without the leading underscore that hides it from legends.

    >>> wrap_label("width=16, method=SAM", 11), wrap_label("a" * 60, 5, 2), wrap_label("_hidden")
    ('width=16,\\nmethod=SAM', 'aaaaa\\n…aaaa', ' _hidden')
    """
    text = _one_line("".join(char if char.isprintable() else " " for char in name))
    pieces = wrap(text, width, break_on_hyphens=False)
    if len(pieces) > lines:  # keep both ends of a name that is too long
        length = width * lines
        pieces = wrap(f"{text[: length // 2]}…{text[-((length - 1) // 2) :]}", width, break_on_hyphens=False)[:lines]
    text = "\n".join(pieces)
    return f" {text}" if text.startswith("_") else text


def needs_log_scale(numbers: Sequence[float], factor: float = 20.0) -> bool:
    """Return whether positive numbers differ by more than a factor, so that a logarithmic scale is clearer."""
    return bool(numbers) and min(numbers) > 0 and max(numbers) > factor * min(numbers)


def set_log_scale(axis: Any) -> None:
    """Use a logarithmic scale with plain numbers as tick labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _avoid_offset(axis: Any) -> None:
    """Write full numbers as tick labels: an offset such as 1e-6 in the corner would overlap the axis label."""
    from matplotlib.ticker import FuncFormatter

    axis.get_tightbbox()
    if axis.get_offset_text().get_text():
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def embed_svg(svg: str, prefix: str) -> str:
    """Return SVG to embed in a page: no header or metadata, unique ids, the colors of the page, flexible width."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg)[^>]*?(viewBox="[^"]*")[^>]*>', r'\1 \2 aria-hidden="true">', svg, count=1)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{prefix}-', svg)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'(?:style|fill|stroke)="[^"]*"', lambda match: _use_css_colors(match[0]), svg)
    return re.sub(r' d="[^"]*"', lambda match: re.sub(r"(\.\d{2})\d+", r"\1", match[0]), svg)


def _use_css_colors(attribute: str) -> str:
    for color, css_color in CSS_COLORS.items():
        attribute = attribute.replace(color, css_color)
    return attribute
