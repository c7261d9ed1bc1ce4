"""Consoles that show the text of files and names as it is: it can neither style the output nor control the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from plateaux.core.formatting import printable


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
