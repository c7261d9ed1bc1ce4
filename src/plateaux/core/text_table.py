"""Tables of text for terminals, Markdown, and reports, and a console that shows text from files as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from plateaux.core.formatting import escape_latex, escape_markdown, printable


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table; the best value of a column or row is shown in bold."""

    text: str
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text. The first cell of each row is the row's name."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    @classmethod
    def from_text(cls, title: str, header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Table:
        """Return a table of plain strings, with no best values.

        >>> Table.from_text("runs", ["", "loss"], [["a", "0.1"], ["b", ""]]).text_rows()
        [['a', '0.1'], ['b', '']]
        """
        return cls(title, header, [[Cell(text) for text in row] for row in rows], caption)

    def text_rows(self) -> list[list[str]]:
        """Return the text of all cells."""
        return [[cell.text for cell in row] for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data for JSON; `best` lists the row and column of every best cell."""
        best = [[i, j] for i, row in enumerate(self.rows) for j, cell in enumerate(row) if cell.is_best]
        rows = {"rows": self.text_rows(), "best": best}
        return {"title": self.title, "header": list(self.header), **rows, "caption": self.caption}

    def split_columns(
        self, *, max_width: int | None = None, max_columns: int | None = None, number_titles: bool = False
    ) -> list[Table]:
        """Return the table in parts of at most `max_width` characters or `max_columns` columns.

        Every part has the row names. Rows with no text in a part are left out of it; the caption follows the last part.
        """
        parts = self._column_groups(max_width, max_columns)
        tables = []
        for number, columns in enumerate(parts, start=1):
            rows = [[row[0], *(row[i] for i in columns)] for row in self.rows if any(row[i].text for i in columns)]
            title = f"{self.title} ({number} of {len(parts)})" if number_titles and len(parts) > 1 else self.title
            header = [self.header[0], *(self.header[i] for i in columns)]
            tables.append(Table(title, header, rows, self.caption if number == len(parts) else ""))
        return tables

    def _column_groups(self, max_width: int | None, max_columns: int | None) -> list[list[int]]:
        lines = [list(self.header), *self.text_rows()]
        widths = [max(len(line[i]) for line in lines) + 3 for i in range(len(self.header))]
        groups: list[list[int]] = [[]]
        for i in range(1, len(widths)):
            is_too_wide = (
                max_width is not None and widths[0] + sum(widths[j] for j in groups[-1]) + widths[i] > max_width
            )
            if groups[-1] and (is_too_wide or len(groups[-1]) == max_columns):
                groups.append([])
            groups[-1].append(i)
        return groups

    def to_rich(self) -> RichTable:
        """Return the table for a terminal; rows of an ensemble are bold."""
        table = RichTable(
            title=self.title, title_justify="left", caption=self.caption, caption_justify="left", pad_edge=False
        )
        for position, name in enumerate(self.header):
            table.add_column(name, justify="right" if position else "left", no_wrap=True)
        for row in self.rows:
            cells = [Text(cell.text, style="bold") if cell.is_best else cell.text for cell in row]
            table.add_row(*cells, style="bold" if row[0].text.startswith("ensemble") else None)
        return table

    def to_markdown(self, heading: str = "", *, text_columns: Collection[str] = ()) -> str:
        """Return the table as Markdown, with the best cells in bold.

        `heading` is the mark of the title's heading, such as `###`; without it the title is in bold. The first column
        and `text_columns` are aligned to the left, the others to the right, as numbers are.

        >>> print(Table("runs", ["", "loss"], [[Cell("a"), Cell("0.1", is_best=True)]]).to_markdown("###"), end="")
        ### runs
        <BLANKLINE>
        |  | loss |
        |---|---:|
        | a | **0.1** |
        """
        return "\n".join(self._markdown_lines(heading, text_columns)) + "\n"

    def _markdown_lines(self, heading: str, text_columns: Collection[str]) -> Iterator[str]:
        title = escape_markdown(self.title)
        yield f"{heading} {title}" if heading else f"**{title}**"
        yield ""
        yield "| " + " | ".join(map(escape_markdown, self.header)) + " |"
        yield "|---" + "".join("|---" if name in text_columns else "|---:" for name in self.header[1:]) + "|"
        for row in self.rows:
            cells = [f"**{escape_markdown(c.text)}**" if c.is_best else escape_markdown(c.text) for c in row]
            yield "| " + " | ".join(cells) + " |"
        if self.caption:
            yield from ("", escape_markdown(self.caption))

    def to_latex(self) -> str:
        """Return the table as a LaTeX float in the style of the package booktabs, with the best cells in bold."""
        lines = [[escape_latex(name) for name in self.header]]
        for row in self.rows:
            texts = [(escape_latex(cell.text), cell.is_best) for cell in row]
            lines.append([rf"\textbf{{{text}}}" if is_best else text for text, is_best in texts])
        head, *body = (" & ".join(line) + r" \\" for line in lines)
        caption = escape_latex(f"{self.title}. {self.caption}".strip())
        columns = "l" + "r" * (len(self.header) - 1)
        start = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\begin{{tabular}}{{{columns}}}"]
        rules = [r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
        return "\n".join([*start, *rules, r"\end{tabular}", r"\end{table}"]) + "\n"


class PlainConsole(Console):
    """A console without markup and emoji codes, on which control characters are visible and have no effect."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Turn a string into styled text, whose width is known."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object. All text passes here, whether it is a string or a cell of a table."""
        for segment in super().render(renderable, options):
            # Control segments move the cursor of live displays; they contain no text.
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
