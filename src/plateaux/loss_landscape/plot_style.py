"""Kinds of landscape plots, and colors and matplotlib settings of all figures; without torch, for the command line.

Colors are the palette of Okabe and Ito, safe for color-blind readers.
"""

from __future__ import annotations

from typing import Any

PLOT_KINDS = ("slices", "paths", "plane")
DEFAULT_LIMIT = 512  # samples of a plot
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY_BLUE, BLACK = COLORS
DASHES = ("-", "--", ":")
INK, PAPER = "#222222", "#ffffff"  # text and background
RC_PARAMS: Any = {
    "font.size": 9.0, "axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK,
    "lines.linewidth": 1.6, "legend.frameon": False, "legend.fontsize": 8.0, "grid.color": "#dddddd",
    "grid.linewidth": 0.6, "figure.facecolor": PAPER, "savefig.facecolor": PAPER, "figure.dpi": 160.0,
    "svg.fonttype": "none", "svg.hashsalt": "plateaux", "axes.formatter.useoffset": False,
}  # fmt: skip
