"""Colors of the diagrams, and the style that replaces them if the reader prefers a dark color scheme."""

from __future__ import annotations

INK, PALE, LINE, PAPER, PANEL = "#22272e", "#5b6470", "#c4cad1", "#ffffff", "#f4f6f8"
BLUE, GREEN, PURPLE, ORANGE = "#1b6ca8", "#2e8b57", "#8e44ad", "#e66a12"
FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"

# Light color: dark color. Fills and strokes with the light color change in dark mode.
DARK = {
    INK: "#e6e9ee",
    PALE: "#a7b0bb",
    LINE: "#4b535e",
    PAPER: "#1d2128",
    PANEL: "#272c35",
    BLUE: "#5fb0ee",
    GREEN: "#63c78d",
    PURPLE: "#c58be0",
}


def dark_style() -> str:
    """Return a `style` element with the dark colors; CSS overrides the attributes `fill` and `stroke`."""
    rules = [f'[{name}="{light}"]{{{name}:{dark}}}' for light, dark in DARK.items() for name in ("fill", "stroke")]
    return "<style>@media (prefers-color-scheme: dark) {" + "".join(rules) + "}</style>"
